"""Widen 4-bit and 8-bit weights to the 16-bit numbers that groups.py and wide.py multiply.

A nibble in the lowest four bits of a 16-bit number is a subnormal number, n times the smallest one (2^-133 in bfloat16,
2^-24 in float16); in the next four bits it is 16 n times as much, even where bfloat16's exponent takes its highest bit.
So one mask makes a number of a nibble in either place, and a shift by a byte makes the second pair of a word. Sums of
such numbers are exact, and an addition of two pairs takes half the time of a mask.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _nibbles(less: str) -> str:
    """PTX of nibbles. less: the instruction that adds two pairs, where 8 is taken away; "" for none."""
    lines = ["{", ".reg .b32 x, y, low, high;"]
    if less:
        lines += ["mov.b32 low, 0x80088008;", "mov.b32 high, 0x80808080;"]  # -8 and -128 units
    for source, shift in (("$8", "shr.u32 y, $8, 8;"), ("y", "")):
        for mask, place, eight in (("0x000f000f", 0, "low"), ("0x00f000f0", 4, "high")):
            lines += [f"and.b32 x, {source}, {mask};"] + ([f"{less} x, x, {eight};"] if less else [])
            first = place + (source == "y")
            lines += [f"mov.b32 {{${first}, ${first + 2}}}, x;"]
        lines += [shift] if shift else []
    return "\n".join([*lines, "}"])


_NIBBLES = gl.constexpr(_nibbles(""))
_SIGNED_BF16, _SIGNED_FP16 = gl.constexpr(_nibbles("add.rn.bf16x2")), gl.constexpr(_nibbles("add.rn.f16x2"))
_EIGHT_WITH = gl.constexpr(",".join(["=h"] * 8 + ["r"]))
_NUMBERS = gl.constexpr((gl.int16,) * 8)
_CODES_OF_WORD = gl.constexpr(
    "\n".join(
        (
            "{",
            ".reg .b32 x;",
            "and.b32 x, $4, 0x00ff00ff;",
            "mov.b32 {$0, $2}, x;",
            "shr.u32 x, $4, 8;",
            "and.b32 x, x, 0x00ff00ff;",
            "mov.b32 {$1, $3}, x;",
            "}",
        )
    )
)
_FOUR = gl.constexpr((gl.int16,) * 4)


@gluon.jit
def nibbles(words, SIGNED: gl.constexpr, DTYPE: gl.constexpr):
    """Widen each word's eight nibbles to the bits of numbers, int16: four of the first half of the columns, then four
    of the second, sixteen times as large. Of four: column and row in the order of rounding.place_in_image.

    SIGNED: less 8.
    """
    LESS: gl.constexpr = _SIGNED_FP16 if DTYPE == gl.float16 else _SIGNED_BF16
    TEXT: gl.constexpr = LESS if SIGNED else _NIBBLES
    return gl.inline_asm_elementwise(TEXT, _EIGHT_WITH, [words], dtype=_NUMBERS, is_pure=True, pack=1)


@gluon.jit
def unsigned_bytes(words):
    """Widen each word's four bytes to the bits of subnormal numbers, int16, in the order of rounding.place_in_image."""
    return gl.inline_asm_elementwise(_CODES_OF_WORD, "=h,=h,=h,=h,r", [words], dtype=_FOUR, is_pure=True, pack=1)


@gluon.jit
def both(words):
    """Split each word into its lower and its upper 16 bits, int16."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
