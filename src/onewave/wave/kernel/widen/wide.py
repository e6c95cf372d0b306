"""Products of 8-bit and of 16-bit weights beside 4-bit ones (groups.py), for steps of a mixed launch.

A tile has as many bytes whatever its weights are: half as many images of 8-bit weights, a quarter of 16-bit ones. So
the ring and its loads know nothing of it.

8 bits. A byte is a number n from 0 to 255 for n - 128. It is a subnormal number in the lower byte of a 16-bit one: with
its highest bit it is bfloat16's exponent 1, which goes on where the mantissa ends. Groups of wide_group columns have a
scale each, summed as in groups.py. 16 bits: the numbers themselves, in the order of operand A's registers; their sums
are larger than the others by the unit of subnormal numbers. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onewave.wave.kernel.widen.byte_values import widened
from onewave.wave.kernel.widen.nibble_values import both, unsigned_bytes
from onewave.wave.kernel.widen.operands import activations, operand, scales_of, steps_of
from onewave.wave.kernel.words import wide_group, wide_number

# The bits of a subnormal number, -128 times the unit.
_LESS_128 = gl.constexpr(-0x7F80)


@gluon.jit
def add_wide_tile(acc, tile, x, slot, rings, c):
    """Add to acc an 8-bit tile's product with its activations among x's. rings: places of values and of scales."""
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    IMAGES: gl.constexpr = c.IMAGES // 2
    GROUP: gl.constexpr = wide_group(c.FORMAT)
    HALF: gl.constexpr = 64 // GROUP  # groups of 64 columns
    NUMBER: gl.constexpr = gl.float32 if wide_number(c.FORMAT) == 4 else gl.float16
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    values = rings[0].index(slot)._reinterpret(gl.int32, [IMAGES * 64, 32], STORED)
    scales = rings[1].index(slot)._reinterpret(NUMBER, [IMAGES * 2 * HALF, 4, 8, 2], PLAIN)
    for half in gl.static_range(2 * IMAGES):
        words = values.slice(half * 32, 32)
        b = activations(x.index(tile * (2 * IMAGES) + half), acc)
        for group in gl.static_range(HALF):
            sums = group_sum(words, b, group, acc, GROUP, c)
            acc += scales_of(scales.index(half * HALF + group), acc) * sums
    return acc


@gluon.jit
def add_nested_tile(acc, tile, x, slot, rings, c):
    """Add to acc such a tile's product where 4-bit ones are nested.

    32 columns have a scale, a minimum and two integers, by which both are multiplied; without a minimum the second
    belongs to the scale of the second 16 columns. A copy has four rows an image of each: scales, minima, integers.
    """
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    IMAGES: gl.constexpr = c.IMAGES // 2
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    STEPS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    values = rings[0].index(slot)._reinterpret(gl.int32, [IMAGES * 2, 32, 32], STORED)
    scales = rings[1].index(slot * 3)._reinterpret(gl.float16, [IMAGES * 4, 4, 8, 2], PLAIN)
    minima = rings[1].index(slot * 3 + 1)._reinterpret(gl.float16, [IMAGES * 4, 4, 8, 2], PLAIN)
    steps = rings[1].index(slot * 3 + 2)._reinterpret(gl.int32, [IMAGES * 4, 4, 8], STEPS)
    for half in range(2 * IMAGES):  # not unrolled: an 8B's step of Q4_K_M took 2.62 ms instead of 2.47
        words = values.index(half)
        b = activations(x.index(tile * (2 * IMAGES) + half), acc)
        for group in gl.static_range(2):
            scale = scales_of(scales.index(half * 2 + group), acc)
            least = scales_of(minima.index(half * 2 + group), acc)
            up, other = steps_of(steps.index(half * 2 + group), acc)
            first, less = group_sums(words, b, 2 * group, acc, 16, c)
            second, less_more = group_sums(words, b, 2 * group + 1, acc, 16, c)
            acc += (scale * up) * (first + less)
            acc += (scale * gl.where(least == 0.0, other, up)) * (second + less_more)
            # The term that takes 128 away is -128 times the sum of the activations.
            acc += (least * other * -0.0078125) * (less + less_more)
    return acc


@gluon.jit
def add_float_tile(acc, tile, x, slot, rings, c):
    """Add to acc an e4m3 tile's product: a scale for each row of an image, 128 columns. Widened as byte_values has
    them, the numbers are larger than subnormal ones by the exponents' difference."""
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    IMAGES: gl.constexpr = c.IMAGES // 2
    UNIT: gl.constexpr = 2.0**-16 if c.DTYPE == gl.float16 else 2.0**-13
    values = rings[0].index(slot)._reinterpret(gl.int32, [IMAGES * 64, 32], STORED)
    scales = rings[1].index(slot)._reinterpret(gl.float32, [IMAGES, 4, 8, 2], PLAIN)
    for image in gl.static_range(IMAGES):
        sums = gl.zeros_like(acc)
        for half in gl.static_range(2):
            numbers = widened(values.slice(image * 64 + half * 32, 32).load(WORDS), c.DTYPE, 2)
            b = activations(x.index(tile * (2 * IMAGES) + 2 * image + half), acc)
            sums = mma_v2(operand(numbers, A, acc.shape[0], c.DTYPE), b, sums)
        acc += scales_of(scales.index(image), acc) * (sums * UNIT)
    return acc


@gluon.jit
def group_sum(words, b, group: gl.constexpr, acc, GROUP: gl.constexpr, c):
    """Sum a group's (n - 128) times activations, as acc. words: of 64 columns, int32 [32, 32] in shared memory."""
    sums, less = group_sums(words, b, group, acc, GROUP, c)
    return sums + less


@gluon.jit
def group_sums(words, b, group: gl.constexpr, acc, GROUP: gl.constexpr, c):
    """Sum a group's n times activations and -128 times activations, each as acc. Arguments as of group_sum."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    PARTS: gl.constexpr = acc.shape[0]
    zero = gl.zeros_like(acc)
    constant = gl.full([PARTS, 64 // PARTS, GROUP], _LESS_128, gl.int16, A).to(c.DTYPE, bitcast=True)
    part = columns_of(b, group, GROUP)
    if GROUP == 64:
        a = operand(unsigned_bytes(words.load(WORDS)), A, PARTS, c.DTYPE)
    else:
        own = words.slice(group * GROUP // 32 * 16, 16).load(WORDS)
        if GROUP == 16:
            first, second = gl.split(gl.permute(gl.reshape(own, [16, 8, 2, 2]), (0, 1, 3, 2)))
            own = first if group % 2 == 0 else second
        a = operand(unsigned_bytes(own), A, PARTS, c.DTYPE)
    return mma_v2(a, part, zero), mma_v2(constant, part, zero)


@gluon.jit
def columns_of(b, group: gl.constexpr, GROUP: gl.constexpr):
    """Take a group's columns of operand B, [PARTS, 64, N / PARTS]."""
    if GROUP == 64:
        return b
    else:
        parts = gl.permute(gl.reshape(b, [b.shape[0], 2, 32, b.shape[2]]), (0, 2, 3, 1))
        first, second = gl.split(parts)
        half = gl.convert_layout(first if group * GROUP < 32 else second, b.type.layout, assert_trivial=True)
        if GROUP == 16:
            parts = gl.permute(gl.reshape(half, [b.shape[0], 2, 16, b.shape[2]]), (0, 2, 3, 1))
            first, second = gl.split(parts)
            half = gl.convert_layout(first if group % 2 == 0 else second, b.type.layout, assert_trivial=True)
        return half


@gluon.jit
def add_half_tile(acc, tile, x, slot, rings, c):
    """Add to acc a 16-bit tile's product, one image, with its activations among x's."""
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    PARTS: gl.constexpr = acc.shape[0]
    UNIT: gl.constexpr = 2.0**-24 if c.DTYPE == gl.float16 else 2.0**-133
    values = rings[0].index(slot)._reinterpret(gl.int32, [128, 32], STORED)
    sums = gl.zeros_like(acc)
    for half in gl.static_range(2):
        low, high = both(values.slice(half * 64, 64).load(WORDS))
        # [16 columns, 16 rows, row in 8, pair of columns in 8, 8 columns of 16, half of 16 rows, column of a pair]
        a = gl.reshape(gl.join(low, high).to(c.DTYPE, bitcast=True), [4, 4, 8, 4, 2, 2, 2])
        a = gl.reshape(gl.permute(a, (1, 5, 2, 0, 4, 3, 6)), [PARTS, 64 // PARTS, 64])
        a = gl.convert_layout(a, A, assert_trivial=True)
        sums = mma_v2(a, activations(x.index(tile * 2 + half), acc), sums)
    return acc + sums * UNIT
