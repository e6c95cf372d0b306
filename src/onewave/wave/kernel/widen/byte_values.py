"""Widen one-byte weights to the 16-bit numbers that widen.py multiplies. Constexprs: kernel.py.

The number of instructions for this bounds a tile's product. So two bytes have their bits in the order of the numbers
(rounding.paired), and the numbers have the exponents that cost nothing: int8's magnitude is a subnormal number's
mantissa, e4m3's exponent keeps its bias. All are too small by one power of two; `lowered` corrects the float32 sums.
bfloat16 activations are multiplied by 2^64 first (`raised`): products of activations from 2^-57 on are then normal
float32 numbers, and stay finite for activations below 2^64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _text(*instructions: str) -> str:
    """Wrap instructions that leave the first of each pair of values in x, the second in y."""
    return "\n".join(["{", ".reg .b32 x, y, z;", *instructions, "mov.b32 {$0, $2}, x;", "mov.b32 {$1, $3}, y;", "}"])


_WITH = gl.constexpr("=h,=h,=h,=h,r")
# Swapping the bytes of a pair moves the second one's magnitude and sign to the first one's place.
_INT8 = gl.constexpr(_text("and.b32 x, $4, 0x807f807f;", "prmt.b32 y, $4, 0, 0x2301;", "and.b32 y, y, 0x807f807f;"))
_FP8_BF16 = gl.constexpr(
    _text(
        "and.b32 x, $4, 0x87f087f0;",
        "shl.b32 y, $4, 4;",
        "shr.u32 z, $4, 4;",
        "and.b32 z, z, 0x07000700;",
        "lop3.b32 y, y, 0x80f080f0, z, 0xEA;",  # (y & mask) | z
    )
)
_FP8_FP16 = gl.constexpr(
    _text(
        "shl.b32 x, $4, 3;",
        "and.b32 x, x, 0x3f803f80;",
        "lop3.b32 x, $4, 0x80008000, x, 0xEA;",
        "shl.b32 y, $4, 4;",
        "shr.u32 z, $4, 1;",
        "and.b32 z, z, 0x38003800;",
        "lop3.b32 y, y, 0x80008000, z, 0xEA;",
        "shl.b32 z, $4, 7;",
        "lop3.b32 y, z, 0x07800780, y, 0xEA;",
    )
)
_RAISED = gl.constexpr("{ .reg .b32 f; mov.b32 f, 0x5f805f80; mul.rn.bf16x2 $0, $1, f; }")  # 2^64, twice


@gluon.jit
def raised(words, DTYPE: gl.constexpr, FORMAT: gl.constexpr):
    """Scale words of bfloat16 activations by 2^64 for weights below 16 bits; others stay as they are."""
    if FORMAT > 0 and DTYPE != gl.float16:
        words = gl.inline_asm_elementwise(_RAISED, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)
    return words


@gluon.jit
def lowered(sums, DTYPE: gl.constexpr, FORMAT: gl.constexpr):
    """Rescale float32 sums of products of `widened` numbers with `raised` activations."""
    if FORMAT == 3:
        return sums
    elif DTYPE == gl.float16:
        return sums * (2.0**8 if FORMAT == 2 else 2.0**24)
    else:
        return sums * (2.0 ** (120 - 64) if FORMAT == 2 else 2.0 ** (133 - 64))


@gluon.jit
def widened(words, DTYPE: gl.constexpr, FORMAT: gl.constexpr):
    """Widen each word's two pairs of bytes to the bits of four numbers, int16 each, too small by a power of two."""
    FP8: gl.constexpr = _FP8_FP16 if DTYPE == gl.float16 else _FP8_BF16
    TEXT: gl.constexpr = _INT8 if FORMAT == 1 else FP8
    return gl.inline_asm_elementwise(
        TEXT, _WITH, [words], dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=1
    )  # fmt: skip
