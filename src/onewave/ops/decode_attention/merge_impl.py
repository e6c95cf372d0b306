"""What becomes of a row's partial results, in Triton: where its splits lie, their merge, and the finished row."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# (Triton ships no type information.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

__all__ = ["finish", "merge_kernel", "splits"]

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def splits(length, window, num_queries, SPLIT: tl.constexpr, SMALLEST: tl.constexpr, DOUBLINGS: tl.constexpr, TARGET):
    """(first visible key, keys a split, first split, number of splits) of rows with `length` keys.

    A row without keys has one empty split, which writes its zeros; a negative length has none at all.
    """
    first_key = tl.maximum(length - (num_queries - 1) - window, 0)
    if SPLIT > 0:
        size = length * 0 + SPLIT
    else:
        size = length * 0 + SMALLEST
        for _ in tl.static_range(DOUBLINGS):
            size = tl.where(size * TARGET < length - first_key, size * 2, size)
    first_split = first_key // size
    count = tl.maximum((length + size - 1) // size - first_split, 1)
    return first_key, size, first_split, tl.where(length < 0, 0, count)


@triton.jit
def _quantised(x, MAX_BOUND, MIN_BOUND, HALF_AWAY: tl.constexpr):
    """x rounded to an integer, half to even or away from zero, and clipped; int8."""
    if HALF_AWAY:
        magnitude = tl.floor(tl.abs(x))
        # The fraction decides: x + 0.5 would round 0.49999997 up.
        magnitude = tl.where(tl.abs(x) - magnitude >= 0.5, magnitude + 1.0, magnitude)
        rounded = tl.where(x < 0, -magnitude, magnitude)
    else:
        # Adding and taking away 1.5 * 2^23 leaves no fraction; larger values have none.
        rounded = tl.where(tl.abs(x) < 4194304.0, (x + 12582912.0) - 12582912.0, x)
    return tl.minimum(tl.maximum(rounded, MIN_BOUND), MAX_BOUND).to(tl.int8)


@triton.jit
def finish(
    acc,
    top,
    total,
    row,
    head,
    query,
    dim,
    inside,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    shift_ptr,
    smooth_ptr,
    stride_out_row,
    stride_out_head,
    stride_out_query,
    num_heads,
    num_queries,
    head_dim,
    out_scale,
    max_bound,
    min_bound,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    QUANTISED: tl.constexpr,
    HALF_AWAY: tl.constexpr,
):
    """Normalise and write the rows of one tile; head, query: [rows of the tile], inside: [rows, dims]."""
    row64 = row.to(tl.int64)
    real = tl.max(inside.to(tl.int32), axis=1) > 0
    seen = total > 0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * _LOG2E
        highest = tl.maximum(top, sink)
        # A row that sees no key stays empty whatever its sink.
        keep = tl.where(seen, tl.exp2(top - highest), 0.0)
        total = total * keep + tl.exp2(sink - highest)
        acc = acc * keep[:, None]
        top = highest
    if HAS_LSE:
        lse = tl.where(seen, (top + tl.log2(total)) * _LN2, _NEGATIVE_INFINITY)
        tl.store(lse_ptr + (row64 * num_heads + head) * num_queries + query, lse, mask=real)
    value = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
    channel = head[:, None] * head_dim + dim[None, :]
    if HAS_SHIFT:
        value += tl.load(shift_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_SMOOTH:
        value *= tl.load(smooth_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    at = out_ptr + row64 * stride_out_row + (head * stride_out_head + query * stride_out_query)[:, None] + dim[None, :]
    if QUANTISED:
        tl.store(at, _quantised(max_bound * out_scale * value, max_bound, min_bound, HALF_AWAY), mask=inside)
    else:
        tl.store(at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _merged(part_ptr, stats_ptr, first_at, count, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr):
    """(output, maximum, sum) of `count` partials that lie one after another, merged in order, UNROLL at a time."""
    member, dim = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_H], _NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for begin in range(0, count, UNROLL):
        split = begin + tl.arange(0, UNROLL)
        at = (first_at + split)[:, None].to(tl.int64) * (2 * BLOCK_H) + member[None, :]
        here = (split < count)[:, None] & (member >= 0)[None, :]
        # Written by other SMs: past the L1.
        tops = tl.load(stats_ptr + at, mask=here, other=_NEGATIVE_INFINITY, cache_modifier=".cg")
        totals = tl.load(stats_ptr + at + BLOCK_H, mask=here, other=0.0, cache_modifier=".cg")
        block = (first_at + split)[:, None, None].to(tl.int64) * (BLOCK_H * BLOCK_D)
        block += member[None, :, None] * BLOCK_D + dim[None, None, :]
        parts = tl.load(part_ptr + block, mask=(split < count)[:, None, None], other=0.0, cache_modifier=".cg")
        highest = tl.maximum(top, tl.max(tops, axis=0))
        finite = tl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
        keep, weight = tl.exp2(top - finite), tl.exp2(tops - finite[None, :])
        total = total * keep + tl.sum(totals * weight, axis=0)
        acc = acc * keep[:, None] + tl.sum(parts * weight[:, :, None], axis=0)
        top = highest
    return acc, top, total


@triton.jit
def merge_kernel(
    lengths_ptr,
    sinks_ptr,
    shift_ptr,
    smooth_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    stats_ptr,
    num_queries,
    num_heads,
    num_kv_heads,
    head_dim,
    capacity,
    max_splits,
    window,
    target,
    out_scale,
    max_bound,
    min_bound,
    stride_out_row,
    stride_out_head,
    stride_out_query,
    SPLIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FUSED: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    QUANTISED: tl.constexpr,
    HALF_AWAY: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partials of one row and KV head in order. Rows of fewer than LEAST splits are finished already."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    head_tile, row = tl.program_id(0), tl.program_id(1)
    group = num_heads // num_kv_heads
    tile_rows = group * num_queries
    tiles = tl.cdiv(tile_rows, BLOCK_M)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    length = tl.where(length < 0, -1, tl.minimum(length + (1 if FUSED else 0), capacity))
    _, _, _, count = splits(length, window, num_queries, SPLIT, SMALLEST, DOUBLINGS, target)
    if count < LEAST:
        return
    kv_head, tile = head_tile // tiles, head_tile % tiles
    dim = tl.arange(0, BLOCK_D)
    member = tile * BLOCK_M + tl.arange(0, BLOCK_H)
    inside = (member < tile_rows)[:, None] & (dim < head_dim)[None, :]
    first_at = (row.to(tl.int64) * tl.num_programs(0) + head_tile) * max_splits
    acc, top, total = _merged(part_ptr, stats_ptr, first_at, count, BLOCK_H, BLOCK_D, UNROLL)
    finish(
        acc, top, total, row, kv_head * group + member % group, member // group, dim, inside, out_ptr, lse_ptr,
        sinks_ptr, shift_ptr, smooth_ptr, stride_out_row, stride_out_head, stride_out_query, num_heads, num_queries,
        head_dim, out_scale, max_bound, min_bound, HAS_SINKS, HAS_LSE, HAS_SHIFT, HAS_SMOOTH, QUANTISED, HALF_AWAY,
    )  # fmt: skip
