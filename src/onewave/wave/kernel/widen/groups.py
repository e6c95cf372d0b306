"""Products of 4-bit weights with a scale a group: nibbles from the ring become operand A in registers, for mma.sync.

A tile is one, two or four images of 4 KiB, side by side, then their scales. An image is operand A [64, 128]; a row of
it lies within 128 columns of the matrix, so a group of columns is a part of the row. A nibble is a number from 0 to 15,
in the lowest or the next bits of a 16-bit number: a mask makes it a subnormal number, once or sixteen times as large.
A word has such nibbles of the first and of the second 64 columns, and each half of the columns has a chain of sums of
its own (nibble_values.py).

A group's sum is s * sum((n - 8) * x), n the nibbles and s the group's scale; the 8 is taken away pair by pair. With
minima m it is s * sum(n * x) + m * sum(x). The tensor cores make sum(x) too, by an operand A of ones: it then lies
where the products do. Scales and minima are float16, multiplied in float32, in the order of the columns. Constexprs:
kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.wave.kernel.attend.streamed import skip_tiles
from onewave.wave.kernel.hand_over import next_slot
from onewave.wave.kernel.widen.digits import add_digit_tiles
from onewave.wave.kernel.widen.halves import add_nested_halves, add_six_halves, add_wide_halves
from onewave.wave.kernel.widen.nested_digits import add_nested_digits, add_six_digits
from onewave.wave.kernel.widen.nibble_values import nibbles
from onewave.wave.kernel.widen.operands import activations, scales_of, steps_of
from onewave.wave.kernel.widen.six_bits import add_six_tiles
from onewave.wave.kernel.widen.wide import add_float_tile, add_half_tile, add_nested_tile, add_wide_tile
from onewave.wave.kernel.words import (
    SIX,
    group_of,
    halves_apart,
    has_floats,
    has_minima,
    is_mixed,
    is_nested,
    scale_rows,
    takes_digits,
)

# The bits of the smallest subnormal number, the unit of nibbles.
_ONE = gl.constexpr(1)


@gluon.jit
def multiply_groups(accs, tiles, blocks, chunk, x, at, ring, c):
    """Add to the sums of up to G row blocks their products with one chunk of activations, two blocks at a time, but
    for 8-bit and 16-bit ones.

    Two blocks share the activations' loads, and what waiting for tiles and freeing their slots costs. All take turns in
    one loop, whose code the instruction cache holds. accs: of four blocks. tiles: of a block in the chunk, and their
    width (MixedFormat). blocks: how many there are still. at: slot and phase. Returns the sums, and the next slot and
    phase.
    """
    acc0, acc1, acc2, acc3 = accs
    count, width = tiles
    slot, phase = at
    for pair in range(c.G // 2):
        first = gl.where(chunk > 0, acc0, 0.0)
        second = gl.where(chunk > 0, acc1, 0.0)
        left = blocks - 2 * pair
        if (takes_digits(c.FORMAT, c.NB) == 0) & (left > 1) & (width == 1):
            first, second, slot, phase = add_two((first, second), count, x, (slot, phase), ring, add_tiles, c)
        elif (takes_digits(c.FORMAT, c.NB) == 0) & is_nested(c.FORMAT) & (left > 1) & (width == SIX):
            first, second, slot, phase = add_two((first, second), count, x, (slot, phase), ring, add_six_tiles, c)
        else:
            first, slot, phase = add_one(first, gl.where(left > 0, count, 0), width, x, (slot, phase), ring, c)
            second, slot, phase = add_one(second, gl.where(left > 1, count, 0), width, x, (slot, phase), ring, c)
        acc0, acc1, acc2, acc3 = turned((acc0, acc1, acc2, acc3), first, second, c)
    return acc0, acc1, acc2, acc3, slot, phase


@gluon.jit
def turned(accs, first, second, c):
    """Put the first two blocks' new sums behind the other ones, if there are four."""
    if c.G == 4:
        return accs[2], accs[3], first, second
    else:
        return first, second, accs[2], accs[3]


@gluon.jit
def multiply_digits(accs, tiles, blocks, chunk, x, at, ring, c):
    """Do as multiply_groups with activations in digits, for weights that words.in_digits says."""
    APART: gl.constexpr = halves_apart(c.FORMAT, c.NB)
    NESTED: gl.constexpr = add_nested_halves if APART else add_nested_digits
    ADD: gl.constexpr = NESTED if is_nested(c.FORMAT) else add_digit_tiles
    ADD_SIX: gl.constexpr = add_six_halves if APART else add_six_digits
    ADD_WIDE: gl.constexpr = add_wide_halves if APART else ADD
    SIXES: gl.constexpr = is_nested(c.FORMAT) * is_mixed(c.FORMAT)
    acc0, acc1, acc2, acc3 = accs
    count, width = tiles
    slot, phase = at
    for pair in range(c.G // 2):
        first = gl.where(chunk > 0, acc0, 0.0)
        second = gl.where(chunk > 0, acc1, 0.0)
        left = blocks - 2 * pair
        at = slot, phase
        if SIXES:
            if APART and width == 2:
                first, slot, phase = add_each(first, gl.where(left > 0, count, 0), x, at, ring, ADD_WIDE, c)
                second, slot, phase = add_each(
                    second, gl.where(left > 1, count, 0), x, (slot, phase), ring, ADD_WIDE, c
                )
            elif width == SIX:
                first, second, slot, phase = add_both((first, second), count, left, x, at, ring, ADD_SIX, c)
            else:
                first, second, slot, phase = add_both((first, second), count, left, x, at, ring, ADD, c)
        else:
            first, second, slot, phase = add_both((first, second), count, left, x, at, ring, ADD, c)
        acc0, acc1, acc2, acc3 = turned((acc0, acc1, acc2, acc3), first, second, c)
    return acc0, acc1, acc2, acc3, slot, phase


@gluon.jit
def add_both(accs, count, left, x, at, ring, add: gl.constexpr, c):
    """Add the products of two row blocks, or of the one that is left. add: as of add_two."""
    first, second = accs
    slot, phase = at
    if left > 1:
        first, second, slot, phase = add_two(accs, count, x, at, ring, add, c)
    else:
        first, slot, phase = add_each(first, gl.where(left > 0, count, 0), x, at, ring, add, c)
    return first, second, slot, phase


@gluon.jit
def add_each(acc, count, x, at, ring, add: gl.constexpr, c):
    """Add the products of one row block's `count` tiles. add: as of add_two."""
    slot, phase = at
    for tile in range(count):
        mbarrier.wait(ring.full.index(slot), phase)
        (acc,) = add((acc,), (slot,), tile, x, ring.places, c)
        slot, phase = freed(slot, phase, ring, c)
    return acc, slot, phase


@gluon.jit
def freed(slot, phase, ring, c):
    """Free a slot; the next one and its phase."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ring.empty.index(slot), count=1)
    gl.thread_barrier()
    return next_slot(slot, phase, c.S)


@gluon.jit
def add_two(accs, count, x, at, ring, add: gl.constexpr, c):
    """Add the products of two row blocks' `count` tiles each, of the first block and then of the second in the ring.

    add: what adds a tile of each: add_tiles, or another of the same arguments.
    """
    first, second = accs
    slot, phase = at
    later, later_phase = skip_tiles(slot, phase, count, c.S)
    for tile in range(count):
        mbarrier.wait(ring.full.index(slot), phase)
        mbarrier.wait(ring.full.index(later), later_phase)
        first, second = add((first, second), (slot, later), tile, x, ring.places, c)
        fence_async_shared()  # as in kernel.multiply_held
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index(slot), count=1)
        mbarrier.arrive(ring.empty.index(later), count=1)
        gl.thread_barrier()
        slot, phase = next_slot(slot, phase, c.S)
        later, later_phase = next_slot(later, later_phase, c.S)
    return first, second, later, later_phase


@gluon.jit
def add_one(acc, count, width, x, at, ring, c):
    """Add the products of one row block's tiles of a width."""
    slot, phase = at
    for tile in range(count):
        mbarrier.wait(ring.full.index(slot), phase)
        if is_mixed(c.FORMAT):
            if width == 1:
                if takes_digits(c.FORMAT, c.NB) == 0:
                    (acc,) = add_tiles((acc,), (slot,), tile, x, ring.places, c)
            elif width == 2:
                if has_floats(c.FORMAT):
                    acc = add_float_tile(acc, tile, x, slot, ring.places, c)
                elif is_nested(c.FORMAT):
                    acc = add_nested_tile(acc, tile, x, slot, ring.places, c)
                else:
                    acc = add_wide_tile(acc, tile, x, slot, ring.places, c)
            elif width == SIX:
                if is_nested(c.FORMAT) and takes_digits(c.FORMAT, c.NB) == 0:
                    (acc,) = add_six_tiles((acc,), (slot,), tile, x, ring.places, c)
            else:
                if c.IMAGES == 4:
                    acc = add_half_tile(acc, tile, x, slot, ring.places, c)
        else:
            (acc,) = add_tiles((acc,), (slot,), tile, x, ring.places, c)
        slot, phase = freed(slot, phase, ring, c)
    return acc, slot, phase


@gluon.jit
def add_tiles(accs, slots, tile, x, rings, c):
    """Add to each row block's sums its tile's product with the same activations among x's.

    slots: of the tiles. rings: places of values and of scales.
    """
    if is_nested(c.FORMAT):  # half of them at a time, whose code is twice as long: all would spill
        TOGETHER: gl.constexpr = max(c.IMAGES // 2, 1)
        for turn in range(c.IMAGES // TOGETHER):
            for image in gl.static_range(TOGETHER):
                accs = add_images(accs, slots, tile, turn * TOGETHER + image, x, rings, c)
    else:
        for image in gl.static_range(c.IMAGES):
            accs = add_images(accs, slots, tile, image, x, rings, c)
    return accs


@gluon.jit
def add_images(accs, slots, tile, image, x, rings, c):
    """Add the product of an image of each tile. Arguments as of add_tiles."""
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ROWS: gl.constexpr = scale_rows(c.FORMAT)
    GROUPS: gl.constexpr = 128 // group_of(c.FORMAT)
    at = tile * (2 * c.IMAGES) + 2 * image
    first = activations(x.index(at), accs[0])
    second = activations(x.index(at + 1), accs[0])
    if has_minima(c.FORMAT):
        ones = image_ones(first, second, accs[0], c)
    made = ()
    for block in gl.static_range(len(accs)):
        acc = accs[block]
        if is_nested(c.FORMAT):
            images = rings[0].index(slots[block])._reinterpret(gl.int32, [c.IMAGES, 32, 32], STORED)
            products = image_products(images.index(image), first, second, acc, c)
            acc = add_nested_groups(acc, products, ones, image, rings[1], slots[block], c)
        else:
            values = rings[0].index(slots[block])._reinterpret(gl.int32, [c.IMAGES * 32, 32], STORED)
            scales = rings[1].index(slots[block])._reinterpret(gl.float16, [c.IMAGES * ROWS, 4, 8, 2], PLAIN)
            products = image_products(values.slice(image * 32, 32), first, second, acc, c)
            for group in gl.static_range(GROUPS):
                acc += scales_of(scales.index(image * ROWS + group), acc) * products[group]
                if has_minima(c.FORMAT):
                    acc += scales_of(scales.index(image * ROWS + GROUPS + group), acc) * ones[group]
        made = made + (acc,)
    return made


@gluon.jit
def add_nested_groups(acc, products, ones, image, ring, slot, c):
    """Add to acc an image's products and sums of activations, group by group, with nested scales and minima.

    ring: places of three copies a tile, each with two rows an image: integers of two groups, of the other two, and a
    scale and a minimum of all.
    """
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    numbers = ring.index(slot * 3 + 2)._reinterpret(gl.float16, [c.IMAGES * 2, 4, 8, 2], PLAIN)
    scale = scales_of(numbers.index(image * 2), acc)
    least = scales_of(numbers.index(image * 2 + 1), acc)
    sums = gl.zeros_like(acc)
    offsets = gl.zeros_like(acc)
    for group in gl.static_range(4):
        steps = ring.index(slot * 3 + group // 2)._reinterpret(gl.int32, [c.IMAGES * 2, 4, 8], WORDS)
        up, down = steps_of(steps.index(image * 2 + group % 2), acc, group > 1)
        sums += up * products[group]
        offsets += down * ones[group]
    return acc + scale * sums + least * offsets


@gluon.jit
def image_products(words, first, second, acc, c):
    """Sum nibbles (less 8 without minima) times activations, group by group: a tuple, each as acc. Of nested ones the
    second half is sixteen times as large.

    words: int32 [32, 32] in shared memory. first, second: activations of either half of the columns, operand B.
    """
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    PARTS: gl.constexpr = acc.shape[0]
    SIGNED: gl.constexpr = 1 - has_minima(c.FORMAT)
    UPPER: gl.constexpr = 1.0 if is_nested(c.FORMAT) else 0.0625
    zero = gl.zeros_like(acc)
    if group_of(c.FORMAT) == 32:
        b00, b01 = halves(first)
        b10, b11 = halves(second)
        low0, high0 = operands(words.slice(0, 16).load(WORDS), A, PARTS, SIGNED, c.DTYPE)
        low1, high1 = operands(words.slice(16, 16).load(WORDS), A, PARTS, SIGNED, c.DTYPE)
        return (
            mma_v2(low0, b00, zero),
            mma_v2(low1, b01, zero),
            mma_v2(high0, b10, zero) * UPPER,
            mma_v2(high1, b11, zero) * UPPER,
        )
    else:
        low, high = operands(words.load(WORDS), A, PARTS, SIGNED, c.DTYPE)
        product0 = mma_v2(low, first, zero)
        product1 = mma_v2(high, second, zero) * 0.0625
        if group_of(c.FORMAT) == 64:
            return product0, product1
        else:
            return (product0 + product1,)


@gluon.jit
def image_ones(first, second, acc, c):
    """Sum an image's activations, group by group: a tuple, each as acc. first, second: as of image_products."""
    zero = gl.zeros_like(acc)
    if group_of(c.FORMAT) == 32:
        b00, b01 = halves(first)
        b10, b11 = halves(second)
        one = ones(acc, 32, c.DTYPE)
        return mma_v2(one, b00, zero), mma_v2(one, b01, zero), mma_v2(one, b10, zero), mma_v2(one, b11, zero)
    else:
        one = ones(acc, 64, c.DTYPE)
        sum0 = mma_v2(one, first, zero)
        sum1 = mma_v2(one, second, zero)
        if group_of(c.FORMAT) == 64:
            return sum0, sum1
        else:
            return (sum0 + sum1,)


@gluon.jit
def ones(acc, K: gl.constexpr, DTYPE: gl.constexpr):
    """Make operand A of nothing but the unit of nibbles, [PARTS, 64 / PARTS, K]."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.full([acc.shape[0], acc.shape[1], K], _ONE, gl.int16, A).to(DTYPE, bitcast=True)


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
def operands(words, OPERAND: gl.constexpr, PARTS: gl.constexpr, SIGNED: gl.constexpr, DTYPE: gl.constexpr):
    """Build operands A, [PARTS, 64 / PARTS, K], of both halves of the columns. words: int32 [K / 2, 32] of each thread.

    No value moves between threads.
    """
    values = nibbles(words, SIGNED, DTYPE)
    return nibble_operand(values[:4], OPERAND, PARTS, DTYPE), nibble_operand(values[4:], OPERAND, PARTS, DTYPE)


@gluon.jit
def nibble_operand(values, OPERAND: gl.constexpr, PARTS: gl.constexpr, DTYPE: gl.constexpr):
    """Build one operand A of four values a word, int16 bits."""
    PASSES: gl.constexpr = values[0].shape[0] // 16
    # [32 columns, 16 rows, row in 8, pair of columns in 8, half of 16 rows, 8 columns, 16 columns, column of a pair]
    a = gl.join(gl.join(values[0], values[1]), gl.join(values[2], values[3])).to(DTYPE, bitcast=True)
    a = gl.permute(gl.reshape(a, [PASSES, 4, 8, 4, 2, 2, 2, 2]), (1, 4, 2, 0, 6, 5, 3, 7))
    return gl.convert_layout(gl.reshape(a, [PARTS, 64 // PARTS, 32 * PASSES]), OPERAND, assert_trivial=True)
