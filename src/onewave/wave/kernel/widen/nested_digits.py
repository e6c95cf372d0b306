"""Products of nested 4-bit and of 6-bit weights with activations in digits (digits.py, groups.py, six_bits.py).

All of an image's sums are whole numbers: a group's products times its integer, digit by digit (below 2^25 for nibbles
and 2^28 for six bits), and the sum of its activations, which the exchange partition makes, times its other one. One
float32 for an image then takes the scale, the other the minimum.

A nibble n is the byte n; a number of six bits the byte 4 (n - 32). Its groups have 16 columns, every other byte of a
register, half of what a product takes: two products with the other half of the activations' bytes zero. Constexprs:
kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onewave.wave.kernel.widen.digits import digit_operand, halves_of
from onewave.wave.kernel.widen.nibble_values import both
from onewave.wave.kernel.widen.operands import beside_rows, byte_products, rows_in_threads, scales_of
from onewave.wave.kernel.widen.six_bits import four_of, of_image, words_of_rows


def _text(*instructions: str) -> str:
    return "\n".join(["{", ".reg .b32 x, y;", *instructions, "}"])


_UNSIGNED = gl.constexpr(_text("and.b32 $0, $2, 0x0f0f0f0f;", "shr.u32 x, $2, 4;", "and.b32 $1, x, 0x0f0f0f0f;"))
_SIXES = gl.constexpr(
    _text(
        *(f"and.b32 ${at}, ${4 + at}, 0xfcfcfcfc;" for at in range(3)),
        "shl.b32 x, $4, 6;",
        "and.b32 x, x, 0xc0c0c0c0;",
        "shl.b32 y, $5, 4;",
        "lop3.b32 x, y, 0x30303030, x, 0xEA;",  # (y & mask) | x
        "shl.b32 y, $6, 2;",
        "lop3.b32 $3, y, 0x0c0c0c0c, x, 0xEA;",
    )
)
_EVERY_OTHER = gl.constexpr(_text("and.b32 $0, $2, 0x00ff00ff;", "and.b32 $1, $2, 0xff00ff00;"))
# A byte and its sign three times.
_INTEGERS = gl.constexpr(_text(*(f"prmt.b32 ${at}, $4, $4, 0x{0x8880 + 0x1111 * at:04x};" for at in range(4))))


@gluon.jit
def unsigned_nibbles(values):
    """Widen nibbles to bytes: of the bytes' lower nibbles, then of the upper. values: int8."""
    return gl.inline_asm_elementwise(
        _UNSIGNED, "=&r,=r,r", [values], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )  # fmt: skip


@gluon.jit
def six_bytes(first, second, third):
    """Widen three planes' words, int8, to four of bytes 4 (n - 32) in the order of six_bits.six_images."""
    return gl.inline_asm_elementwise(
        _SIXES, "=&r,=&r,=&r,=r,r,r,r", [first, second, third], dtype=(gl.int8,) * 4, is_pure=True, pack=4
    )  # fmt: skip


@gluon.jit
def every_other(digits):
    """Activations' digits, int8, with zeros for the second of every 16 columns, and for the first."""
    return gl.inline_asm_elementwise(
        _EVERY_OTHER, "=&r,=r,r", [digits], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )  # fmt: skip


@gluon.jit
def step_integers(words):
    """Each word's four signed bytes as int32: two of a row, then of the row 8 below."""
    return gl.inline_asm_elementwise(
        _INTEGERS, "=&r,=&r,=&r,=r,r", [words], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def integers_beside(words, first_of, second_of):
    """Put two integers for each row of A, of words for 8 rows and the ones 8 below, beside first_of and second_of."""
    first, second, first_below, second_below = step_integers(words)
    return beside_rows(gl.join(first, first_below), first_of), beside_rows(gl.join(second, second_below), second_of)


@gluon.jit
def add_nested_digits(accs, slots, tile, x, rings, c):
    """Do as groups.add_tiles with nested nibbles. x: of digits_at."""
    TOGETHER: gl.constexpr = max(c.IMAGES // 2, 1)
    for turn in range(c.IMAGES // TOGETHER):
        for image in gl.static_range(TOGETHER):
            accs = add_nested_images(accs, slots, tile, turn * TOGETHER + image, x, rings, c)
    return accs


@gluon.jit
def add_nested_images(accs, slots, tile, image, x, rings, c):
    """Add the product of an image of each tile. Arguments as of add_nested_digits."""
    PARTS: gl.constexpr = accs[0].shape[0]
    ACC: gl.constexpr = byte_products(PARTS)
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    at = tile * c.IMAGES + image
    b0, b1, b2, b3, of_x = digits_of_image(x, at, accs[0])
    totals = totals_of(x[2].index(at), accs[0])
    of_x *= 16.0
    made = ()
    for block in gl.static_range(len(accs)):
        acc = accs[block]
        values = rings[0].index(slots[block])._reinterpret(gl.int8, [c.IMAGES, 32, 128], STORED).index(image)
        low0, high0 = unsigned_operands(values.slice(0, 16), PARTS, ACC)
        low1, high1 = unsigned_operands(values.slice(16, 16), PARTS, ACC)
        zero = gl.zeros([PARTS, 64 // PARTS, b0.shape[2]], gl.int32, ACC)
        products = mma_v2(low0, b0, zero), mma_v2(low1, b1, zero), mma_v2(high0, b2, zero), mma_v2(high1, b3, zero)
        sums = zero
        offsets = gl.zeros_like(acc).to(gl.int32)
        for group in gl.static_range(4):
            steps = rings[1].index(slots[block] * 3 + group // 2)._reinterpret(gl.int32, [c.IMAGES * 2, 4, 8], WORDS)
            words = steps.index(image * 2 + group % 2).load(rows_in_threads())
            up, down = integers_beside(words, zero, acc)
            sums += up * products[group]
            offsets += down * totals[group]
        numbers = rings[1].index(slots[block] * 3 + 2)._reinterpret(gl.float16, [c.IMAGES * 2, 4, 8, 2], PLAIN)
        scale = scales_of(numbers.index(image * 2), acc)
        least = scales_of(numbers.index(image * 2 + 1), acc)
        acc += (scale * of_x) * joined_sums(sums)
        made = made + (acc + (least * of_x) * offsets.to(gl.float32),)
    return made


@gluon.jit
def digits_of_image(x, at, acc):
    """Load an image's activations: digits of four times 32 columns, operand B, and their scales, beside acc."""
    ACC: gl.constexpr = byte_products(acc.shape[0])
    b = x[0].index(at).permute((0, 2, 1)).load(gl.DotOperandLayout(1, ACC, 4))
    first, second = halves_of(b)
    b0, b1 = halves_of(first)
    b2, b3 = halves_of(second)
    return b0, b1, b2, b3, gl.expand_dims(x[1].index(at).load(gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def totals_of(sums, acc):
    """Load four groups' sums of activations, int32 [PARTS, N / PARTS, 4] in shared memory: four, beside acc."""
    like = gl.zeros([acc.shape[0], acc.shape[2]], gl.int32, gl.SliceLayout(1, acc.type.layout))
    pair = gl.join(like, like)
    four = gl.join(pair, pair)
    flat = gl.reshape(four, [acc.shape[0], acc.shape[2], 4])
    loaded = gl.reshape(sums.load(flat.type.layout), [acc.shape[0], acc.shape[2], 2, 2])
    even, odd = gl.split(loaded)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        beside_columns(first, acc),
        beside_columns(second, acc),
        beside_columns(third, acc),
        beside_columns(fourth, acc),
    )


@gluon.jit
def beside_columns(numbers, acc):
    """Put a number for each column of the activations beside acc: [PARTS, 1, N / PARTS]."""
    own = gl.convert_layout(numbers, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    return gl.expand_dims(own, 1)


@gluon.jit
def unsigned_operands(values, PARTS: gl.constexpr, ACC: gl.constexpr):
    """Do as digits.digit_operands with unsigned nibbles."""
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    low, high = unsigned_nibbles(values.load(BYTES))
    return digit_operand(low, PARTS, ACC), digit_operand(high, PARTS, ACC)


@gluon.jit
def joined_sums(sums):
    """Join the sums of both digits, int32 [PARTS, rows, 2 N / PARTS], in float32, each below 2^31."""
    high, low = gl.split(gl.reshape(sums, [sums.shape[0], sums.shape[1], sums.shape[2] // 2, 2]))
    return high.to(gl.float32) * 256.0 + low.to(gl.float32)


@gluon.jit
def add_six_digits(accs, slots, tile, x, rings, c):
    """Do as six_bits.add_six_tiles with digits. x: of digits_at."""
    IMAGES: gl.constexpr = c.IMAGES // 2
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    steps = ()
    scales = ()
    for block in gl.static_range(len(accs)):
        rows = rings[0].index(slots[block])._reinterpret(gl.int32, [8 * IMAGES, 8, 32], STORED)
        steps = steps + (gl.reshape(rows.index(6 * IMAGES).load(words_of_rows(4)), [2, 4, 8, 4]),)
        scales = scales + (gl.reshape(rows.index(7 * IMAGES).load(words_of_rows(1)), [2, 2, 2, 4, 8]),)
    for image in gl.static_range(IMAGES):
        accs = add_six_digit_images(accs, slots, steps, scales, tile * IMAGES + image, image, x, rings[0], c)
    return accs


@gluon.jit
def add_six_digit_images(accs, slots, steps, scales, at, image: gl.constexpr, x, ring, c):
    """Add the product of an image of each tile. steps, scales: of all images, for each row block. at: of the image's
    activations among x's."""
    IMAGES: gl.constexpr = c.IMAGES // 2
    PARTS: gl.constexpr = accs[0].shape[0]
    ACC: gl.constexpr = byte_products(PARTS)
    PLANES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    b0, b1, b2, b3, of_x = digits_of_image(x, at, accs[0])
    bs = every_other(b0), every_other(b1), every_other(b2), every_other(b3)
    of_x *= 4.0
    made = ()
    for block in gl.static_range(len(accs)):
        acc = accs[block]
        planes = ring.index(slots[block])._reinterpret(gl.int8, [4 * IMAGES, 16, 128], PLANES)
        first = planes.index(3 * image).load(BYTES)
        second = planes.index(3 * image + 1).load(BYTES)
        operands = six_operands(six_bytes(first, second, planes.index(3 * image + 2).load(BYTES)), PARTS, ACC)
        own = four_of(of_image(steps[block], image))
        zero = gl.zeros([PARTS, 64 // PARTS, b0.shape[2]], gl.int32, ACC)
        sums = zero
        for word in gl.static_range(4):
            up, up_next = integers_beside(own[word], zero, zero)
            sums += up * mma_v2(operands[word], bs[word][0], zero)
            sums += up_next * mma_v2(operands[word], bs[word][1], zero)
        first_four, _ = gl.split(gl.permute(scales[block], (1, 2, 3, 4, 0)))
        first_two, _ = gl.split(gl.permute(first_four, (1, 2, 3, 0)))
        above, below = both(of_image(first_two, image))
        scale = gl.join(above, below).to(gl.float16, bitcast=True).to(gl.float32)
        made = made + (acc + (beside_rows(scale, acc) * of_x) * joined_sums(sums),)
    return made


@gluon.jit
def six_operands(values, PARTS: gl.constexpr, ACC: gl.constexpr):
    """Build operands A of four times 32 columns. values: of six_bytes, int8 [16, 128] each."""
    four = gl.join(gl.join(values[0], values[1]), gl.join(values[2], values[3]))
    # [16 rows, row in 8, two pairs of columns, 64 columns, 32 of them, byte, half of 16 rows, 8 columns]
    cut = gl.permute(gl.reshape(four, [4, 8, 4, 2, 2, 4, 2, 2]), (0, 6, 1, 7, 2, 5, 4, 3))
    first, second = gl.split(cut)
    a0, a1 = gl.split(first)
    a2, a3 = gl.split(second)
    return (
        six_operand(a0, PARTS, ACC),
        six_operand(a1, PARTS, ACC),
        six_operand(a2, PARTS, ACC),
        six_operand(a3, PARTS, ACC),
    )


@gluon.jit
def six_operand(values, PARTS: gl.constexpr, ACC: gl.constexpr):
    """Build operand A of 32 columns, [16 rows, half of them, row in 8, 8 columns, two pairs, byte]."""
    a = gl.reshape(values, [PARTS, 64 // PARTS, 32])
    return gl.convert_layout(a, gl.DotOperandLayout(0, ACC, 4), assert_trivial=True)
