"""Products of 6-bit weights beside nested 4-bit ones (groups.py): integers for 16 columns times a scale for 128.

A tile has half as many images as one of 4-bit weights. An image is operand A [64, 128] in three planes of 2 KiB, a
16-byte load of a thread each: a word for each 32 columns of its own part of A. Three such words are sixteen numbers
less 32, signed: twelve in their bytes' upper six bits, the other four in what is left (formats/six_bits.six_images). A
number becomes four times a subnormal one, as nibbles do (nibble_values.py).

Where things lie, in rows of 128 bytes of a tile's first copy, for I images: the planes, 48 I; from there on integers,
4 I, sixteen bytes for a row of A and the one 8 below, as step_numbers takes them; from row 56 I on the scales, I.
Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onewave.wave.kernel.widen.nibble_values import both
from onewave.wave.kernel.widen.operands import activations, beside_rows, steps_beside


def _sixes(add: str) -> str:
    """PTX of 16 numbers of three words: pairs $0 and $1 to $14 and $15. add: of two pairs."""
    lines = ["{", ".reg .b32 x, y, eight, less, fourth;"]
    lines += [
        "mov.b32 eight, 0x00800080;",
        "mov.b32 less, 0x80808080;",
    ]  # the sign, 128 times the unit, and -128 times it
    lines += ["shl.b32 x, $16, 6;", "and.b32 fourth, x, 0xc0c0c0c0;"]
    for word, shift, mask in (("$17", 4, "0x30303030"), ("$18", 2, "0x0c0c0c0c")):
        lines += [f"shl.b32 x, {word}, {shift};", f"lop3.b32 fourth, x, {mask}, fourth, 0xEA;"]  # (x & mask) | fourth
    for at, word in enumerate(("$16", "$17", "$18", "fourth")):
        for first, source in ((2 * at, word), (8 + 2 * at, "y")):
            lines += [f"shr.u32 y, {word}, 8;"] if source == "y" else []
            lines += [f"lop3.b32 x, {source}, 0x00fc00fc, eight, 0x6A;"]  # (x & mask) ^ eight
            lines += [f"{add} x, x, less;", f"mov.b32 {{${first}, ${first + 1}}}, x;"]
    return "\n".join([*lines, "}"])


_BF16, _FP16 = gl.constexpr(_sixes("add.rn.bf16x2")), gl.constexpr(_sixes("add.rn.f16x2"))
_WITH = gl.constexpr(",".join(["=h"] * 16 + ["r"] * 3))
_NUMBERS = gl.constexpr((gl.int16,) * 16)


@gluon.jit
def sixes(first, second, third, DTYPE: gl.constexpr):
    """Widen three words' numbers to the bits of four times subnormal ones, int16: both columns of each pair in turn.

    Pairs: four times 8 columns, in each the lower and the upper half of 16 rows.
    """
    TEXT: gl.constexpr = _FP16 if DTYPE == gl.float16 else _BF16
    return gl.inline_asm_elementwise(TEXT, _WITH, [first, second, third], dtype=_NUMBERS, is_pure=True, pack=1)


@gluon.constexpr_function
def words_of_rows(count):
    """The layout of `count` words for 8 rows of A and the ones 8 below, [8, 32], in threads that have them: four, two
    images' rows below each other, or one, eight images'. What no instruction uses is not loaded."""
    lanes = [[0, count << bit] for bit in range(3)]
    within, below = [[0, 1], [0, 2]], [[4, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[*within, *below] if count == 4 else [[1, 0], [2, 0], *below],
        lane_bases=[[0, 0], [0, 0], *lanes],
        warp_bases=[[1, 0], [2, 0]] if count == 4 else [[0, 8], [0, 16]],
        block_bases=[],
        shape=[8, 32],
    )


@gluon.jit
def add_six_tiles(accs, slots, tile, x, rings, c):
    """Add to each row block's sums its tile's product with the same activations among x's; as groups.add_tiles."""
    IMAGES: gl.constexpr = c.IMAGES // 2
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    steps = ()
    scales = ()
    for block in gl.static_range(len(accs)):
        rows = rings[0].index(slots[block])._reinterpret(gl.int32, [8 * IMAGES, 8, 32], STORED)
        steps = steps + (gl.reshape(rows.index(6 * IMAGES).load(words_of_rows(4)), [2, 4, 8, 4]),)
        scales = scales + (gl.reshape(rows.index(7 * IMAGES).load(words_of_rows(1)), [2, 2, 2, 4, 8]),)
    for image in gl.static_range(IMAGES):
        accs = add_six_images(accs, slots, steps, scales, tile * (2 * IMAGES) + 2 * image, image, x, rings[0], c)
    return accs


@gluon.jit
def add_six_images(accs, slots, steps, scales, at, image: gl.constexpr, x, ring, c):
    """Add the product of an image of each tile. steps, scales: of all images, for each row block. at: of the image's
    activations among x's, half by half."""
    IMAGES: gl.constexpr = c.IMAGES // 2
    PLANES: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    made = ()
    for block in gl.static_range(len(accs)):
        acc = accs[block]
        planes = ring.index(slots[block])._reinterpret(gl.int32, [4 * IMAGES, 16, 32], PLANES)
        first = four_words(planes.index(3 * image))
        second = four_words(planes.index(3 * image + 1))
        third = four_words(planes.index(3 * image + 2))
        own = four_of(of_image(steps[block], image))
        sums = gl.zeros_like(acc)
        for word in gl.static_range(4):
            if word % 2 == 0:
                b = activations(x.index(at + word // 2), acc)
            up, up_next = steps_beside(own[word], acc)
            values = sixes(first[word], second[word], third[word], c.DTYPE)
            sums += up * product_of_16(values[:8], b, 2 * (word % 2), acc, c.DTYPE)
            sums += up_next * product_of_16(values[8:], b, 2 * (word % 2) + 1, acc, c.DTYPE)
        first_four, _ = gl.split(gl.permute(scales[block], (1, 2, 3, 4, 0)))
        first_two, _ = gl.split(gl.permute(first_four, (1, 2, 3, 0)))
        above, below = both(of_image(first_two, image))
        scale = gl.join(above, below).to(gl.float16, bitcast=True).to(gl.float32)
        made = made + (acc + (beside_rows(scale, acc) * 0.25) * sums,)
    return made


@gluon.jit
def product_of_16(values, b, group: gl.constexpr, acc, DTYPE: gl.constexpr):
    """Multiply 16 columns, whose values are `sixes`' four pairs, by theirs of b's 64."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    low = gl.join(gl.join(values[0], values[1]), gl.join(values[2], values[3]))
    high = gl.join(gl.join(values[4], values[5]), gl.join(values[6], values[7]))
    # [16 rows, row in 8, pair of columns in 8, column of a pair, half of 16 rows, 8 columns]
    a = gl.reshape(gl.join(low, high).to(DTYPE, bitcast=True), [4, 8, 4, 2, 2, 2])
    a = gl.reshape(gl.permute(a, (0, 4, 1, 5, 2, 3)), [acc.shape[0], acc.shape[1], 16])
    return mma_v2(gl.convert_layout(a, A, assert_trivial=True), columns_of_16(b, group), gl.zeros_like(acc))


@gluon.jit
def columns_of_16(b, group: gl.constexpr):
    """Take 16 columns of operand B, [PARTS, 64, N / PARTS]."""
    parts = gl.permute(gl.reshape(b, [b.shape[0], 2, 2, 16, b.shape[2]]), (0, 3, 4, 1, 2))
    even, odd = gl.split(parts)
    first, second = gl.split(even if group % 2 == 0 else odd)
    return gl.convert_layout(first if group < 2 else second, b.type.layout, assert_trivial=True)


@gluon.jit
def four_words(plane):
    """Load a thread's four words of a plane, int32 [16, 8] each."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    return four_of(gl.reshape(plane.load(WORDS), [16, 8, 4]))


@gluon.jit
def four_of(words):
    """Split a last axis of four."""
    even, odd = gl.split(gl.reshape(words, [words.shape[0], words.shape[1], 2, 2]))
    word0, word2 = gl.split(even)
    word1, word3 = gl.split(odd)
    return word0, word1, word2, word3


@gluon.jit
def of_image(numbers, image: gl.constexpr):
    """Take an image's numbers, [16 rows, row in 8, ..], of two images'."""
    if len(numbers.shape) == 4:
        first, second = gl.split(gl.permute(numbers, (1, 2, 3, 0)))
    else:
        first, second = gl.split(gl.permute(numbers, (1, 2, 0)))
    return first if image == 0 else second
