"""Products of heads of D columns on Hopper. 192 is no power of two, so such a head is 128 columns and 64 more.

In shared memory a place of [rows, D] is D / 64 blocks of [rows, 64], one behind the other; a wide matrix of the
128-byte swizzle lies so anyway. Where there is a rest, the queries and the output are pairs, and each product is two
instructions of the same accumulator (scores) or of an accumulator each (values).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

# Columns in which swizzled shared memory repeats.
ACROSS = gl.constexpr(64)


@gluon.constexpr_function
def wide_columns(columns):
    """Columns of a head's first part: all, or the largest power of two in them."""
    return 1 << (columns.bit_length() - 1)


@gluon.constexpr_function
def products(columns):
    """Instructions of a product of all columns."""
    return 1 if columns == wide_columns(columns) else 2


@gluon.constexpr_function
def ring_shape(places, rows, columns):
    """Shape of the shared memory of so many places of [rows, columns], as place_in finds them."""
    if columns == wide_columns(columns):
        return [places, rows, columns]
    return [places * (columns // 64), rows, 64]


@gluon.jit
def place_in(problem, ring, at):
    """A place of a ring: [rows, D], or its first 64 columns where D is no power of two."""
    if products(problem.D) == 1:
        place = ring.index(at)
    else:
        place = ring.index(at * (problem.D // ACROSS))
    return place


@gluon.constexpr_function
def copies(columns):
    """Copies by TMA that a place takes: one, or one every 64 columns."""
    return 1 if columns == wide_columns(columns) else columns // 64


@gluon.jit
def copied(problem, place, part: gl.constexpr):
    """The part of a place that one of its copies moves: all of it, or 64 of its columns."""
    if products(problem.D) == 1:
        block = place
    else:
        ROWS: gl.constexpr = place.shape[0]
        flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        block = place._reinterpret(problem.q.dtype, [problem.D // ACROSS, ROWS, ACROSS], flat).index(part)
    return block


@gluon.jit
def parts_of(problem, place):
    """The two parts of a place whose D is no power of two."""
    WIDE: gl.constexpr = wide_columns(problem.D)
    ROWS: gl.constexpr = place.shape[0]
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    blocks = place._reinterpret(problem.q.dtype, [problem.D // ACROSS, ROWS, ACROSS], flat)
    return place._reinterpret(problem.q.dtype, [ROWS, WIDE], flat), blocks.index(WIDE // ACROSS)


@gluon.jit
def queries(problem, buffer):
    """The queries of one of Q's buffers, where they lie in shared memory."""
    if products(problem.D) == 1:
        q = problem.sq.index(buffer)
    else:
        q = parts_of(problem, place_in(problem, problem.sq, buffer))
    return q


@gluon.jit
def loaded_queries(problem, buffer, LAYOUT: gl.constexpr):
    """The same in registers."""
    q = queries(problem, buffer)
    if products(problem.D) == 1:
        loaded = q.load(LAYOUT)
    else:
        loaded = (q[0].load(LAYOUT), q[1].load(LAYOUT))
    return loaded


@gluon.jit
def scores(problem, q, keys):
    """Begin the product of queries and all keys of a place of K's ring: [64, BN]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.BN, 16])
    nothing = gl.zeros([64, problem.BN], gl.float32, layout)
    if products(problem.D) == 1:
        s = warpgroup_mma(q, keys.permute([1, 0]), nothing, use_acc=False, is_async=True)
    else:
        wide, rest = parts_of(problem, keys)
        s = warpgroup_mma(q[0], wide.permute([1, 0]), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma(q[1], rest.permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def no_output(problem):
    """An output of zeros: [64, D], or its two parts."""
    WIDE: gl.constexpr = wide_columns(problem.D)
    REST: gl.constexpr = problem.D - WIDE
    o = gl.zeros([64, WIDE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16]))
    if REST > 0:
        o = (o, gl.zeros([64, REST], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])))
    return o


@gluon.jit
def weighed(problem, p, values, o, FIRST: gl.constexpr, COUNT: gl.constexpr, onto):
    """Begin the product of P [64, COUNT] and rows of a place of values from FIRST on, on top of o if `onto`."""
    if products(problem.D) == 1:
        if COUNT < problem.BN:
            values = values.slice(FIRST, COUNT)
        o = warpgroup_mma(p, values, o, use_acc=onto, is_async=True)
    else:
        wide, rest = parts_of(problem, values)
        if COUNT < problem.BN:
            rest = rest.slice(FIRST, COUNT)
            wide = wide.slice(FIRST, COUNT)
        o0, o1 = o
        o0 = warpgroup_mma(p, wide, o0, use_acc=onto, is_async=True)
        REST: gl.constexpr = problem.D - wide_columns(problem.D)
        of_rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
        p = gl.convert_layout(p, gl.DotOperandLayout(0, of_rest, 2), assert_trivial=True)
        o = (o0, warpgroup_mma(p, rest, o1, use_acc=onto, is_async=True))
    return o


@gluon.jit
def output_comes(problem, o, PENDING: gl.constexpr):
    """Wait until all but PENDING later products have ended, the output's among them."""
    if products(problem.D) == 1:
        o = warpgroup_mma_wait(PENDING, deps=[o])
    else:
        o = warpgroup_mma_wait(PENDING, deps=[o[0], o[1]])
    return o


@gluon.jit
def times(problem, o, factor):
    """The output times a factor of each row."""
    if products(problem.D) == 1:
        o = o * gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))[:, None]
    else:
        o0, o1 = o
        o0 = o0 * gl.convert_layout(factor, gl.SliceLayout(1, o0.type.layout))[:, None]
        o = (o0, o1 * gl.convert_layout(factor, gl.SliceLayout(1, o1.type.layout))[:, None])
    return o


@gluon.jit
def store_output(problem, place, o):
    """Round an output to where `queries` were."""
    if products(problem.D) == 1:
        place.store(o.to(problem.q.dtype))
    else:
        place[0].store(o[0].to(problem.q.dtype))
        place[1].store(o[1].to(problem.q.dtype))
