"""Products of nested 4-bit, of 6-bit and of 8-bit weights with one sequence's digits: nested_digits.py with fewer sums.

A warp needs two column groups' digits, four of a product's eight columns. So both halves of an image's columns lie side
by side: operand A has 16 columns of each, B their activations in columns of their own, with zeros in the other half. A
thread then has the sums of one half, which meet in hand_over.wanted_part, and of the two rows that it has it keeps the
one whose column group it has: sums are [PARTS, row in 8, half, column group, digit]. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onewave.wave.kernel.widen.digits import halves_of
from onewave.wave.kernel.widen.nested_digits import every_other, six_bytes, unsigned_nibbles
from onewave.wave.kernel.widen.operands import byte_products

_PARTS = gl.constexpr(4)
_WARPS = gl.constexpr(byte_products(4))
_OF_THREADS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_IMAGE = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
_PAIR_OF_BYTES = gl.constexpr(
    "prmt.b32 $0, $2, $2, 0x8880;\nprmt.b32 $1, $2, $2, 0x9991;"
)  # a byte and its sign three times


# Bytes less 128, of words of 8 columns: a row's two with the ones 16 columns on, the row's 8 below, 8 columns on both.
_WIDE = gl.constexpr(
    "\n".join(
        (
            "{",
            ".reg .b32 a, b, x, y;",
            *(
                f"xor.b32 {made}, {word}, 0x80808080;"
                for made, word in (("a", "$4"), ("b", "$5"), ("x", "$6"), ("y", "$7"))
            ),
            "prmt.b32 $0, a, x, 0x6240;",
            "prmt.b32 $1, a, x, 0x7351;",
            "prmt.b32 $2, b, y, 0x6240;",
            "prmt.b32 $3, b, y, 0x7351;",
            "}",
        )
    )
)


@gluon.jit
def wide_bytes(values):
    """Take 128 from bytes, int8 [16, 128], and order a thread's 16: 8 columns, half of 16 rows, then as of nibbles."""
    return gl.inline_asm_elementwise(
        _WIDE, "=&r,=&r,=&r,=r,r,r,r,r", [values], dtype=gl.int8, is_pure=True, pack=16
    )  # fmt: skip


@gluon.jit
def two_integers(pairs):
    """Both signed bytes of int16 numbers, as int32."""
    return gl.inline_asm_elementwise(
        _PAIR_OF_BYTES, "=&r,=r,r", [pairs.to(gl.int32)], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )  # fmt: skip


@gluon.constexpr_function
def number_of_rows():
    """The layout of a number for each row of A, [4, 8, 2] as operands.scales_of has them, in threads that keep it."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 8, 2],
    )


@gluon.constexpr_function
def steps_of_halves(IMAGES):
    """The layout of pairs of integers, [half of the columns, image, 32 columns, 4, 8, 2], in threads that have the half
    and keep the row."""
    images = [[0, bit, 0, 0, 0, 0] for bit in (1, 2) if bit < IMAGES]
    rows = [[0, 0, 0, 0, bit, 0] for bit in (1, 2, 4)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1, 0, 0, 0], *images],
        lane_bases=[[0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0], *rows],
        warp_bases=[[0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0]],
        block_bases=[],
        shape=[2, IMAGES, 2, 4, 8, 2],
    )


@gluon.constexpr_function
def six_steps_of_halves():
    """Likewise of 6-bit weights, [8, 64]: image and 16 rows; row in 8, half of the columns, 32 columns, row of two."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 2], [4, 0]],
        lane_bases=[[0, 1], [0, 4], [0, 8], [0, 16], [0, 32]],
        warp_bases=[[1, 0], [2, 0]],
        block_bases=[],
        shape=[8, 64],
    )


@gluon.constexpr_function
def six_scales_of_halves():
    """The layout of rows of number_of_rows, [8, 64]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0]],
        lane_bases=[[0, 1], [0, 0], [0, 2], [0, 4], [0, 8]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[8, 64],
    )


@gluon.jit
def kept_sums(sums):
    """Keep of a thread's two rows the one whose column group it has. sums: [PARTS, 16, 8] of half, column group, digit.
    Returns [PARTS, 8, 2, 2, 2]."""
    cut = gl.permute(gl.reshape(sums, [_PARTS, 2, 8, 2, 2, 2]), (0, 2, 3, 4, 5, 1))
    first, second = gl.split(cut)
    L: gl.constexpr = first.type.layout
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, L))))
    group = gl.arange(0, 2, layout=ROW)
    return gl.where(group[None, None, None, :, None] == 0, first, second)


@gluon.jit
def joined_kept(sums):
    """Join kept_sums' digits in float32: [PARTS, 8, 2, 2]."""
    high, low = gl.split(sums)
    return high.to(gl.float32) * 256.0 + low.to(gl.float32)


@gluon.jit
def no_kept_sums():
    """Zeros where a row block's sums are."""
    return joined_kept(kept_sums(gl.zeros([_PARTS, 16, 8], gl.int32, _WARPS)))


@gluon.jit
def of_rows(numbers, acc):
    """Put a number for each row, [4, 8, 2], beside acc: [PARTS, 8, 1, 2]."""
    return gl.expand_dims(gl.convert_layout(numbers, gl.SliceLayout(2, acc.type.layout), assert_trivial=True), 2)


@gluon.jit
def digits_of_halves(x, at, acc):
    """Load an image's activations: operand B of two times 32 columns, each of two times 16, and their scales."""
    b = x[0].index(at).permute((0, 2, 1)).load(gl.DotOperandLayout(1, _WARPS, 4))
    first, second = halves_of(b)
    return (
        halves_of(first),
        halves_of(second),
        gl.expand_dims(x[1].index(at).load(gl.SliceLayout(1, acc.type.layout)), 1),
    )


@gluon.jit
def add_nested_halves(accs, slots, tile, x, rings, c):
    """Do as nested_digits.add_nested_digits for one sequence. x: of digits_at."""
    FIVE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    steps = ()
    for block in gl.static_range(len(accs)):
        rows = rings[1].index(slots[block] * 3)._reinterpret(gl.int16, [2, c.IMAGES, 2, 4, 8, 2], FIVE)
        steps = steps + (rows.load(steps_of_halves(c.IMAGES)),)
    for image in gl.static_range(c.IMAGES):
        accs = add_nested_image(accs, slots, steps, tile, image, x, rings, c)
    return accs


@gluon.jit
def add_nested_image(accs, slots, steps, tile, image: gl.constexpr, x, rings, c):
    """Add the product of an image of each tile. steps: integers of all images, for each block."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    at = tile * c.IMAGES + image
    b0, b1, of_x = digits_of_halves(x, at, accs[0])
    totals = totals_of_halves(x[2].index(at), accs[0])
    of_x *= 16.0
    made = ()
    for block in gl.static_range(len(accs)):
        acc = accs[block]
        values = rings[0].index(slots[block])._reinterpret(gl.int8, [c.IMAGES * 32, 128], _IMAGE)
        pairs = pairs_of_image(steps[block], image, c.IMAGES)
        sums = kept_sums(gl.zeros([_PARTS, 16, 8], gl.int32, _WARPS))
        offsets = gl.zeros_like(acc).to(gl.int32)
        for group in gl.static_range(2):
            first, second = nibbles_of_halves(values.slice(image * 32 + group * 16, 16))
            up, down = two_integers(pairs[group])
            sums += beside_sums(up, sums) * product_of_two(first, second, b0 if group == 0 else b1)
            offsets += gl.convert_layout(down, acc.type.layout, assert_trivial=True) * totals[group]
        numbers = rings[1].index(slots[block] * 3 + 2)._reinterpret(gl.float16, [c.IMAGES * 2, 4, 8, 2], PLAIN)
        scale = of_rows(numbers.index(image * 2).load(number_of_rows()).to(gl.float32), acc)
        least = of_rows(numbers.index(image * 2 + 1).load(number_of_rows()).to(gl.float32), acc)
        acc += (scale * of_x) * beside_acc(joined_kept(sums), acc)
        made = made + (acc + (least * of_x) * offsets.to(gl.float32),)
    return made


@gluon.jit
def beside_acc(numbers, acc):
    """Have numbers in acc's layout."""
    return gl.convert_layout(numbers, acc.type.layout, assert_trivial=True)


@gluon.jit
def beside_sums(numbers, sums):
    """Put numbers [PARTS, 8, 2, 2] beside sums."""
    return gl.expand_dims(gl.convert_layout(numbers, gl.SliceLayout(4, sums.type.layout), assert_trivial=True), 4)


@gluon.jit
def product_of_two(first, second, b):
    """Sum two products of 16 columns of each half: kept_sums."""
    zero = gl.zeros([_PARTS, 16, 8], gl.int32, _WARPS)
    return kept_sums(mma_v2(second, b[1], mma_v2(first, b[0], zero)))


@gluon.jit
def pairs_of_image(pairs, image: gl.constexpr, IMAGES: gl.constexpr):
    """Take an image's pairs of two times 32 columns, [4, 8, half, 2] each."""
    own = gl.permute(pairs, (3, 4, 0, 5, 2, 1))
    if IMAGES == 4:
        even, odd = gl.split(gl.reshape(own, [4, 8, 2, 2, 2, 2, 2]))
        own = even if image % 2 == 0 else odd
    if IMAGES > 1:
        first, second = gl.split(own)
        own = first if image < IMAGES // 2 else second
    return gl.split(gl.reshape(own, [4, 8, 2, 2, 2]))


@gluon.jit
def totals_of_halves(sums, acc):
    """Load sums of activations, int32 [PARTS, 2, 2, 2] in shared memory: of either 32 columns, [PARTS, 1, 2, 2]."""
    like = gl.zeros([_PARTS, 2, 2], gl.int32, gl.SliceLayout(1, acc.type.layout))
    first, second = gl.split(sums.load(gl.join(like, like).type.layout))
    return beside_halves(first, acc), beside_halves(second, acc)


@gluon.jit
def beside_halves(numbers, acc):
    """Put numbers [PARTS, 2, 2] beside acc."""
    return gl.expand_dims(gl.convert_layout(numbers, gl.SliceLayout(1, acc.type.layout), assert_trivial=True), 1)


@gluon.jit
def nibbles_of_halves(values):
    """Load 32 columns' bytes of either half, int8 [16, 128], and build operands A of 16 columns of each half."""
    low, high = unsigned_nibbles(values.load(_OF_THREADS))
    # [16 rows, row in 8, two pairs, half of 16 rows, 8 columns, byte, half of the columns]
    cut = gl.reshape(gl.join(low, high), [4, 8, 4, 2, 2, 4, 2])
    first, second = gl.split(gl.permute(cut, (0, 3, 1, 6, 2, 5, 4)))
    return operand_of_halves(first), operand_of_halves(second)


@gluon.jit
def operand_of_halves(values):
    """Build operand A, [16 rows, half of them, row in 8, half of the columns, two pairs, byte]."""
    return gl.convert_layout(
        gl.reshape(values, [_PARTS, 16, 32]), gl.DotOperandLayout(0, _WARPS, 4), assert_trivial=True
    )


@gluon.jit
def add_six_halves(accs, slots, tile, x, rings, c):
    """Do as nested_digits.add_six_digits for one sequence. x: of digits_at."""
    IMAGES: gl.constexpr = c.IMAGES // 2
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    steps = ()
    scales = ()
    for block in gl.static_range(len(accs)):
        rows = rings[0].index(slots[block])._reinterpret(gl.int16, [8 * IMAGES, 8, 64], ROWS)
        steps = steps + (gl.reshape(rows.index(6 * IMAGES).load(six_steps_of_halves()), [2, 4, 8, 2, 2, 2]),)
        scales = scales + (gl.reshape(rows.index(7 * IMAGES).load(six_scales_of_halves()), [2, 2, 2, 4, 8, 2]),)
    for image in gl.static_range(IMAGES):
        accs = add_six_image(accs, slots, steps, scales, tile * IMAGES + image, image, x, rings[0], c)
    return accs


@gluon.jit
def add_six_image(accs, slots, steps, scales, at, image: gl.constexpr, x, ring, c):
    """Add the product of an image of each tile. steps, scales: of all images, for each row block. at: of the image's
    activations among x's."""
    IMAGES: gl.constexpr = c.IMAGES // 2
    b0, b1, of_x = digits_of_halves(x, at, accs[0])
    b00, b01, b10, b11 = every_other(b0[0]), every_other(b0[1]), every_other(b1[0]), every_other(b1[1])
    evens = (b00[0], b01[0]), (b10[0], b11[0])
    odds = (b00[1], b01[1]), (b10[1], b11[1])
    of_x *= 4.0
    made = ()
    for block in gl.static_range(len(accs)):
        acc = accs[block]
        planes = ring.index(slots[block])._reinterpret(gl.int8, [4 * IMAGES, 16, 128], _IMAGE)
        first = planes.index(3 * image).load(_OF_THREADS)
        second = planes.index(3 * image + 1).load(_OF_THREADS)
        operands = six_of_halves(six_bytes(first, second, planes.index(3 * image + 2).load(_OF_THREADS)))
        pairs = of_one(gl.permute(steps[block], (1, 2, 3, 5, 4, 0)), image)
        sums = kept_sums(gl.zeros([_PARTS, 16, 8], gl.int32, _WARPS))
        for group in gl.static_range(2):
            up, up_next = two_integers(pairs[group])
            one, other = operands[2 * group], operands[2 * group + 1]
            sums += beside_sums(up, sums) * product_of_two(one, other, evens[group])
            sums += beside_sums(up_next, sums) * product_of_two(one, other, odds[group])
        first_four, _ = gl.split(gl.permute(scales[block], (1, 2, 3, 4, 5, 0)))
        first_two, _ = gl.split(gl.permute(first_four, (1, 2, 3, 4, 0)))
        own, next_own = gl.split(gl.permute(first_two, (1, 2, 3, 0)))
        scale = of_rows((own if image == 0 else next_own).to(gl.float16, bitcast=True).to(gl.float32), acc)
        made = made + (acc + (scale * of_x) * beside_acc(joined_kept(sums), acc),)
    return made


@gluon.constexpr_function
def wide_numbers(IMAGES):
    """The layout of a number, or a pair of integers, for 32 columns, [image, half, 32 columns, 4, 8, 2], in threads
    that have the half and keep the row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1, 0, 0, 0], *([1, 0, 0, 0, 0, 0] for _ in range(IMAGES - 1))],
        lane_bases=[[0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0], *([0, 0, 0, 0, bit, 0] for bit in (1, 2, 4))],
        warp_bases=[[0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0]],
        block_bases=[],
        shape=[IMAGES, 2, 2, 4, 8, 2],
    )


@gluon.jit
def add_wide_halves(accs, slots, tile, x, rings, c):
    """Do as wide.add_nested_tile for one sequence's digits, for each row block. x: of digits_at."""
    IMAGES: gl.constexpr = c.IMAGES // 2
    for image in gl.static_range(IMAGES):
        at = tile * IMAGES + image
        b0, b1, of_x = digits_of_halves(x, at, accs[0])
        totals = totals_of_halves(x[2].index(at), accs[0])
        of_x *= 16.0
        made = ()
        for block in gl.static_range(len(accs)):
            acc = accs[block]
            values = rings[0].index(slots[block])._reinterpret(gl.int8, [IMAGES * 64, 128], _IMAGE)
            scales = wide_pairs(rings[1].index(slots[block] * 3), gl.float16, image, IMAGES)
            minima = wide_pairs(rings[1].index(slots[block] * 3 + 1), gl.float16, image, IMAGES)
            steps = wide_pairs(rings[1].index(slots[block] * 3 + 2), gl.int16, image, IMAGES)
            for group in gl.static_range(2):
                low = values.slice(image * 64 + group * 16, 16)
                operands = wide_operands(low, values.slice(image * 64 + group * 16 + 32, 16))
                b = b0 if group == 0 else b1
                first, second = every_other(b[0]), every_other(b[1])
                even = product_of_two(operands[0], operands[1], (first[0], second[0]))
                odd = product_of_two(operands[0], operands[1], (first[1], second[1]))
                scale = beside_acc(scales[group], acc).to(gl.float32) * of_x
                least = beside_acc(minima[group], acc).to(gl.float32)
                up, other = two_integers(steps[group])
                up, other = beside_acc(up, acc), beside_acc(other, acc)
                sums = beside_sums(up, even) * even + beside_sums(gl.where(least == 0.0, other, up), odd) * odd
                acc += scale * beside_acc(joined_kept(sums), acc)
                acc += (least * of_x) * (other * totals[group]).to(gl.float32)
            made = made + (acc,)
        accs = made
    return accs


@gluon.jit
def wide_pairs(rows, KIND: gl.constexpr, image: gl.constexpr, IMAGES: gl.constexpr):
    """Load an image's 16-bit numbers of either 32 columns, [4, 8, half, 2] each."""
    AXES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    numbers = rows._reinterpret(KIND, [IMAGES, 2, 2, 4, 8, 2], AXES).load(wide_numbers(IMAGES))
    own = gl.permute(numbers, (3, 4, 1, 5, 2, 0))
    if IMAGES == 2:
        return of_one(own, image)
    else:
        return gl.split(gl.reshape(own, [4, 8, 2, 2, 2]))


@gluon.jit
def wide_operands(first, second):
    """Load 32 columns' bytes of each half, int8 [16, 128], and build operands A of 16 columns of each half."""
    low, high = wide_bytes(first.load(_OF_THREADS)), wide_bytes(second.load(_OF_THREADS))
    # [16 rows, row in 8, two pairs, 8 columns, half of 16 rows, byte, half of the columns]
    cut = gl.reshape(gl.join(low, high), [4, 8, 4, 2, 2, 4, 2])
    one, other = gl.split(gl.permute(cut, (0, 4, 1, 6, 2, 5, 3)))
    return operand_of_halves(one), operand_of_halves(other)


@gluon.jit
def of_one(pairs, image: gl.constexpr):
    """Take one image's pairs of two, and split them by 32 columns."""
    first, second = gl.split(pairs)
    return gl.split(first if image == 0 else second)


@gluon.jit
def six_of_halves(values):
    """Build operands A of 16 columns of either half: two times 32 columns', 8 columns after 8. values: of six_bytes."""
    four = gl.join(gl.join(values[0], values[1]), gl.join(values[2], values[3]))
    # [16 rows, row in 8, two pairs of columns, half of the columns, 32 columns, byte, half of 16 rows, 8 columns]
    cut = gl.permute(gl.reshape(four, [4, 8, 4, 2, 2, 4, 2, 2]), (0, 6, 1, 3, 2, 5, 7, 4))
    first, second = gl.split(cut)
    a0, a1 = gl.split(first)
    a2, a3 = gl.split(second)
    return operand_of_halves(a0), operand_of_halves(a1), operand_of_halves(a2), operand_of_halves(a3)
