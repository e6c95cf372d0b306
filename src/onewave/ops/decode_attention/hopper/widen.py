"""Keys and values as operand A of the kernel's products; of 8 bits widened in registers, exactly.

The ring then holds bytes, which are loaded as 16-bit words (operands' layouts and ldmatrix know those): a word has two
neighbouring columns of a key or a value. Two neighbouring words of a thread are widened at a time.

keys       Such words are four neighbouring columns of a key.
values     are loaded turned, [columns, keys], so such words are two columns of two keys. Of the operand's rows, and of
           the result's, RUN in a row are even columns, and the next RUN their odd neighbours (`column_of_row`). 128
           columns are 64 words, sixteen for each of the four warps: 64 even columns, then the odd ones. 64 columns
           are 32: a warp takes eight, the upper half of its sixteen rows being the odd columns of the lower.

The inner index lies as in Triton's kernel: four neighbours in a thread, two of which go into one product and two into
the next (k_width 4). So both kernels sum the same numbers in the same order.

KV 1: int8; 2: e4m3. Both are exact in bfloat16 and in float16, and NaN stays NaN. int8 to float16: a byte with its
sign bit flipped is the mantissa of 1,024 + 128 + x. To bfloat16: seven bits are the mantissa of 128 + x, and the sign
bit that of 128 or 256, which is subtracted. e4m3: a conversion of two to float16, and from there by float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.ops.decode_attention.hopper.parts import columns_across


@gluon.constexpr_function
def operand(number, mma, kv):
    """Make the layout of operand A (0) or B (1) of products over a cache of KV."""
    return gl.DotOperandLayout(number, mma, 4 if kv else 2)


@gluon.constexpr_function
def int8_pair(to_float16, to) -> list[str]:
    """List instructions that widen the lower byte of each half of z."""
    if to_float16:  # (a & b) ^ c
        return ["mov.b32 y, 0x64806480;", "lop3.b32 x, z, 0x00ff00ff, 0x64806480, 0x6A;", f"sub.rn.f16x2 {to}, x, y;"]
    return [  # (a & b) | c
        "lop3.b32 x, z, 0x007f007f, 0x43004300, 0xEA;",
        "lop3.b32 y, z, 0x00800080, 0x43004300, 0xEA;",
        f"sub.rn.bf16x2 {to}, x, y;",
    ]


@gluon.constexpr_function
def float8_pair(to_float16, pair, to) -> list[str]:
    """List instructions that widen a pair of bytes."""
    if to_float16:
        return [f"cvt.rn.f16x2.e4m3x2 {to}, {pair};"]
    from_halves = ["mov.b32 {l, h}, x;", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, h;", f"cvt.rn.bf16x2.f32 {to}, g, f;"]
    return [f"cvt.rn.f16x2.e4m3x2 x, {pair};", *from_halves]


@gluon.constexpr_function
def widening(kv, to_float16, neighbours) -> str:
    """Write PTX that widens a word's bytes, $2, to two pairs, $0 and $1: each of two neighbours, or of bytes a byte
    apart, the lower two first."""
    registers = [".reg .b32 x, y, z;", ".reg .b16 l, h, a, b;", ".reg .f32 f, g;"]
    if kv == 1:
        first, second = "prmt.b32 z, $2, 0, 0x4140;", "prmt.b32 z, $2, 0, 0x4342;"
        if not neighbours:
            first, second = "mov.b32 z, $2;", "shr.u32 z, $2, 8;"
        lines = [first, *int8_pair(to_float16, "$0"), second, *int8_pair(to_float16, "$1")]
    else:
        first = "mov.b32 z, $2;" if neighbours else "prmt.b32 z, $2, 0, 0x3120;"
        lines = [first, "mov.b32 {a, b}, z;", *float8_pair(to_float16, "a", "$0"), *float8_pair(to_float16, "b", "$1")]
    return "\n".join(["{", *registers, *lines, "}"])


@gluon.jit
def widened_pairs(words, DTYPE: gl.constexpr, KV: gl.constexpr, NEIGHBOURS: gl.constexpr):
    """Widen two neighbouring 16-bit words on the last axis at a time: the numbers of their first and second byte and
    those of the third and fourth, if NEIGHBOURS; else those of their lower bytes and those of their upper."""
    TEXT: gl.constexpr = widening(KV, gl.float16 == DTYPE, NEIGHBOURS)
    first, second = gl.inline_asm_elementwise(
        TEXT, "=&r,=&r,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=2
    )
    return first.to(DTYPE, bitcast=True), second.to(DTYPE, bitcast=True)


@gluon.constexpr_function
def run_of(block_d) -> int:
    """Rows of a turned tile of BLOCK_D columns that are even columns one after another."""
    return 64 if block_d == 128 else 8


@gluon.constexpr_function
def turned_words(mma, kv, block_n, block_d):
    """Make the layout of a tile's values as words, turned, [BLOCK_D / 2, BLOCK_N]: the operand's once widened."""
    if block_d == 128:
        return operand(0, mma, kv)
    keys = [[0, 1 << i] for i in range(block_n.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=keys[:2] + keys[4:],
        lane_bases=[*keys[2:4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[block_d // 2, block_n],
    )


@gluon.jit
def words_of(c, ring, place):
    """A place of a ring of bytes as 16-bit words, [BLOCK_N, BLOCK_D / 2]."""
    WORDS: gl.constexpr = gl.NVMMASharedLayout(columns_across(c.KV, c.BLOCK_D), 16, rank=2)
    return ring.index(place)._reinterpret(gl.int16, [c.BLOCK_N, c.BLOCK_D // 2], WORDS)


@gluon.jit
def keys_of(c, place, DTYPE: gl.constexpr, MMA: gl.constexpr):
    """A tile's keys, [BLOCK_N, BLOCK_D]."""
    if c.KV:
        words = words_of(c, c.k_ring, place).load(operand(0, MMA, 0))
        first, second = widened_pairs(words, DTYPE, c.KV, NEIGHBOURS=True)
        pairs = gl.permute(gl.reshape(gl.join(first, second), [c.BLOCK_N, c.BLOCK_D // 4, 2, 2]), (0, 1, 3, 2))
        return gl.convert_layout(gl.reshape(pairs, [c.BLOCK_N, c.BLOCK_D]), operand(0, MMA, c.KV), assert_trivial=True)
    else:
        return c.k_ring.index(place).load(operand(0, MMA, 0))


@gluon.jit
def values_of(c, place, DTYPE: gl.constexpr, MMA: gl.constexpr):
    """A tile's values, turned, [BLOCK_D, BLOCK_N], rows as column_of_row says."""
    if c.KV:
        words = words_of(c, c.v_ring, place).permute((1, 0)).load(turned_words(MMA, c.KV, c.BLOCK_N, c.BLOCK_D))
        even, odd = widened_pairs(words, DTYPE, c.KV, NEIGHBOURS=False)
        RUN: gl.constexpr = run_of(c.BLOCK_D)
        pairs = gl.reshape(gl.join(even, odd), [c.BLOCK_D // 2 // RUN, RUN, c.BLOCK_N, 2])
        rows = gl.reshape(gl.permute(pairs, (0, 3, 1, 2)), [c.BLOCK_D, c.BLOCK_N])
        return gl.convert_layout(rows, operand(0, MMA, c.KV), assert_trivial=True)
    else:
        return c.v_ring.index(place).permute((1, 0)).load(operand(0, MMA, 0))


@gluon.jit
def column_of_row(row, c):
    """The column of a value that a row of `values_of` and of the result is."""
    RUN: gl.constexpr = run_of(c.BLOCK_D)
    return (row // (2 * RUN) * RUN + row % RUN) * 2 + row // RUN % 2 if c.KV else row


@gluon.jit
def in_order(acc, c):
    """A result [BLOCK_D, BLOCK_M] with its rows in the order of the values' columns."""
    if c.KV:
        RUN: gl.constexpr = run_of(c.BLOCK_D)
        halves = gl.reshape(acc, [c.BLOCK_D // 2 // RUN, 2, RUN, c.BLOCK_M])
        return gl.reshape(gl.permute(halves, (0, 2, 1, 3)), [c.BLOCK_D, c.BLOCK_M])
    else:
        return acc
