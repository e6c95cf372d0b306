"""Products of int8 and 4-bit weights with activations in two digits of eight bits, by the integer tensor cores.

An activation is scale * (256 * high + low), both signed bytes, in units of 2^-14 of the power of two at or below the
largest of 128 columns (two operations of rounding: none of a bfloat16 number within 2^7 of the largest). The exchange
partition makes the digits while it stores activations. A nibble n becomes the byte 16 (n - 8) by one or two
instructions for four, where a 16-bit number takes nine for eight; an int8 weight is a byte as it lies. Sums of a
group's products, or of 128 columns', are whole numbers, exact up to the one float32 that high and low digits make; a
group's and the activations' scales multiply it, in the order of the columns.

Both digits of a sequence are neighbouring columns of operand B, so one thread has both sums. A warp multiplies by the
columns of few column groups, which would leave half of a product's eight columns unused: digits cost nothing for up to
four sequences.

A register of operand A is four columns of a row, of k32 the columns' lowest five bits in this order, from the highest:
8 columns, two pairs, 16 columns, column of a pair (group_nibbles.nibble_images, row_bytes.bytes_of_registers): the
activations of an image lie in the same order. Constexprs: kernel.py.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onewave.wave.kernel.finish import to_float
from onewave.wave.kernel.widen.operands import byte_products, parts_of, scales_of
from onewave.wave.kernel.words import box_rows, group_of, halves_apart, is_nested, scale_rows

# Added to a number below 2^15 in magnitude, its bits end in the number, 128 more.
_PLACED = gl.constexpr(1.5 * 2**23 + 128)
_PLACED_BITS = gl.constexpr(0x4B400080)
_INFINITE = gl.constexpr(0x7F800000)
_DIGITS = gl.constexpr(
    "\n".join(
        (
            "{",
            ".reg .b32 x, y, z;",
            "prmt.b32 x, $2, $3, 0x5140;",  # the lowest bytes, then the next ones
            "prmt.b32 y, $4, $5, 0x5140;",
            "prmt.b32 $0, x, y, 0x7632;",
            "prmt.b32 z, x, y, 0x5410;",
            "xor.b32 $1, z, 0x80808080;",
            "}",
        )
    )
)
_NIBBLE_BYTES = gl.constexpr(
    "\n".join(
        (
            "{",
            ".reg .b32 x;",
            "shl.b32 x, $2, 4;",
            "lop3.b32 $0, x, 0xf0f0f0f0, 0x80808080, 0x6A;",  # (x & mask) ^ eights
            "lop3.b32 $1, $2, 0xf0f0f0f0, 0x80808080, 0x6A;",
            "}",
        )
    )
)


@gluon.jit
def digit_words(a, b, a_next, b_next):
    """Take the digits of four numbers, 128 more in the lower 16 bits each: words of four high and of four low ones."""
    return gl.inline_asm_elementwise(
        _DIGITS, "=&r,=&r,r,r,r,r", [a, b, a_next, b_next], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def nibble_bytes(values):
    """Widen nibbles n to bytes 16 (n - 8): of the bytes' lower nibbles, then of the upper. values: int8."""
    return gl.inline_asm_elementwise(
        _NIBBLE_BYTES, "=&r,=r,r", [values], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )  # fmt: skip


@gluon.jit
def digits_of(first, second, DTYPE: gl.constexpr, FORMAT: gl.constexpr):
    """Split activations into digits. first, second: words of columns 16 apart, [A, B, 32], 128 columns in both.

    Returns words of high and of low digits, likewise, each in the order of operand A's bytes, and the groups' scales,
    for bytes that are a weight (int8) or 16 times one and sums in the unit of byte_values.lowered: float32 [A, B]; NaN
    for a group with a number that is not finite. Last come the sums of 32 columns' whole numbers, int32 [A, B, 4].
    """
    UNIT: gl.constexpr = (24 if DTYPE == gl.float16 else 133 - 64) + (0 if FORMAT == 1 else 4)
    if FORMAT == 1 and DTYPE != gl.float16:
        a, a_next = wide_pair(first)
        b, b_next = wide_pair(second)
    else:
        a, a_next = to_float(first, DTYPE)
        b, b_next = to_float(second, DTYPE)
    largest = larger(larger(a, a_next), larger(b, b_next))
    bits = gl.minimum(gl.max(largest.to(gl.int32, bitcast=True), axis=2), _INFINITE)
    # 127 / 128 of a power of two and more count as the next one, so that the high digit is 127 at most.
    exponent = gl.maximum((bits + 0x10000) >> 23, 15 + UNIT)
    factor = gl.expand_dims(((268 - exponent) << 23).to(gl.float32, bitcast=True), 2)
    scale = gl.where(bits == _INFINITE, -1, (exponent - 14 - UNIT) << 23).to(gl.float32, bitcast=True)
    a, b = placed(a, factor), placed(b, factor)
    a_next, b_next = placed(a_next, factor), placed(b_next, factor)
    high, low = digit_words(a, b, a_next, b_next)
    whole = (a - _PLACED_BITS) + (b - _PLACED_BITS) + (a_next - _PLACED_BITS) + (b_next - _PLACED_BITS)
    sums = gl.sum(gl.reshape(whole, [whole.shape[0], whole.shape[1], 4, 8]), axis=3)
    return high, low, scale, sums


@gluon.jit
def wide_pair(words):
    """Both bfloat16 numbers of words, float32."""
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def digits_in_rows(digits):
    """Put digits_of's result in operand B's order: digits int32 [A * B * 2, 32], scales [A, B] and sums [A, 4 B]."""
    high, low, scale, sums = digits
    A: gl.constexpr = scale.shape[0]
    both = gl.permute(gl.join(high, low), (0, 1, 3, 2))
    return gl.reshape(both, [A * scale.shape[1] * 2, 32]), scale, gl.reshape(sums, [A, 4 * scale.shape[1]])


@gluon.jit
def digits_apart(digits):
    """Put the halves of 128 columns apart in digits_in_rows' result: digits int32 [A * 4 B, 32], scales [A, 2 B] and
    sums [A, 4 B].

    A row of digits has 16 columns of the first half, then 16 of the second, one of them zeros. Rows: part of 4, half,
    column group of 2, digit; scales likewise; sums: part, half, column group, 32 columns.
    """
    both, scale, sums = digits
    A: gl.constexpr = scale.shape[0]
    half = gl.arange(0, 32, layout=gl.SliceLayout(0, both.type.layout))[None, :] // 16
    # [image, part, column group, digit, half, 32 columns, 16 of them, 4 words; the row's half]
    cut = gl.join(gl.where(half == 0, both, 0), gl.where(half == 1, both, 0))
    cut = gl.permute(gl.reshape(cut, [A, 4, 2, 2, 2, 2, 2, 4, 2]), (0, 1, 8, 2, 3, 5, 6, 4, 7))
    scales = gl.permute(gl.reshape(gl.join(scale, scale), [A, 4, 2, 2]), (0, 1, 3, 2))
    totals = gl.permute(gl.reshape(sums, [A, 4, 2, 2, 2]), (0, 1, 3, 2, 4))
    return gl.reshape(cut, [A * 32, 32]), gl.reshape(scales, [A, 16]), gl.reshape(totals, [A, 32])


@gluon.jit
def larger(a, b):
    """The larger magnitude of two numbers, or NaN."""
    return gl.maximum(gl.abs(a), gl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def placed(values, factor):
    """Round scaled values to whole numbers; the bits as _PLACED leaves them."""
    return gl.fma(values, factor + gl.zeros_like(values), gl.full_like(values, _PLACED)).to(gl.int32, bitcast=True)


@gluon.jit
def store_digits(digits, rows, scales):
    """Store digits_in_rows' result to shared memory: images' rows, high and low in turn, and scales."""
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    rows._reinterpret(gl.int32, digits[0].shape, STORED).store(digits[0])
    scales.store(digits[1])


@gluon.jit
def no_digit_sums(c):
    """Zeros where the float32 sums of four row blocks are, [PARTS, 64 / PARTS, N / PARTS] each."""
    N: gl.constexpr = 64 // c.R * c.NB
    PARTS: gl.constexpr = parts_of(c.R, 2 * c.NB)
    zero = joined_digits(gl.zeros([PARTS, 64 // PARTS, 2 * N // PARTS], gl.int32, byte_products(PARTS)))
    return zero, zero, zero, zero


@gluon.jit
def digits_at(place, activations, PARTS: gl.constexpr, N: gl.constexpr, c):
    """A chunk of activations, image by image: digits, int8 [PARTS, 2 N / PARTS, 128], and scales [PARTS, N / PARTS];
    beside nested weights their sums, [PARTS, N / PARTS, 4]."""
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    OWN: gl.constexpr = N // PARTS
    FOUR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    digits = activations.places[0].index(place)
    scales = activations.places[1].index(place)
    if halves_apart(c.FORMAT, c.NB):
        FIVE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
        sums = activations.places[2].index(place)._reinterpret(gl.int32, [c.PC, 4, 2, 2, 2], FIVE)
        x = digits._reinterpret(gl.int8, [c.PC, 4, 8, 128], OPERAND)
        return x, scales._reinterpret(gl.float32, [c.PC, 4, 2, 2], FOUR), sums
    else:
        x = digits._reinterpret(gl.int8, [c.PC, PARTS, 2 * OWN, 128], OPERAND)
        y = x, scales._reinterpret(gl.float32, [c.PC, PARTS, OWN], PLAIN)
        if is_nested(c.FORMAT):
            y = y + (activations.places[2].index(place)._reinterpret(gl.int32, [c.PC, PARTS, OWN, 4], FOUR),)
        return y


@gluon.jit
def joined_digits(sums):
    """Join the sums of both digits, int32 [PARTS, rows, 2 N / PARTS], in float32."""
    high, low = gl.split(gl.reshape(sums, [sums.shape[0], sums.shape[1], sums.shape[2] // 2, 2]))
    return (high * 256 + low).to(gl.float32)


@gluon.jit
def add_digit_tiles(accs, slots, tile, x, rings, c):
    """Do as groups.add_tiles with digits. x: of digits_at."""
    for image in gl.static_range(c.IMAGES):
        accs = add_digit_images(accs, slots, tile, image, x, rings, c)
    return accs


@gluon.jit
def add_digit_images(accs, slots, tile, image, x, rings, c):
    """Add the product of an image of each tile. Arguments as of add_digit_tiles."""
    values_of, scales_of_x = x
    PARTS: gl.constexpr = accs[0].shape[0]
    ACC: gl.constexpr = byte_products(PARTS)
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    HEIGHT: gl.constexpr = box_rows(c.FORMAT, 1)
    ROWS: gl.constexpr = scale_rows(c.FORMAT)
    GROUPS: gl.constexpr = 128 // group_of(c.FORMAT)
    at = tile * c.IMAGES + image
    b = values_of.index(at).permute((0, 2, 1)).load(gl.DotOperandLayout(1, ACC, 4))
    of_x = gl.expand_dims(scales_of_x.index(at).load(gl.SliceLayout(1, accs[0].type.layout)), 1)
    made = ()
    for block in gl.static_range(len(accs)):
        acc = accs[block]
        values = rings[0].index(slots[block])._reinterpret(gl.int8, [c.IMAGES * HEIGHT, 128], STORED)
        if c.FORMAT > 1:
            scales = rings[1].index(slots[block])._reinterpret(gl.float16, [c.IMAGES * ROWS, 4, 8, 2], PLAIN)
        products = digit_products(values.slice(image * HEIGHT, HEIGHT), b, ACC, c)
        for group in gl.static_range(GROUPS):
            factor = of_x
            if c.FORMAT > 1:
                factor = scales_of(scales.index(image * ROWS + group), acc) * of_x
            acc += factor * joined_digits(products[group])
        made = made + (acc,)
    return made


@gluon.jit
def digit_products(values, b, ACC: gl.constexpr, c):
    """Sum an image's bytes times digits, group by group: a tuple of int32 sums. values: int8 [32, 128] in shared
    memory, or [64, 128] of one-byte weights. b: digits of its 128 columns, operand B."""
    first, second = halves_of(b)
    zero = gl.zeros([b.shape[0], 64 // b.shape[0], b.shape[2]], gl.int32, ACC)
    if group_of(c.FORMAT) == 32:
        b0, b1 = halves_of(first)
        b2, b3 = halves_of(second)
        low0, high0 = digit_operands(values.slice(0, 16), b.shape[0], ACC, c)
        low1, high1 = digit_operands(values.slice(16, 16), b.shape[0], ACC, c)
        return mma_v2(low0, b0, zero), mma_v2(low1, b1, zero), mma_v2(high0, b2, zero), mma_v2(high1, b3, zero)
    else:
        low, high = digit_operands(values, b.shape[0], ACC, c)
        if group_of(c.FORMAT) == 64:
            return mma_v2(low, first, zero), mma_v2(high, second, zero)
        else:
            return (mma_v2(high, second, mma_v2(low, first, zero)),)


@gluon.jit
def halves_of(b):
    """Split operand B [PARTS, K, N] into its first and second columns of the matrix."""
    both = gl.permute(gl.reshape(b, [b.shape[0], 2, b.shape[1] // 2, b.shape[2]]), (0, 2, 3, 1))
    first, second = gl.split(both)
    return (
        gl.convert_layout(first, b.type.layout, assert_trivial=True),
        gl.convert_layout(second, b.type.layout, assert_trivial=True),
    )


@gluon.jit
def digit_operands(values, PARTS: gl.constexpr, ACC: gl.constexpr, c):
    """Load an image's bytes, int8 [rows, 128], and build operands A, [PARTS, 64 / PARTS, K], of both halves of the
    columns. No value moves between threads."""
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    if c.FORMAT == 1:
        low = values.slice(0, 32).load(BYTES)
        high = values.slice(32, 32).load(BYTES)
    else:
        low, high = nibble_bytes(values.load(BYTES))
    HALF: gl.constexpr = 5 if c.FORMAT == 1 else 4
    return digit_operand(low, PARTS, ACC, HALF), digit_operand(high, PARTS, ACC, HALF)


@gluon.jit
def digit_operand(values, PARTS: gl.constexpr, ACC: gl.constexpr, HALF: gl.constexpr = 4):
    """Build an operand A of bytes in the order of an image. HALF: 5 where 8 columns come before half of 16 rows."""
    PASSES: gl.constexpr = values.shape[0] // 16
    # [32 columns, 16 rows, row in 8, two pairs of columns, half of 16 rows, 8 columns, 16 columns and column of a pair]
    a = gl.permute(gl.reshape(values, [PASSES, 4, 8, 4, 2, 2, 4]), (1, HALF, 2, 0, 9 - HALF, 3, 6))
    a = gl.reshape(a, [PARTS, 64 // PARTS, 32 * PASSES])
    return gl.convert_layout(a, gl.DotOperandLayout(0, ACC, 4), assert_trivial=True)
