"""Products of 4-bit weights with a scale a group: nibbles from the ring become operand A in registers, for mma.sync.

A tile is one, two or four images of 4 KiB, side by side, then their scales. An image is operand A [64, 128]; a row of
it lies within 128 columns of the matrix, so a group of columns is a part of the row. A nibble is a number from 0 to 15,
in the lowest or the next bits of a 16-bit number: a mask makes it a subnormal number, once or sixteen times as large.
A word has such nibbles of the first and of the second 64 columns, so five instructions widen eight values
(nibble_values.py), and each half of the columns has a chain of sums of its own.

A group's sum is s * sum(n * x) + m * sum(x): n the nibbles, m the group's minimum, or -8 s without minima. The tensor
cores make sum(x) too, by an operand A of one constant: the sums then lie where the products' do. Scales and minima are
float16, multiplied in float32, group by group in the order of the columns. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.wave.kernel.hand_over import next_slot
from onewave.wave.kernel.widen.nibble_values import nibbles
from onewave.wave.kernel.words import group_of, has_minima, scale_rows

# The bits of a subnormal number, once and -8 times the unit of nibbles.
_ONE, _LESS_EIGHT = gl.constexpr(1), gl.constexpr(-0x7FF8)


@gluon.jit
def add_group_tile(acc, tile, x, slot, rings, c):
    """Add to acc a tile's product with its activations among x's. rings: places of values and of scales."""
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    ROWS: gl.constexpr = scale_rows(c.FORMAT)
    GROUPS: gl.constexpr = 128 // group_of(c.FORMAT)
    values = rings[0].index(slot)._reinterpret(gl.int32, [c.IMAGES * 32, 32], STORED)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    scales = rings[1].index(slot)._reinterpret(gl.float16, [c.IMAGES * ROWS, 4, 8, 2], PLAIN)
    for image in gl.static_range(c.IMAGES):
        at = tile * (2 * c.IMAGES) + 2 * image
        sums = image_sums(values.slice(image * 32, 32), x.index(at), x.index(at + 1), acc, c)
        for group in gl.static_range(GROUPS):
            products, ones = sums[group]
            scale = scales_of(scales.index(image * ROWS + group), acc)
            if has_minima(c.FORMAT):
                acc += scale * products + scales_of(scales.index(image * ROWS + GROUPS + group), acc) * ones
            else:
                acc += scale * (products + ones)
    return acc


@gluon.jit
def add_pairs(acc, count, x, slot, phase, ring, c):
    """Add the products of as many of `count` tiles as are pairs, two at once: what a tile waits for, and the barriers
    behind it, cost as much as half its products. Returns acc and the next tile's slot and phase."""
    for pair in range(count // 2):
        mbarrier.wait(ring.full.index(slot), phase)
        second, second_phase = next_slot(slot, phase, c.S)
        mbarrier.wait(ring.full.index(second), second_phase)
        acc = add_group_tile(acc, 2 * pair, x, slot, ring.places, c)
        acc = add_group_tile(acc, 2 * pair + 1, x, second, ring.places, c)
        fence_async_shared()  # as in kernel.multiply_held
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index(slot), count=1)
        mbarrier.arrive(ring.empty.index(second), count=1)
        gl.thread_barrier()
        slot, phase = next_slot(second, second_phase, c.S)
    return acc, slot, phase


@gluon.jit
def image_sums(words, first, second, acc, c):
    """Sums of each group of an image: a tuple of (nibbles times activations, constant times activations), as acc.

    words: int32 [32, 32] in shared memory. first, second: activations of either half of its columns.
    """
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    PARTS: gl.constexpr = acc.shape[0]
    zero = gl.zeros_like(acc)
    BITS: gl.constexpr = _ONE if has_minima(c.FORMAT) else _LESS_EIGHT
    b0 = activations(first, acc)
    b1 = activations(second, acc)
    if group_of(c.FORMAT) == 32:
        ONES32: gl.constexpr = [PARTS, 64 // PARTS, 32]
        constant = gl.full(ONES32, BITS, gl.int16, A).to(c.DTYPE, bitcast=True)
        b00, b01 = halves(b0)
        b10, b11 = halves(b1)
        low0, high0 = operands(words.slice(0, 16).load(WORDS), A, PARTS, c.DTYPE)
        low1, high1 = operands(words.slice(16, 16).load(WORDS), A, PARTS, c.DTYPE)
        return (
            (mma_v2(low0, b00, zero), mma_v2(constant, b00, zero)),
            (mma_v2(low1, b01, zero), mma_v2(constant, b01, zero)),
            (mma_v2(high0, b10, zero) * 0.0625, mma_v2(constant, b10, zero)),
            (mma_v2(high1, b11, zero) * 0.0625, mma_v2(constant, b11, zero)),
        )
    else:
        ONES64: gl.constexpr = [PARTS, 64 // PARTS, 64]
        constant = gl.full(ONES64, BITS, gl.int16, A).to(c.DTYPE, bitcast=True)
        low, high = operands(words.load(WORDS), A, PARTS, c.DTYPE)
        products0 = mma_v2(low, b0, zero)
        ones0 = mma_v2(constant, b0, zero)
        products1 = mma_v2(high, b1, zero) * 0.0625
        ones1 = mma_v2(constant, b1, zero)
        if group_of(c.FORMAT) == 64:
            return ((products0, ones0), (products1, ones1))
        else:
            return ((products0 + products1, ones0 + ones1),)


@gluon.jit
def activations(x, acc):
    """Load activations, [PARTS, N / PARTS, 64] in shared memory, as operand B of acc's product."""
    return x.permute((0, 2, 1)).load(gl.DotOperandLayout(1, acc.type.layout, 2))


@gluon.jit
def halves(b):
    """Split operand B [PARTS, 64, N / PARTS] into two of 32 columns of the matrix each."""
    both = gl.permute(gl.reshape(b, [b.shape[0], 2, 32, b.shape[2]]), (0, 2, 3, 1))
    first, second = gl.split(both)
    return (
        gl.convert_layout(first, b.type.layout, assert_trivial=True),
        gl.convert_layout(second, b.type.layout, assert_trivial=True),
    )


@gluon.jit
def operands(words, OPERAND: gl.constexpr, PARTS: gl.constexpr, DTYPE: gl.constexpr):
    """Build operands A, [PARTS, 64 / PARTS, K], of both halves of the columns. words: int32 [K / 2, 32] of each thread.

    No value moves between threads.
    """
    values = nibbles(words)
    return operand(values[:4], OPERAND, PARTS, DTYPE), operand(values[4:], OPERAND, PARTS, DTYPE)


@gluon.jit
def operand(values, OPERAND: gl.constexpr, PARTS: gl.constexpr, DTYPE: gl.constexpr):
    """Build one operand A of four values a word, int16 bits."""
    PASSES: gl.constexpr = values[0].shape[0] // 16
    EIGHTS: gl.constexpr = 2 if len(values[0].shape) == 3 else 4  # of columns, in a thread's words
    # [columns, 16 rows, row in 8, pair of columns in 8, 8 columns, half of 16 rows, column of a pair]
    a = gl.join(gl.join(values[0], values[1]), gl.join(values[2], values[3])).to(DTYPE, bitcast=True)
    a = gl.reshape(a, [PASSES, 4, 8, 4, EIGHTS, 2, 2])
    a = gl.reshape(gl.permute(a, (1, 5, 2, 0, 4, 3, 6)), [PARTS, 64 // PARTS, 8 * EIGHTS * PASSES])
    return gl.convert_layout(a, OPERAND, assert_trivial=True)


@gluon.jit
def scales_of(scales, acc):
    """Load a scale for each row of A: float32 [PARTS, 64 / PARTS, 1], beside acc.

    scales: float16 or float32 [4, 8, 2] in shared memory: 16 rows, row in 8, half of 16 rows.
    """
    PARTS: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = gl.SliceLayout(3, gl.BlockedLayout([1, 1, 2, 1], [1, 8, 1, 4], [4, 1, 1, 1], [3, 2, 1, 0]))
    rows = gl.reshape(gl.permute(scales.load(ROWS).to(gl.float32), (0, 2, 1)), [PARTS, 64 // PARTS])
    return gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(2, acc.type.layout), assert_trivial=True), 2)
