"""Code of both kinds of multiply partitions: steps, slots, and handing finished row blocks to the exchange.

The channel has two places of G row blocks: the next group is multiplied while one is published. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from onewave.wave.kernel.words import KIND, WORD


@gluon.jit
def product_of(record):
    """A step's kind, row blocks (0 if it is no product), weight tiles and chunks. record: pointer."""
    kind = gl.load(record + WORD.KIND)
    blocks = gl.load(record + WORD.BLOCKS)
    tiles = gl.load(record + WORD.TILES)
    chunks = gl.load(record + WORD.CHUNKS)
    if kind >= KIND.REDUCE_HIDDEN:
        blocks = 0
    return kind, blocks, tiles, chunks


@gluon.jit
def next_slot(slot, phase, S: gl.constexpr):
    """The slot after a slot of the ring, and its phase."""
    wraps = slot == S - 1
    phase = gl.where(wraps, phase ^ 1, phase)
    return gl.where(wraps, 0, slot + 1), phase


@gluon.jit
def hand_over(accs, results, number, c):
    """Hand over the products of G row blocks, the first G of four accumulators.

    results: the channel to the exchange partition. number: groups handed over so far in this launch.
    """
    acc0, acc1, acc2, acc3 = accs
    result = wanted_part(acc0, c)
    if c.G == 2:
        result = gl.join(result, wanted_part(acc1, c))
    if c.G == 4:
        last = gl.join(wanted_part(acc1, c), wanted_part(acc3, c))
        result = gl.join(gl.join(result, wanted_part(acc2, c)), last)
    give(result, 0, results, number, c)


@gluon.jit
def hand_over_one(acc, own: gl.constexpr, results, number, c):
    """Hand over the group's row block `own`; other partitions hand over the others."""
    give(wanted_part(acc, c), own, results, number, c)


@gluon.jit
def give(result, first: gl.constexpr, results, number, c):
    """Store the group's row blocks from `first` on, then arrive at the place's full barrier.

    result: [64, NB] of one row block, or [64, NB, ..] of all.
    """
    COUNT: gl.constexpr = 1 if len(result.shape) == 2 else c.G
    place = number % 2
    mbarrier.wait(results.empty.index(place), ((number // 2) & 1) ^ 1)
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    where = results.places.index(place)._reinterpret(gl.float32, [c.NB, 64 // c.R, c.G, c.R], PARTS)
    if COUNT < c.G:
        where = where.slice(first, COUNT, dim=2)
    where.store(gl.permute(gl.reshape(result, [64 // c.R, c.R, c.NB, COUNT]), (2, 0, 3, 1)))
    gl.thread_barrier()
    mbarrier.arrive(results.full.index(place), count=1)


@gluon.jit
def wanted_part(acc, c):
    """Sum a row block's product over its tile's column groups (layout.py): [64, NB].

    acc: [64, N], or in parts (widen.parts_of), or as halves.kept_sums keeps it. A row's result is in the columns of its
    own column group.
    """
    Q: gl.constexpr = 64 // c.R
    if len(acc.shape) == 4:
        return gl.reshape(gl.permute(gl.sum(acc, axis=2), (0, 2, 1)), [64, 1])
    elif len(acc.shape) == 3:
        P: gl.constexpr = acc.shape[0]
        if Q > P:
            rows = gl.arange(0, 64 // P, layout=gl.SliceLayout(0, gl.SliceLayout(2, acc.type.layout)))
            columns = gl.arange(0, Q // P * c.NB, layout=gl.SliceLayout(0, gl.SliceLayout(1, acc.type.layout)))
            meets = (rows // c.R)[None, :, None] == (columns // c.NB)[None, None, :]
            acc = gl.sum(gl.reshape(gl.where(meets, acc, 0.0), [P, 64 // P, Q // P, c.NB]), axis=2)
        return gl.reshape(acc, [64, c.NB])
    elif Q > 1:
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
        column = gl.arange(0, Q * c.NB, layout=gl.SliceLayout(0, acc.type.layout))
        wanted = (row // c.R)[:, None] == (column // c.NB)[None, :]
        return gl.sum(gl.reshape(gl.where(wanted, acc, 0.0), [64, Q, c.NB]), axis=1)
    else:
        return acc
