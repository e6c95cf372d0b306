"""Support of Hopper's decode kernel, and the bytes that it keeps under way: plain arithmetic on shapes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.ops.decode_attention.triton.plan import MAX_ROWS_LOOKED_AT, DecodePlan

_ALIGNED_BYTES = 16
_MAX_STRIDE = 1 << 39
_DTYPES = (torch.float16, torch.bfloat16)
_BYTES = (torch.int8, torch.float8_e4m3fn)
# Padded.
_HEAD_DIMS = (64, 128)
# TMA's boxes of pages have whole rows of the 128-byte pattern in which shared memory repeats.
_SMALLEST_PAGE = 8
# They are the grid's second axis.
_MAX_KV_HEADS = 65_535
# Keys of a program that are soon read.
_SHORT_ROW_KEYS = 512
# (rows, registers in which the loading warp works out its share of so many without a spill; 64 are too few for 256).
_LOADER = ((64, 40), (128, 48), (MAX_ROWS_LOOKED_AT, 72))


@dataclass(frozen=True)
class StreamCall:
    """A call as the choice sees it. dtype, kv_dtype: of the queries and of the cache; packed: K's layout.

    block_size: keys of a block, and paged: whether a row has several. scaled: whether keys and values have scales.
    strides: why TMA can't address the cache.
    """

    capability: tuple[int, int]
    rows: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    packed: bool
    block_size: int
    paged: bool
    scaled: bool = False
    strides: str | None = None


@dataclass(frozen=True)
class StreamTile:
    """stages: places in shared memory; flight: tiles under way; registers: of a thread at the start; loader: of one of
    the loading warp's."""

    stages: int
    flight: int
    registers: int = 128
    loader: int = 40


def stream_tile(rows: int, capacity: int, shares: int, kv_itemsize: int = 2) -> StreamTile:
    """The kernel's constants. shares: of plan.shares. kv_itemsize: bytes of a cached number."""
    # Two tiles in flight keep the memory busy. With more, SMs of smaller GPCs end a tenth earlier and all wait for the
    # rest (docs/log/decode-attention.md). A third buffer holds the tile being worked on, and a fourth hides how long
    # that takes. A program with a few tiles does without: with three buffers the next launch's programs can begin
    # beside this one's.
    few = rows * capacity <= shares * _SHORT_ROW_KEYS
    stages = 3 if few else 4
    if kv_itemsize == 1:
        # Tiles have half the bytes, and widening takes as long as loading them: two programs an SM share both.
        stages = 6
    return StreamTile(stages, 2, loader=next(registers for most, registers in _LOADER if rows <= most))


def refusal(call: StreamCall, plan: DecodePlan) -> str | None:
    """Return why the kernel does not take a call, None if it does."""
    if call.capability[0] != 9:
        return f"sm_{call.capability[0]}{call.capability[1]}: needs sm_90"
    if call.dtype not in _DTYPES or call.kv_dtype not in (call.dtype, *_BYTES):
        names = (str(dtype).removeprefix("torch.") for dtype in (call.dtype, call.kv_dtype))
        return "queries in {} and a cache in {}: needs both in the same 16 bits, or a cache in 8".format(*names)
    if call.scaled and call.kv_dtype is call.dtype:
        return "scales of keys and values in 16 bits: takes none"
    if call.packed:
        return "packed keys: needs [.., capacity, head_dim]"
    if plan.block_d not in _HEAD_DIMS:
        return f"head_dim padded to {plan.block_d}: needs {_HEAD_DIMS[0] // 2 + 1} to 128"
    if plan.block_m > 8:
        return f"{plan.block_m} query rows a KV head: takes up to 8"
    if plan.num_kv_heads * plan.tiles > _MAX_KV_HEADS:
        return f"{plan.num_kv_heads} KV heads: takes up to {_MAX_KV_HEADS}"
    if call.rows > MAX_ROWS_LOOKED_AT:
        return f"{call.rows} rows: takes up to {MAX_ROWS_LOOKED_AT}, whose lengths a program looks at"
    if call.paged and plan.block_n % call.block_size and call.block_size % plan.block_n:
        return f"pages of {call.block_size}: needs multiples or divisors of {plan.block_n} keys"
    if call.paged and call.block_size < _SMALLEST_PAGE:
        return f"pages of {call.block_size}: needs at least {_SMALLEST_PAGE} keys"
    return call.strides


def undescribable(*caches: Tensor) -> str | None:
    """Why TMA can't address one of the caches, None if it can all."""
    for cache in caches:
        aligned = _ALIGNED_BYTES // cache.element_size()
        steps = zip(cache.shape[:-1], cache.stride()[:-1], strict=True)
        rows = all(n == 1 or (0 < step < _MAX_STRIDE and step % aligned == 0) for n, step in steps)
        if not cache.numel():
            return "a cache without a single key: needs some"
        if cache.data_ptr() % _ALIGNED_BYTES or not rows:
            return f"keys must lie at multiples of 16 bytes and not be expanded, not strides {tuple(cache.stride())}"
    return None
