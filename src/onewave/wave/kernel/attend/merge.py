"""Activations that are attention, merged from one sequence's splits on their way into shared memory.

Between attention and the output projection stands one hand-off less then than if somebody combined the splits first
(combine.py): every worker reads all of them, 16-bit values with a log2-sum-exp2 a head and split, FEW_SPLITS of them at
a time, and merges them for itself. Of a sequence of one split it reads what is finished already.
"""
# ruff: noqa: RET505, SIM102, SIM108, RUF059, RUF005, B007, RUF100
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnusedVariable=false, reportReturnType=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.wave.kernel.attend.combine import split_of_keys
from onewave.wave.kernel.attend.layouts import few_words
from onewave.wave.kernel.finish import bits16, to_float
from onewave.wave.kernel.records import noted
from onewave.wave.kernel.spin import poll_few
from onewave.wave.kernel.widen.byte_values import raised
from onewave.wave.kernel.words import (
    WORD_COLUMNS,
    WORD_FEW,
    WORD_SOURCE,
    WORD_SPLITS,
    WORD_TILES,
    WORD_WINDOW,
)
from onewave.wave.plan.layout import FEW_SPLITS, MOST_SPLITS

__all__ = ["load_merged"]

_MOST = gl.constexpr(MOST_SPLITS)
_FEW_SPLITS = gl.constexpr(FEW_SPLITS)


@gluon.jit
def load_merged(
    record, chunks, chunks_before, ours, positions, watch, block, step, xs, xfull, xempty,
    DTYPE: gl.constexpr, FORMAT: gl.constexpr, R: gl.constexpr, XS: gl.constexpr, PC: gl.constexpr,
    SYNC: gl.constexpr, XW: gl.constexpr, D: gl.constexpr, FEW: gl.constexpr, IMAGES: gl.constexpr,
):  # fmt: skip
    """exchange.load_activations of one sequence's attention: chunk by chunk into shared memory, [N, PC * 64] words
    each, or as much of that as the step multiplies; FEW words a thread at a time."""
    Q: gl.constexpr = 64 // R
    T: gl.constexpr = FEW * XW * 32 // (Q * 64)
    OWN: gl.constexpr = T * Q * 64
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [XW], [0])
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    first = noted(record, WORD_SOURCE)
    columns = noted(record, WORD_COLUMNS)
    few = noted(record, WORD_FEW)
    word = gl.arange(0, OWN, layout=LINE)
    length = gl.load(positions).to(gl.int32) + 1
    first_key, share, used = split_of_keys(noted(record, WORD_WINDOW), noted(record, WORD_SPLITS), length, FEW)
    for chunk in range(chunks):
        place = (chunks_before + chunk) % XS
        mbarrier.wait(xempty.index(place), (((chunks_before + chunk) // XS) & 1) ^ 1)
        rows = xs.index(place)._reinterpret(gl.int32, [PC // T, Q, T * 64], STORED)
        tiles = gl.minimum(noted(record, WORD_TILES) * IMAGES - chunk * PC, PC)
        for piece in range((tiles + T - 1) // T):
            # Between two pieces' stores, which Triton takes to meet; rather here than behind the poll.
            gl.thread_barrier()
            column = (chunk * (PC // T) + piece) * OWN + word
            real = column < columns
            of_head = few + column // (D // 2) * few_words(D)
            at = gl.where(used > 1, of_head + column % (D // 2), first + column)
            pointers = gl.where(real, (ours + at).to(gl.int64), 0)
            lses = gl.where(real & (used > 1), (ours + of_head + _MOST * (D // 2)).to(gl.int64), 0)
            words = poll_merged(pointers, lses, real, used, watch, block, step, DTYPE, D, FEW, SYNC == 0)
            ordered = gl.permute(gl.reshape(words, [1, T, Q, 64]), (2, 0, 1, 3))
            rows.index(piece).store(raised(gl.reshape(ordered, [Q, T * 64]), DTYPE, FORMAT))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(xfull.index(place), count=1)


@gluon.jit
def poll_merged(
    pointers, lses, real, used, watch, block, step,
    DTYPE: gl.constexpr, D: gl.constexpr, FEW: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """The words of `used` splits behind `pointers`, merged; see poll_few. What is not real is 0."""
    COUNT: gl.constexpr = pointers.shape[0]
    counts = gl.where(real, used, 0)
    parts = poll_few(pointers, lses, counts, watch, block, step, WAITS, FEW, D * 2)
    low, high, mass, top = merged_splits(parts, COUNT, DTYPE)
    if used > _FEW_SPLITS:
        pointers = gl.where(real, pointers + _FEW_SPLITS * D * 2, 0)
        lses = gl.where(real, lses + _FEW_SPLITS * 4, 0)
        parts = poll_few(pointers, lses, counts - _FEW_SPLITS, watch, block, step, WAITS, FEW, D * 2)
        more_low, more_high, more_mass, more_top = merged_splits(parts, COUNT, DTYPE)
        higher = gl.maximum(top, more_top)
        fade = gl.exp2(top - higher)
        more_fade = gl.exp2(more_top - higher)
        low = low * of_values(fade, low) + more_low * of_values(more_fade, low)
        high = high * of_values(fade, high) + more_high * of_values(more_fade, high)
        mass = mass * fade + more_mass * more_fade
    scale = of_values(1.0 / mass, low)
    words = bits16(low * scale, DTYPE) | (bits16(high * scale, DTYPE) << 16)
    return gl.reshape(words, [COUNT])


@gluon.jit
def merged_splits(parts, COUNT: gl.constexpr, DTYPE: gl.constexpr):
    """Splits' values, the lower and the higher of each word, [COUNT / 4, 4], weighted in float32 by their log2-sum-exp2
    less the highest one, and added up; the sum of the weights and the highest, [COUNT / 4]. Nothing leaves its thread.
    """
    w0, w1, w2, w3, w4, w5, w6, w7, first, second = parts
    e0, e1, e2, e3 = of_packets(first, COUNT)
    e4, e5, e6, e7 = of_packets(second, COUNT)
    top = gl.maximum(highest(e0, e1, e2, e3), highest(e4, e5, e6, e7))
    low, high, mass = four_splits(w0, w1, w2, w3, e0 - top, e1 - top, e2 - top, e3 - top, COUNT, DTYPE)
    low4, high4, mass4 = four_splits(w4, w5, w6, w7, e4 - top, e5 - top, e6 - top, e7 - top, COUNT, DTYPE)
    return low + low4, high + high4, mass + mass4, top


@gluon.jit
def of_values(scale, values):
    """A packet's scale for each of its values."""
    return gl.convert_layout(scale, gl.SliceLayout(1, values.type.layout))[:, None]


@gluon.jit
def of_packets(lses, COUNT: gl.constexpr):
    """The four words of each packet, as float32, [COUNT / 4] each."""
    even, odd = gl.split(gl.reshape(lses.to(gl.float32, bitcast=True), [COUNT // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def highest(a, b, c, d):
    return gl.maximum(gl.maximum(a, b), gl.maximum(c, d))


@gluon.jit
def four_splits(w0, w1, w2, w3, e0, e1, e2, e3, COUNT: gl.constexpr, DTYPE: gl.constexpr):
    """Four splits' values, the lower and the higher of each word, [COUNT / 4, 4], weighted and added up, and the sum of
    the weights, 2 to the power of e."""
    e0 = gl.exp2(e0)
    e1 = gl.exp2(e1)
    e2 = gl.exp2(e2)
    e3 = gl.exp2(e3)
    low0, high0 = weighted(w0, e0, COUNT, DTYPE)
    low1, high1 = weighted(w1, e1, COUNT, DTYPE)
    low2, high2 = weighted(w2, e2, COUNT, DTYPE)
    low3, high3 = weighted(w3, e3, COUNT, DTYPE)
    return (low0 + low1) + (low2 + low3), (high0 + high1) + (high2 + high3), (e0 + e1) + (e2 + e3)


@gluon.jit
def weighted(words, weight, COUNT: gl.constexpr, DTYPE: gl.constexpr):
    packets = gl.reshape(words, [COUNT // 4, 4])
    low, high = to_float(packets, DTYPE)
    scale = of_values(weight, packets)
    return low * scale, high * scale
