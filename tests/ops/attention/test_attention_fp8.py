"""Attention in float8 without a GPU: the contract, what the values' kernel writes, and what the kernel compiles to."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops.attention.fp8 import kernel as fp8_kernel_impl
from onewave.ops.attention.fp8.kernel import turn_values
from onewave.ops.attention.fp8.op import attention_fp8
from onewave.ops.attention.fp8.plan import KEYS, ROWS, WARPGROUPS
from onewave.ops.attention.masks import Options, visible_keys
from onewave.ops.attention.reference import attention as in_torch

FP8 = torch.float8_e4m3fn
ONES = torch.ones(2)


def stored(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(FP8)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("mask", [{}, {"causal": True, "softcap": 5.0}, {"window": (7, 3), "align": "top-left"}])
def test_scales_are_what_a_stored_one_stands_for(mask: dict[str, Any], backend: str) -> None:
    q, k, v = stored(2, 4, 30, 32, seed=0), stored(2, 2, 50, 32, seed=1), stored(2, 2, 50, 32, seed=2)
    q_scale, k_scale, v_scale = torch.tensor([0.5, 1.0, 2.0, 0.25]), torch.tensor([2.0, 0.5]), torch.tensor([3.0, 0.1])
    scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    out, lse = attention_fp8(q, k, v, **scales, **mask, return_lse=True, backend=backend)
    wide = [t.float() * s.view(-1, 1, 1) for t, s in ((q, q_scale), (k, k_scale), (v, v_scale))]
    exact, exact_lse = in_torch(*wide, **mask)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(lse, exact_lse, atol=3e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_packed_sequences_are_each_attended_to_alone(backend: str) -> None:
    lengths, key_lengths = [3, 0, 40], [30, 2, 40]
    starts, key_starts = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths, key_lengths))
    q, k, v = stored(43, 4, 32, seed=0), stored(72, 2, 32, seed=1), stored(72, 2, 32, seed=2)
    packing: dict[str, Any] = {
        "cu_seqlens_q": starts, "cu_seqlens_k": key_starts, "max_seqlen_q": 40, "max_seqlen_k": 40,
    }  # fmt: skip
    out = attention_fp8(q, k, v, causal=True, backend=backend, **packing)
    for row, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
        at, key_at = int(starts[row]), int(key_starts[row])
        alone = [t.transpose(0, 1)[None] for t in (q[at : at + n], k[key_at : key_at + m], v[key_at : key_at + m])]
        one = attention_fp8(*alone, causal=True, backend=backend)
        torch.testing.assert_close(one[0].transpose(0, 1), out[at : at + n], atol=2e-2, rtol=2e-2)


def test_a_warpgroup_takes_the_key_tiles_that_its_rows_see_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = SimpleNamespace(minimum=min, maximum=max, where=lambda condition, yes, no: yes if condition else no)
    monkeypatch.setattr(fp8_kernel_impl, "gl", numbers)
    draw, keys, high = random.Random(0), KEYS, ROWS * WARPGROUPS
    passed = 0
    for _ in range(300):
        rows, num_keys = draw.choice([1, 63, 192, 300, 700]), draw.choice([1, 128, 500, 900])
        wanted = Options(1.0, draw.choice([None, 5, 150, 400]), draw.choice([None, 0, 0, 200]), draw.random() < 0.5)
        shift = wanted.shift(rows, num_keys)
        seen = visible_keys(wanted, rows, num_keys, torch.device("cpu"))
        problem = SimpleNamespace(
            BN=keys, LEFT=wanted.left is not None, RIGHT=wanted.right is not None, left=wanted.left, right=wanted.right
        )
        for tile in range(0, rows, high):
            end = num_keys if wanted.right is None else min(num_keys, min(tile + high, rows) + shift + wanted.right)
            begin = 0 if wanted.left is None else max(tile + shift - wanted.left, 0) // keys
            count = max(-(-max(end, 0) // keys) - begin, 1)
            for first in range(tile, tile + high, ROWS):
                start, stop = fp8_kernel_impl.steps_of.fn(problem, first, rows, num_keys, shift, begin, count)
                assert 0 <= start <= stop <= count
                part = torch.ones(1, num_keys) if seen is None else seen[first : first + ROWS]
                any_row = part[: max(rows - first, 0)].any(0).nonzero().flatten()
                tiles = sorted({int(key) // keys for key in any_row})
                taken = [begin + count - 1 - step for step in range(start, stop)]
                assert set(tiles) <= set(taken)
                if tiles:
                    assert taken == tiles[::-1]
                passed += count - len(taken)
    assert passed > 500


def test_a_compiler_sees_one_operator() -> None:
    q, k = stored(1, 2, 20, 32, seed=0), stored(1, 2, 20, 32, seed=1)
    expected = attention_fp8(q, k, k, causal=True)
    compiled = torch.compile(attention_fp8, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, k, causal=True), expected)


@pytest.mark.parametrize("with_lse", [False, True])
def test_its_registration_is_sound(with_lse: bool) -> None:
    q, k = stored(1, 2, 20, 32, seed=0), stored(1, 2, 20, 32, seed=1)
    tensors = (q, k, k, ONES, ONES, ONES, None, None, 0, 0, None)
    plain = (0.2, None, 0, False, None, torch.bfloat16, "auto", with_lse)
    # PyTorch's own check of the schema multiplies its inputs, which float8 can't.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.onewave.attention_fp8.default, (*tensors, *plain), test_utils=checks)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": torch.zeros(1, 2, 5, 32)}, UnsupportedError, "dtype of q: torch.float32"),
        ({"k": stored(1, 2, 5, 48, seed=0)}, ShapeError, "k and v of one shape"),
        ({"q": stored(1, 3, 5, 32, seed=0)}, ShapeError, "3 query heads, 2 KV heads"),
        ({"q_scale": torch.ones(3)}, ShapeError, r"q_scale: torch.float32 \(3,\)"),
        ({"v_scale": torch.ones(2).double()}, ShapeError, "v_scale"),
        ({"scale": 0.0}, InvalidArgumentError, "greater than 0"),
        ({"out_dtype": torch.float32}, UnsupportedError, "out_dtype"),
        ({"backend": "triton"}, InvalidArgumentError, "auto, gluon, reference"),
        ({"backend": "gluon"}, UnsupportedError, "tensors on a CPU"),
        ({"cu_seqlens_q": torch.zeros(2).int()}, ShapeError, "tokens, heads, head_dim"),
    ],
)
def test_wrong_calls_are_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {name: stored(1, 2, 5, 32, seed=0) for name in "qkv"} | change
    with pytest.raises(error, match=words):
        attention_fp8(**given)


@pytest.mark.parametrize("given", [{}, {"max_seqlen_q": 3}, {"max_seqlen_k": 3}])
def test_packed_sequences_need_their_longest_named(given: dict[str, int]) -> None:
    """Rows beyond the longest stay unwritten, so a default would leave the output as it was."""
    starts, q = torch.tensor([0, 3, 5]).int(), stored(5, 2, 32, seed=0)
    with pytest.raises(InvalidArgumentError, match="max_seqlen_q, max_seqlen_k"):
        attention_fp8(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, **given)


@pytest.mark.parametrize("head_dim", [160, 40])
def test_head_dims_that_the_kernel_has_not_are_refused(head_dim: int) -> None:
    q = stored(1, 2, 5, head_dim, seed=0)
    with pytest.raises(UnsupportedError, match=f"head_dim: {head_dim}; allowed: multiples of 16 up to 128"):
        attention_fp8(q, q, q)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
@pytest.mark.parametrize("packed", [False, True])
def test_values_are_turned_in_the_order_of_a_threads_scores(packed: bool) -> None:
    heads, head_dim, keys = 2, 48, 128
    lengths, queries = ([200, 0, 130], [150, 3, 130]) if packed else ([300], [300])
    tokens = sum(lengths)
    v = torch.randint(1, 255, (tokens, heads, head_dim), dtype=torch.uint8)
    starts, query_starts = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths, queries))
    tiles = tokens // keys + len(lengths) if packed else -(-tokens // keys)
    turned = torch.full((heads, tiles, 128, keys), 7, dtype=torch.uint8)
    left, first = 60, 20
    turn_values[(tiles, heads)](
        v, turned, query_starts, starts, 0, head_dim, heads * head_dim, tokens, first, len(lengths), 3, tiles, left, 0,
        head_dim=head_dim, D=128, BN=keys, RAGGED=packed, TOP_LEFT=False, LEFT=True, RIGHT=True, AXIS=0,
    )  # fmt: skip
    at = torch.arange(keys)
    # Two pairs of neighbours that a thread holds, eight keys apart, follow each other.
    key_of = at // 16 * 16 + at // 2 % 2 * 8 + at // 4 % 4 * 2 + at % 2
    assert torch.equal(key_of.sort().values, at)
    for row, (n, m) in enumerate(zip(queries, lengths, strict=True)):
        begin = max(0, m - n - left) if packed else first
        for own in range(-(-m // keys)):
            place = (int(starts[row]) // keys + row if packed else 0) + own
            expected = torch.zeros(keys, heads, 128, dtype=torch.uint8)
            low, high = max(begin, own * keys), min(m, own * keys + keys)
            part = v[int(starts[row]) + low : int(starts[row]) + high]
            expected[low - own * keys : high - own * keys, :, :head_dim] = part
            assert torch.equal(turned[:, place], expected[key_of].permute(1, 2, 0)), (row, own)
