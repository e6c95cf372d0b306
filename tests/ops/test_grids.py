"""Grids of calls with many sequences or heads: a GPU takes 65,535 programs along the second and third axes."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kit.no_device import pretended_device
from onewave import ops
from onewave.compat.flash_attn import flash_attn_with_kvcache
from onewave.gpu import grid
from onewave.gpu.launch import launches_nowhere
from onewave.ops.append_kv.call import AppendCall
from onewave.ops.append_kv.choose import choose as choose_append
from onewave.ops.decode_attention.call import DecodeCall
from onewave.ops.decode_attention.choose import choose as choose_decode

# [batch, heads] of few and of many.
SHAPES = [(70_000, 1), (3_000, 32), (1, 70_000)]
DIM = 64


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Memory that nothing reads."""
    return torch.empty(*shape, dtype=dtype)


def prefill(batch: int, heads: int, **options: Any) -> None:
    q = empty(batch, heads, 8, DIM)
    ops.attention(q, q, q, **options)


def float8(batch: int, heads: int) -> None:
    q = empty(batch, heads, 8, DIM, dtype=torch.float8_e4m3fn)
    ops.attention_fp8(q, q, q, backend="gluon")


def packed(batch: int, heads: int) -> None:
    q, starts = empty(8 * batch, heads, DIM), empty(batch + 1, dtype=torch.int32)
    ops.attention_varlen(q, q, q, starts, starts, 8, 8)


def decode(batch: int, heads: int, queries: int = 8, backend: str = "auto") -> None:
    k, lengths = empty(batch, heads, 16, DIM), empty(batch, dtype=torch.int32)
    ops.decode_attention(empty(batch, heads, queries, DIM), k, k, lengths, backend=backend)


def one_kv_head(batch: int, heads: int) -> None:
    k, lengths = empty(batch, 1, 16, DIM), empty(batch, dtype=torch.int32)
    ops.decode_attention(empty(batch, 30 * heads, 8, DIM), k, k, lengths)


def paged(batch: int, heads: int) -> None:
    k, table = empty(batch, heads, 16, DIM), empty(batch, 1, dtype=torch.int32)
    ops.decode_attention(empty(batch, heads, 1, DIM), k, k, empty(batch, dtype=torch.int32), block_table=table)


def kvcache(batch: int, heads: int) -> None:
    k = empty(batch, 16, heads, DIM)
    flash_attn_with_kvcache(empty(batch, 2, heads, DIM), k, k, cache_seqlens=empty(batch, dtype=torch.int32))


def masked(batch: int, heads: int) -> None:
    cache, lengths = empty(batch, heads, 16, DIM), empty(batch, dtype=torch.int32)
    ops.masked_multihead_attention(empty(batch, 3 * heads, DIM), cache, cache, lengths)


def merge(batch: int, heads: int) -> None:
    ops.merge_attention(empty(2, batch, heads, 8, DIM), empty(2, batch, heads, 8, dtype=torch.float32))


def append(batch: int, heads: int) -> None:
    cache, places = empty(batch, heads, 16, DIM), empty(batch, dtype=torch.int64)
    ops.append_kv(empty(batch, 3 * heads * DIM), None, cache, cache, places, places, num_heads=heads)


def rows(batch: int, heads: int) -> None:
    x = empty(batch, heads, 2 * DIM)
    ops.rms_norm(x, empty(2 * DIM), 1e-5)
    ops.swiglu(x)
    ops.linear(x[0], empty(heads, 2 * DIM))


CALLS: dict[str, Callable[[int, int], None]] = {
    "Hopper's attention": lambda *shape: prefill(*shape, backend="gluon"),
    "portable attention": lambda *shape: prefill(*shape, backend="triton"),
    "m16n8k16 attention": lambda *shape: prefill(*shape, backend="mma"),
    "attention with a bias": lambda *shape: prefill(*shape, bias=empty(8, 8)),
    "attention of float8": float8,
    "packed attention": packed,
    "decode attention": decode,
    "decode attention of one query": lambda *shape: decode(*shape, 1),
    "decode attention by Triton": lambda *shape: decode(*shape, backend="triton"),
    "decode attention of one KV head": one_kv_head,
    "decode attention of blocks": paged,
    "flash-attn's cache": kvcache,
    "masked attention": masked,
    "merged attention": merge,
    "appended keys": append,
    "rows": rows,
}


def grids_of(call: Callable[[], object]) -> list[tuple[int, ...]]:
    """Grids of a call's launches, on an H200 that is not there."""
    found: list[tuple[int, ...]] = []

    def run(kernel: object, *args: object, grid: tuple[int, ...], **named: object) -> None:
        found.append(grid)

    with patch.object(InterpretedFunction, "run", run), launches_nowhere() as compiled, pretended_device():
        call()
    return [*found, *(launch.grid for launch in compiled)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_grid_takes_as_many_sequences_and_heads_as_memory_does(name: str, shape: tuple[int, int]) -> None:
    grids = grids_of(lambda: CALLS[name](*shape))
    assert grids
    for first, *others in grids:
        assert 0 < first < 2**31
        assert all(0 < programs <= 65_535 for programs in others), grids


def test_a_wide_row_of_swiglu_has_its_pieces_along_the_first_axis() -> None:
    assert grids_of(lambda: ops.swiglu(empty(1, 2 * 70_000 * 512))) == [(70_000, 1)]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).half()


def decoded() -> tuple[Tensor, ...]:
    from onewave.base.device import Device
    from onewave.ops.decode_attention.triton import launch

    k, lengths = random(2, 3, 300, 16), torch.tensor([300, 5], dtype=torch.int32)
    call = DecodeCall(random(2, 6, 2, 16), k, k.flip(2), lengths, backend="triton", wants_lse=True)
    call = DecodeCall(**(vars(call) | {"described": Device((8, 0), 8)}))
    out, lse = launch.run(call, choose_decode(call))
    assert lse is not None
    return out, lse


def appended() -> tuple[Tensor, ...]:
    from onewave.base.device import Device
    from onewave.ops.append_kv import triton_impl

    caches, places = [torch.zeros(3, 2, 4, 16).half() for _ in "kv"], torch.tensor([2, 0, 1])
    call = AppendCall(random(3, 8 * 16), None, *caches, places, places, num_heads=4, described=Device((9, 0), 1))
    return triton_impl.run(call, choose_append(call)), *caches


def multiplied() -> tuple[Tensor, ...]:
    from onewave.ops.swiglu import triton_impl

    return (triton_impl.swiglu(random(3, 2 * 1100)),)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
@pytest.mark.parametrize("call", [decoded, appended, multiplied])
def test_swapped_axes_change_no_bit(call: Callable[[], tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    right = call()
    monkeypatch.setattr(grid, "MAX_SECOND", 1)
    assert grid.grid_of(1, 2) == ((2, 1), 1)
    for swapped, plain in zip(call(), right, strict=True):
        assert torch.equal(swapped, plain)
