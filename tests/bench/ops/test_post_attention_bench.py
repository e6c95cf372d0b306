"""`bench ops post-attention`: its arrangements compute one thing, its shapes and what a line counts."""

import pytest
import torch

from onewave.base.errors import InvalidArgumentError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import summarize
from onewave.bench.ops import post_attention as bench
from onewave.bench.ops.ffn import Arrangement, FFNResult
from onewave.bench.ops.post_attention import SEPARATE, SWEEP, LayerShape
from onewave.cli.bench.operators.ffn import LAYER, _shapes

CPU = torch.device("cpu")


def test_all_arrangements_compute_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_chain", lambda operands: Arrangement("chain", [], []))
    ways = LayerShape(300, 128, 192, attended=64).arrangements(CPU, torch.float32, copies=2)
    assert [way.name for way in ways] == ["chain", "cuBLAS, two streams", "cuBLAS", "separate, two streams", SEPARATE]
    *_, right = (way.calls[1]() for way in ways[1:])
    for way in ways[1:]:
        found = way.calls[1]()
        if "two" in way.name:
            found = tuple(map(torch.cat, zip(*found, strict=True)))
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    few = LayerShape(255, 128, 192, attended=64).arrangements(CPU, torch.float32, copies=1)
    assert [way.name for way in few] == ["chain", "cuBLAS", SEPARATE]


def test_shapes_are_read_and_counted() -> None:
    shape = LayerShape(1024, 128, 192, attended=64)
    assert shape.flops == 2 * 1024 * 128 * (3 * 192 + 64)
    assert shape.least_bytes == 2 * 128 * (3 * 192 + 64) + 1024 * (2 * 64 + 10 * 128)
    ceiling = Ceiling("bf16 matmul", 800.0, "TFLOP/s", "a test", summarize([800.0]))
    line = FFNResult(shape, "chain", summarize([1e-3]), 2e-3).measurement("bfloat16", ceiling)
    assert (line.metric, line.extra["times_as_fast_as_separate"]) == ("post_attention", 2.0)
    assert _shapes(LAYER, ["1024,64,128,192"]) == [shape]
    assert len(_shapes(LAYER, None)) == len(SWEEP) == 16
    for text in ("1024,64,128", "0,64,128,192", "8,64,64,gated"):
        with pytest.raises(InvalidArgumentError, match="rows,attended"):
            _shapes(LAYER, [text])
