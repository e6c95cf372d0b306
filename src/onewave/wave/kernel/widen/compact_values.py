"""Unpack thirteen-bit weights to the bfloat16 numbers that widen.py multiplies.

A weight keeps its sign, seven bits of mantissa and five bits of its exponent's distance from the row's base
(compact.py). Thirteen words hold sixteen pairs of such numbers. Each word has one pair in bfloat16's own bit places, so
that a mask extracts it, and in the three-bit gaps a part of one of the three other pairs. All numbers are too small by
a power of two of the row, which its scale corrects.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PAIRS = 16
# The gap of a plane's last word has a part of the fourth pair that belongs to the words of the plane's number.
_MASK, _GAP = "0x8fff8fff", ("0x0e000e00", "0x01c001c0", "0x00380038", "0x00070007")


def _compact() -> str:
    """PTX of compact_numbers. From $16 on: three planes of four words, each twice; then the word beside them."""
    plane = [[f"${_PAIRS + 2 * (4 * at + k)}" for k in range(4)] for at in range(3)]
    beside = f"${_PAIRS + 24}"
    lines = [f"and.b32 ${4 * k + at}, {plane[at][k]}, {_MASK};" for k in range(4) for at in range(3)]
    lines += [f"and.b32 $15, {beside}, {_MASK};"]
    for k in range(3):
        parts = (plane[0][k], plane[1][k], plane[2][k], plane[k][3])
        lines += [f"shr.u32 x, {parts[0]}, 3;", f"and.b32 x, x, {_GAP[0]};"]
        for number in range(1, 4):
            # (y & mask) | x
            lines += [f"shr.u32 y, {parts[number]}, {3 * number + 3};", f"lop3.b32 x, y, {_GAP[number]}, x, 0xEA;"]
        lines += [f"shl.b32 y, {beside}, {3 - k};", f"lop3.b32 ${4 * k + 3}, y, 0x80008000, x, 0xEA;"]
    return "\n".join(["{", ".reg .b32 x, y;", *lines, "}"])


def _listed() -> str:
    """PTX of listed_numbers. $16: the thread's number; $18: the list's word."""
    thread, word = f"${_PAIRS}", f"${_PAIRS + 2}"
    lines = [
        f"shr.u32 x, {word}, 5;",
        "and.b32 x, x, 127;",
        f"setp.eq.u32 here, x, {thread};",
        f"and.b32 y, {word}, 0xffff0000;",
        f"and.b32 x, {word}, 1;",
        "setp.eq.u32 there, x, 0;",
        "@there shr.u32 y, y, 16;",
        "selp.b32 y, y, 0, here;",
        f"and.b32 x, {word}, 30;",
    ]
    for pair in range(16):
        lines += [f"setp.eq.u32 there, x, {2 * pair};", f"selp.b32 ${pair}, y, 0, there;"]
    return "\n".join(["{", ".reg .b32 x, y;", ".reg .pred here, there;", *lines, "}"])


_COMPACT, _LISTED = gl.constexpr(_compact()), gl.constexpr(_listed())
_OF_WORDS, _OF_LIST = (gl.constexpr(",".join(["=&r"] * _PAIRS + ["r"] * inputs)) for inputs in (26, 4))
_NUMBERS = gl.constexpr((gl.int16,) * _PAIRS)


@gluon.jit
def compact_numbers(words, last):
    """Unpack thirteen words of each thread to the bits of numbers, int16, pairs along the last axis.

    words: a tuple of three times four, each twice along that axis, as `last`. Pair (k * 2 + i) * 2 + j is of row
    r + 8 j and columns 16 k + 8 i + 2 t and the next, in thread 4 r + t of a warp.
    """
    return gl.inline_asm_elementwise(_COMPACT, _OF_WORDS, words + (last,), dtype=_NUMBERS, is_pure=True, pack=2)


@gluon.jit
def listed_numbers(thread, word):
    """Make compact_numbers' result for the one number of a list's word; all other numbers are 0."""
    return gl.inline_asm_elementwise(_LISTED, _OF_LIST, [thread, word], dtype=_NUMBERS, is_pure=True, pack=2)
