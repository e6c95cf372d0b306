"""post_attention without a GPU: what it means, what it refuses, what explain says of it."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.operands.random import randn
from kit.paths import ROOT
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops import PostAttentionWeights, add_rms_norm, explain, linear, post_attention, swiglu
from onewave.ops.linear import linear_of_rows
from onewave.ops.post_attention import measured, post_attention_rows
from onewave.ops.post_attention.measured import MEASURED, Layer, Measured, fastest, table_lines
from onewave.ops.quantize_rows import QuantizedRows
from onewave.ops.scaled_linear import ScaledMatrix, ScaledPart

H200 = Layer(4096, 4096, 14336, "bfloat16", "NVIDIA H200")


def operands(bias: bool = False) -> tuple[Tensor, Tensor, PostAttentionWeights]:
    o, gate_up, down = randn(128, 64, seed=1), randn(384, 128, seed=2), randn(128, 192, seed=3)
    biases = (randn(128, seed=4), randn(384, seed=5), randn(128, seed=6)) if bias else ()
    weights = PostAttentionWeights(o, randn(128, seed=7), gate_up, down, randn(128, seed=8), *biases)
    return randn(5, 64, seed=9), randn(5, 128, seed=10), weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", ["auto", "separate", "reference"])
def test_it_is_the_operators_one_after_the_other(backend: str, bias: bool) -> None:
    attended, residual, weights = operands(bias)
    x, stream = add_rms_norm(linear(attended, weights.o, weights.o_bias), residual, weights.post_norm, 1e-5)
    update = linear(swiglu(linear(x, weights.gate_up, weights.gate_up_bias)), weights.down, weights.down_bias)
    expected = add_rms_norm(update, stream, weights.next_norm, 1e-5)
    for found, right in zip(post_attention(attended, residual, weights, 1e-5, backend=backend), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-3)


def test_rows_come_quantised_where_the_next_matrix_would_quantise_them() -> None:
    attended, residual, weights = operands()
    plain, total = post_attention(attended, residual, weights, 1e-5)
    codes = torch.ones(8, 128, dtype=torch.int8)
    for x_scale in (None, torch.ones(1)):
        matrix = ScaledMatrix((ScaledPart(codes, torch.ones(8), x_scale),))
        followed = replace(weights, next_matrix=matrix)
        found, stream = post_attention_rows(attended, residual, followed, 1e-5)
        assert torch.equal(stream, total)
        assert torch.equal(post_attention(attended, residual, followed, 1e-5)[0], plain)
        assert isinstance(found, QuantizedRows) == (x_scale is None)
        assert torch.equal(linear_of_rows(found, matrix), matrix.multiply(plain))


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        ({}, {"backend": "wave"}, InvalidArgumentError, "backend: 'wave'"),
        ({}, {"backend": "separate", "order": "zigzag"}, InvalidArgumentError, "order: 'zigzag'"),
        ({}, {"backend": "reference", "policy": "rows"}, InvalidArgumentError, "policy: 'rows'"),
        ({}, {"backend": "chain"}, UnsupportedError, "torch.float32 with"),
        ({"down": torch.zeros(128, 191)}, {"backend": "separate"}, ShapeError, "down"),
        ({"post_norm": torch.zeros(127)}, {"backend": "reference"}, ShapeError, "norms"),
        ({"o": torch.zeros(128, 64, dtype=torch.float64)}, {"backend": "separate"}, UnsupportedError, "one dtype"),
    ],
)
def test_what_it_can_not_take_is_refused_by_name(
    change: dict[str, Tensor], options: dict[str, str], error: type[Exception], words: str
) -> None:
    attended, residual, weights = operands()
    with pytest.raises(error, match=words):
        post_attention(attended, residual, replace(weights, **change), 1e-5, **options)


def test_auto_takes_one_launch_where_it_was_ahead_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        Measured(H200, 1024, 100.0, 103.0, 104.0, 101.0, 97.0, "a"),
        Measured(H200, 2048, 200.0, 203.0, 208.0, 199.0, 196.0, "b"),
        Measured(H200, 4096, 400.0, 399.0, 410.0, 400.0, 380.0, "c"),
        Measured(H200, 8192, 800.0, 801.0, 799.0, 900.0, 760.0, "d"),
    )
    monkeypatch.setattr(measured, "MEASURED", rows)
    taken = {count: fastest(count, H200) for count in (512, 1024, 1500, 2048, 4096, 5000, 8192, 9000)}
    assert [count for count, name in taken.items() if name == "chain"] == [1024, 4096, 5000, 8192]
    assert fastest(4096, H200._replace(dtype="float16")) == "separate"
    assert sum("1.050 x as fast: chain (c)" in line for line in table_lines(H200)) == 1
    assert sum("separate (b)" in line for line in table_lines(H200._replace(gpu=None))) == 1


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.rows}-{row.layer.hidden}")
def test_every_row_of_the_table_is_what_the_ledger_has(row: Measured) -> None:
    path, _, lines = row.source.partition(":")
    first, last = map(int, lines.split("-"))
    found: dict[str, float] = {}
    for line in (ROOT / path).read_text().splitlines()[first - 1 : last]:
        record = json.loads(line)
        sizes = "x".join(map(str, (row.rows, *row.layer[:3])))
        assert (record["metric"], record["unit"]) == ("post_attention", "us")
        assert (record["device_name"], record["extra"]["dtype"]) == (row.layer.gpu, row.layer.dtype)
        assert record["extra"]["shape"] == sizes
        found[record["extra"]["implementation"].replace(", skewed, row, 128x256", "")] = record["p50"]
    times = {
        "separate": row.separate_us, "separate, two streams": row.separate_two_us, "cuBLAS": row.cublas_us,
        "cuBLAS, two streams": row.cublas_two_us, "chain": row.chain_us,
    }  # fmt: skip
    assert found == {name: pytest.approx(time, abs=0.051) for name, time in times.items()}
    assert row.best == (
        "chain" if row.chain_us < 0.98 * min(t for n, t in times.items() if n != "chain") else "separate"
    )


def test_matrices_that_a_stream_keeps_unpacked_are_taken_for_plain_ones() -> None:
    *_, weights = operands()
    kept: dict[int, Tensor | None] = {}

    def in_a_stream(matrix: object) -> Any:
        made = SimpleNamespace(stream=SimpleNamespace(kept=lambda asked: kept[id(asked)]))
        kept[id(made)] = matrix
        return made

    o, down = in_a_stream(weights.o), in_a_stream(weights.down)
    packed = replace(weights, o=o, down=down)
    found = packed.unpacked()
    assert found.is_plain
    assert found.o is weights.o
    assert found.down is weights.down
    kept[id(down)] = None
    assert packed.unpacked() is packed


def test_explain_says_what_a_named_launch_would_be() -> None:
    found = explain("post_attention", (512, 640), (640, 640), (1280, 640), device="cuda:sm_90", backend="chain")
    assert found.backend == "chain"
    assert found.programs == "132"
    assert "proved" in str(found)
    assert explain("post_attention", (512, 640), (640, 640), (1280, 640), device="cpu").backend == "separate"
    with pytest.raises(UnsupportedError, match="chain"):
        explain("post_attention", (512, 640), (640, 640), (1280, 640), device="cuda:sm_80", backend="chain")
