"""Merges a row's partial results and finishes the row, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


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
def finish(acc, top, total, row, head, query, dim, inside, head_dim, c):
    """Normalise and write the rows of one tile; head, query: [rows of the tile], inside: [rows, dims]; c: a Call."""
    row64 = row.to(tl.int64)
    real = tl.max(inside.to(tl.int32), axis=1) > 0
    seen = total != 0  # nor is NaN, of a key that holds one, a row without keys
    if c.HAS_SINKS:
        sink = tl.load(c.sinks + head, mask=real, other=0.0).to(tl.float32) * _LOG2E
        highest = tl.maximum(top, sink)
        # A row that sees no key stays empty whatever its sink.
        keep = tl.where(seen, tl.exp2(top - highest), 0.0)
        total = total * keep + tl.exp2(sink - highest)
        acc = acc * keep[:, None]
        top = highest
    if c.HAS_LSE:
        lse = tl.where(seen, (top + tl.log2(total)) * _LN2, _NEGATIVE_INFINITY)
        tl.store(c.lse + (row64 * c.num_heads + head) * c.num_queries + query, lse, mask=real)
    value = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
    channel = head[:, None] * head_dim + dim[None, :]
    if c.HAS_SHIFT:
        value += tl.load(c.shift + channel, mask=inside, other=0.0).to(tl.float32)
    if c.HAS_SMOOTH:
        value *= tl.load(c.smooth + channel, mask=inside, other=0.0).to(tl.float32)
    first = head.to(tl.int64) * c.stride_out_head + query.to(tl.int64) * c.stride_out_query
    at = c.out + row64 * c.stride_out_row + first[:, None] + dim[None, :]
    if c.QUANTISED:
        tl.store(at, _quantised(c.max_bound * c.out_scale * value, c.max_bound, c.min_bound, c.HALF_AWAY), mask=inside)
    else:
        tl.store(at, value.to(c.out.dtype.element_ty), mask=inside)


@triton.jit
def store_output(at, acc, slot, dim, c):
    """Keep a split's output [dims, rows of the tile] as partial number `at`. slot: [rows of it]."""
    part_at = at * (c.BLOCK_H * c.BLOCK_D) + slot[None, :] * c.BLOCK_D + dim[:, None]
    tl.store(c.part + part_at, acc, mask=(slot < c.BLOCK_H)[None, :] & (dim >= 0)[:, None])


@triton.jit
def store_stats(at, top, total, slot, c):
    """Keep a split's maxima and sums as partial number `at`. slot: [rows of the tile]."""
    stats = c.stats + at * (2 * c.BLOCK_H) + slot
    tl.store(stats, top, mask=slot < c.BLOCK_H)
    tl.store(stats + c.BLOCK_H, total, mask=slot < c.BLOCK_H)


@triton.jit
def fold(top, total, acc, top_2, total_2, acc_2):
    """Two partial results of the same rows as one: (maxima [M], sums [M], outputs [D, M]).

    The sums are written as fused multiply-adds, so that every place that folds the same partials gets the same bits.
    """
    highest = tl.maximum(top, top_2)
    # Both may be empty: -inf - -inf would be NaN.
    finite = tl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
    keep, weight = tl.exp2(top - finite), tl.exp2(top_2 - finite)
    total = tl.fma(total, keep, total_2 * weight)
    acc = tl.fma(acc, tl.broadcast_to(keep[None, :], acc.shape), acc_2 * weight[None, :])
    return highest, total, acc


@triton.jit
def merged(first_at, slot, dim, count, c):
    """(maxima, sums, outputs [dims, slots]) of query rows `slot` of a tile: their partials folded in order.

    UNROLL partials are loaded at a time, past L1, since other programs wrote them; what lies behind
    the last one is loaded, too (the scratch memory has room for it), and not counted. With a condition on every load
    ptxas folds the first partial before it asks for the last, and waits for memory twice.
    """
    total = (slot * 0).to(tl.float32)
    top, acc = total + _NEGATIVE_INFINITY, total[None, :] * dim[:, None].to(tl.float32)
    stats = c.stats + first_at * (2 * c.BLOCK_H) + slot
    parts = c.part + first_at * (c.BLOCK_H * c.BLOCK_D) + slot[None, :] * c.BLOCK_D + dim[:, None]
    for begin in range(0, count, c.UNROLL):
        stats_here, parts_here = stats + begin * (2 * c.BLOCK_H), parts + begin * (c.BLOCK_H * c.BLOCK_D)
        loaded, left = (), count - begin
        for ahead in tl.static_range(c.UNROLL):
            # Constants apart, so that they end up in the loads: addresses would take longer than all of them.
            loaded += (
                tl.load(stats_here + ahead * (2 * c.BLOCK_H), cache_modifier=".cg"),
                tl.load(stats_here + (ahead * (2 * c.BLOCK_H) + c.BLOCK_H), cache_modifier=".cg"),
                tl.load(parts_here + ahead * (c.BLOCK_H * c.BLOCK_D), cache_modifier=".cg"),
            )
        for ahead in tl.static_range(c.UNROLL):
            here = ahead < left
            top_2 = tl.where(here, loaded[3 * ahead], _NEGATIVE_INFINITY)
            total_2 = tl.where(here, loaded[3 * ahead + 1], 0.0)
            acc_2 = tl.where(here, loaded[3 * ahead + 2], 0.0)
            top, total, acc = fold(top, total, acc, top_2, total_2, acc_2)
    return top, total, acc
