"""The merge of a row's partial results: triton/merge.py's `merged`, its folds worked out side by side.

What a partial result weighs, and what is kept of those before it, follows from their maxima alone: a lane each, instead
of every thread all of them one after another. Maxima have no order to keep, and the folds then are the same: the bits
are those of `fold`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_NEGATIVE_INFINITY = gl.constexpr(float("-inf"))


@gluon.jit
def higher(a, b):
    return gl.maximum(a, b)


@gluon.jit
def fold_of(c, ahead: gl.constexpr, OF_SLOT: gl.constexpr):
    """Factors of a partial result: (share of those before that is kept, addend of their sum, weight of its output)."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    numbers = c.folds.index(ahead).load(NUMBERS)
    of_sum, of_output = gl.split(gl.reshape(numbers, [c.BLOCK_H, 2, 2]))
    kept, added = gl.split(of_sum)
    factor, _ = gl.split(of_output)
    return (
        gl.convert_layout(kept, OF_SLOT, assert_trivial=True),
        gl.convert_layout(added, OF_SLOT, assert_trivial=True),
        gl.convert_layout(factor, OF_SLOT, assert_trivial=True),
    )


@gluon.jit
def folded(c, total, acc, outputs, left, OF_SLOT: gl.constexpr, ALL: gl.constexpr):
    """(sums, outputs) with UNROLL partial results folded into them: all, or so many, and then no number of the others
    counts, whatever it is."""
    for ahead in gl.static_range(c.UNROLL):
        kept, added, factor = fold_of(c, ahead, OF_SLOT)
        output = outputs[ahead] if ALL else gl.where(ahead < left, outputs[ahead], 0.0)
        total = gl.fma(total, kept, added)
        every_one, acc = gl.broadcast(kept[None, :], acc)
        acc = gl.fma(acc, every_one, output * factor[None, :])
    return total, acc


@gluon.jit
def merged_by_lanes(c, first_at, count):
    """(maxima [BLOCK_H], sums [BLOCK_H], outputs [BLOCK_D, BLOCK_H]) of `count` partial results from number first_at
    on, folded in order, UNROLL of them loaded at a time: see triton/merge.py."""
    # Outputs, 16 bytes a thread, turned: every warp has slots of its own. Of their maxima and sums a lane has one of
    # each partial result.
    PARTS: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    OF_SLOT: gl.constexpr = gl.SliceLayout(0, PARTS)
    number = gl.arange(0, c.UNROLL, layout=gl.SliceLayout(1, LANES))
    stats = c.stats + first_at * (2 * c.BLOCK_H)
    stats += number[:, None] * (2 * c.BLOCK_H) + gl.arange(0, c.BLOCK_H, layout=gl.SliceLayout(0, LANES))[None, :]
    slot = gl.arange(0, c.BLOCK_H, layout=OF_SLOT)
    dim = gl.arange(0, c.BLOCK_D, layout=gl.SliceLayout(1, PARTS))
    parts = c.part + first_at * (c.BLOCK_H * c.BLOCK_D) + slot[None, :] * c.BLOCK_D + dim[:, None]
    so_far = gl.full([c.BLOCK_H], _NEGATIVE_INFINITY, gl.float32, gl.SliceLayout(0, LANES))
    total = gl.zeros([c.BLOCK_H], gl.float32, OF_SLOT)
    acc = gl.zeros([c.BLOCK_D, c.BLOCK_H], gl.float32, PARTS)
    left = count
    while left > 0:
        here = (number < left)[:, None]
        top = gl.load(stats, mask=here, other=_NEGATIVE_INFINITY, cache_modifier=".cg")
        # Maxima of the result before; the first lane behind the last one has them too, so that it takes nothing away.
        follows = ((number > 0) & (number <= left))[:, None]
        before = gl.load(stats - 2 * c.BLOCK_H, mask=follows, other=_NEGATIVE_INFINITY, cache_modifier=".cg")
        weighed = gl.load(stats + c.BLOCK_H, mask=here, other=0.0, cache_modifier=".cg")
        outputs = ()
        for ahead in gl.static_range(c.UNROLL):
            # Constants apart, so that they end up in the loads; without a condition, which ptxas would wait for.
            outputs += (gl.load(parts + ahead * (c.BLOCK_H * c.BLOCK_D), cache_modifier=".cg"),)
        before = gl.maximum(gl.associative_scan(before, 0, higher), so_far[None, :])
        highest = gl.maximum(before, top)
        so_far = gl.max(highest, axis=0)
        finite = gl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
        keep, weight = gl.exp2(before - finite), gl.exp2(top - finite)
        folds = gl.join(gl.join(keep, weighed * weight), gl.join(weight, weight))
        # (Where the last ones may still be read Triton puts a barrier before this, too.)
        c.folds._reinterpret(gl.float32, [c.UNROLL * c.BLOCK_H, 4], c.folds.layout).store(
            gl.reshape(folds, [c.UNROLL * c.BLOCK_H, 4])
        )
        gl.thread_barrier()
        if left >= c.UNROLL:
            total, acc = folded(c, total, acc, outputs, c.UNROLL, OF_SLOT, ALL=True)
        else:
            total, acc = folded(c, total, acc, outputs, left, OF_SLOT, ALL=False)
        stats += c.UNROLL * (2 * c.BLOCK_H)
        parts += c.UNROLL * (c.BLOCK_H * c.BLOCK_D)
        left -= c.UNROLL
    return gl.convert_layout(so_far, OF_SLOT), total, acc
