"""Weights of one-byte and of 4-bit tiles in registers, as operand A of wgmma: the widening of packed_kernel.py.

One byte (wave/weights/rounding.py): masks make pairs of two bytes' bits, too small by a power of two. A product by
another power of two makes e4m3's own numbers, or int8's over 64. Nothing is rounded: rows' scales multiply the sums.
Of whole bytes (words.whole_bytes), 128 more are 2^133 times such a number; 2 is taken away with the product.

Four bits (formats/group_nibbles.py): a nibble in the mantissa of 128 is 128 + n. A group's scale times its row's has
float16's 11 bits. It is the sum of two bfloat16 numbers: of its upper 8 bits and of the others. So (n - 8) times the
second is exact. One fused multiply and add rounds the weight once, as its definition does (base/group_rounding.py).
With minima, nested ones too (formats/nested.py), n times the scale and the minimum are added in float32, likewise.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.ops.linear.choose import units_of_words
from onewave.ops.linear.hopper.packed_values import is_second, taken_apart
from onewave.wave.kernel.words import group_of, has_minima, is_nested, scale_rows, whole_bytes

_LOW_PAIR = {
    1: ("and.b32 x, {0}, 0x807f807f;",),
    2: ("and.b32 x, {0}, 0x87f087f0;",),
}
_HIGH_PAIR = {
    1: ("prmt.b32 x, {0}, 0, 0x2301;", "and.b32 x, x, 0x807f807f;"),
    2: (
        "shl.b32 x, {0}, 4;",
        "shr.u32 y, {0}, 4;",
        "and.b32 y, y, 0x07000700;",
        "lop3.b32 x, x, 0x80f080f0, y, 0xEA;",  # (x & mask) | y
    ),
}
_RAISE = {1: "0x7f007f00", 2: "0x7b807b80"}  # 2^127 and 2^120, twice


def _text(lines: list[str]) -> Any:
    return gl.constexpr("\n".join(["{", ".reg .b32 x, y, f;", *lines, "}"]))


def _with(outputs: int, inputs: int) -> Any:
    return gl.constexpr(",".join(["=&r"] * outputs + ["r"] * inputs))


def _byte_pairs(form: int, rows: str) -> Any:
    """PTX of pairs of four words: of the upper rows, the lower ones or both, pair by pair. Each word: columns 8 i and
    the pair t."""
    kinds = {"upper": (_LOW_PAIR,), "lower": (_HIGH_PAIR,), "both": (_LOW_PAIR, _HIGH_PAIR)}[rows]
    lines = [f"mov.b32 f, {_RAISE[form]};"]
    for word in range(4):
        for at, kind in enumerate(kinds):
            lines += [line.format(f"${4 * len(kinds) + word}") for line in kind[form]]
            lines.append(f"mul.rn.bf16x2 ${word * len(kinds) + at}, x, f;")
    return _text(lines)


def _nibble_pairs(rows: tuple[int, ...], second: int, *, minima: bool) -> Any:
    """PTX of pairs of four words' nibbles of the upper rows (0), the lower ones (1) or both, pair by pair. second:
    whether of the second 64 columns. Operands behind the words: for each of `rows` the scale's upper bits and the
    others, each twice, or a scale and a minimum."""
    count = len(rows)
    lines = [f"mov.b32 f, {'0x43004300' if minima else '0x43084308'};"]  # 128, or 128 + 8
    for pair in range(4):
        for at, row in enumerate(rows):
            made, source = f"${pair * count + at}", f"${4 * count + 2 * row + pair % 2}"
            shift = 8 * (pair // 2) + 4 * second
            one, other = f"${4 * count + 4 + 2 * at}", f"${4 * count + 5 + 2 * at}"
            if shift:
                lines.append(f"shr.u32 x, {source}, {shift};")
                source = "x"
            lines += [f"lop3.b32 x, {source}, 0x000f000f, 0x43004300, 0xEA;", "sub.rn.bf16x2 x, x, f;"]
            if minima:
                lines += ["shl.b32 y, x, 16;", "and.b32 x, x, 0xffff0000;", f"fma.rn.f32 y, y, {one}, {other};"]
                lines += [f"fma.rn.f32 x, x, {one}, {other};", f"cvt.rn.bf16x2.f32 {made}, x, y;"]
            else:
                lines += [f"mul.rn.bf16x2 y, x, {other};", f"fma.rn.bf16x2 {made}, x, {one}, y;"]
    return _text(lines)


def _whole_pairs(lower: int) -> Any:
    """PTX of pairs of four words' whole bytes, of the upper rows (0) or the lower ones (1), whose words take turns. A
    word: columns 8 i of either 16 and the pair t."""
    lines = ["mov.b32 f, 0x7f007f00;", "mov.b32 y, 0xc000c000;"]  # 2^127 and -2, twice
    for eight in range(4):
        source = f"${4 + eight % 2 * 2 + lower}"
        if eight > 1:
            lines.append(f"shr.u32 x, {source}, 8;")
            source = "x"
        lines.append(f"lop3.b32 x, {source}, 0x00ff00ff, 0x00800080, 0x6A;")  # (x & mask) ^ eights
        lines.append(f"fma.rn.bf16x2 ${eight}, x, f, y;")
    return _text(lines)


_INT8_FIRST, _INT8_SECOND, _INT8_BOTH = (_byte_pairs(1, rows) for rows in ("upper", "lower", "both"))
_FP8_FIRST, _FP8_SECOND, _FP8_BOTH = (_byte_pairs(2, rows) for rows in ("upper", "lower", "both"))
_ONE_WITH, _BOTH_WITH = _with(4, 4), _with(8, 4)
# By the half of 128 columns: of a place with two units the first and the second one's nibbles, or both rows'.
_ROWS = ((0,), (1,), (0, 1))
_WHOLE_FIRST, _WHOLE_SECOND = _whole_pairs(0), _whole_pairs(1)
_FIRST_0, _SECOND_0, _BOTH_0 = (_nibble_pairs(rows, 0, minima=False) for rows in _ROWS)
_FIRST_1, _SECOND_1, _BOTH_1 = (_nibble_pairs(rows, 1, minima=False) for rows in _ROWS)
_LEAST_FIRST_0, _LEAST_SECOND_0, _LEAST_BOTH_0 = (_nibble_pairs(rows, 0, minima=True) for rows in _ROWS)
_LEAST_FIRST_1, _LEAST_SECOND_1, _LEAST_BOTH_1 = (_nibble_pairs(rows, 1, minima=True) for rows in _ROWS)
_ONE_SCALED_WITH, _BOTH_SCALED_WITH = _with(4, 6), _with(8, 8)
_FOUR, _EIGHT = gl.constexpr((gl.int32,) * 4), gl.constexpr((gl.int32,) * 8)
_TWO = gl.constexpr((gl.int32,) * 2)


def _scaled(to: str, number: str, *factors: str) -> list[str]:
    """PTX of the float16 number in a word's lower half, times factors."""
    lines = [f"mov.b32 {{low, high}}, {number};", f"cvt.f32.f16 {to}, low;"]
    return [".reg .b16 low, high;", *lines, *(f"mul.rn.f32 {to}, {to}, {factor};" for factor in factors)]


def _step(first: int) -> list[str]:
    """PTX of a signed byte of a word, from a bit on, as a float x."""
    return [f"bfe.s32 x, $2, {first}, 8;", "cvt.rn.f32.s32 x, x;"]


# Product of a scale and its row's: its upper eight bits and the others, each twice.
_PARTED = _text(
    [
        *_scaled("f", "$2", "$3"),
        "and.b32 x, f, 0xffff0000;",
        "sub.rn.f32 f, f, x;",
        "prmt.b32 $0, x, 0, 0x3232;",
        "prmt.b32 $1, f, 0, 0x3232;",
    ]
)
# Products of a scale and a minimum with their row's scale. Nested: of their steps' word before.
_LEAST = _text([*_scaled("$0", "$2", "$4"), *_scaled("$1", "$3", "$4")[1:]])
_NESTED = _text([*_step(0), *_scaled("$0", "$3", "x", "$5"), *_step(8), *_scaled("$1", "$4", "x", "$5")[1:]])
_PARTED_WITH, _LEAST_WITH, _NESTED_WITH = (_with(2, inputs) for inputs in (2, 3, 4))


share_of_words = gluon.constexpr_function(units_of_words)


@gluon.constexpr_function
def unit_at(place, FORMAT, R):
    """The unit, among four, that is multiplied as the first, second, third or last. Of one-byte tiles with R = 8 those
    two follow each other that have their words in common."""
    return place % 2 * 2 + place // 2 if FORMAT < 3 and R == 8 else place


@gluon.constexpr_function
def brings_words(place, FORMAT, R):
    """Whether a unit's words are others than those of the unit before."""
    return place % share_of_words(FORMAT, R) == 0


@gluon.constexpr_function
def scale_lines(unit, FORMAT, R):
    """Scales and minima that a unit brings for a lane, each of the upper and of the lower rows in one word: of 4-bit
    weights in groups, unless they are the unit's before."""
    if FORMAT < 4 or (group_of(FORMAT) == 128 and not brings_words(unit, FORMAT, R)):
        return 0
    return groups_of(FORMAT) * (1 + has_minima(FORMAT))


@gluon.constexpr_function
def groups_of(FORMAT):
    """Groups of columns of a 4-bit unit."""
    return max(1, 64 // group_of(FORMAT))


@gluon.constexpr_function
def makes_factors(unit, FORMAT):
    """Whether a unit's groups or rows are others than those of the unit before."""
    return FORMAT > 3 and (group_of(FORMAT) < 128 or unit % 2 == 0)


@gluon.constexpr_function
def words_of_image(FORMAT):
    """Words between two images' scales."""
    return 64 if is_nested(FORMAT) else scale_rows(FORMAT) * 32


@gluon.constexpr_function
def scale_word(line, unit, FORMAT, IMAGES):
    """Where the first of scale_lines' words of a line is, of the first image's. Nested: integers of either half of the
    columns, then the scale and the minimum."""
    if is_nested(FORMAT):
        return unit % 2 * IMAGES * 64 + line * 32 if line < 2 else IMAGES * 128 + (line - 2) * 32
    kind, group = line // groups_of(FORMAT), line % groups_of(FORMAT)
    return (kind * (128 // group_of(FORMAT)) + unit % 2 * 64 // group_of(FORMAT) + group) * 32


@gluon.jit
def taken_turns(upper, lower):
    """Put pairs of the upper and the lower rows in one tuple, in turn."""
    pairs = ()
    for number in gl.static_range(len(upper)):
        both = (upper[number], lower[number])
        pairs = pairs + both
    return pairs


@gluon.jit
def byte_pairs(words, place: gl.constexpr, c):
    """Make numbers of a unit's words, in the order of compact_pairs: e4m3's own, or int8's over 64."""
    WHOLE: gl.constexpr = whole_bytes(c.FORMAT, c.R)
    BOTH: gl.constexpr = _INT8_BOTH if c.FORMAT == 1 else _FP8_BOTH
    FIRST: gl.constexpr = _WHOLE_FIRST if WHOLE else _INT8_FIRST if c.FORMAT == 1 else _FP8_FIRST
    SECOND: gl.constexpr = _WHOLE_SECOND if WHOLE else _INT8_SECOND if c.FORMAT == 1 else _FP8_SECOND
    ONE: gl.constexpr = SECOND if is_second(unit_at(place, c.FORMAT, c.R), c.R) else FIRST
    pairs = ()
    for plane in gl.static_range(2):
        if c.R > 8:
            pairs = pairs + pairs_of(words[0][plane], (), BOTH, _BOTH_WITH, _EIGHT)
        else:
            upper = pairs_of(words[0][plane], (), ONE, _ONE_WITH, _FOUR)
            lower = pairs_of(words[1][plane], (), ONE, _ONE_WITH, _FOUR)
            pairs = pairs + taken_turns(upper, lower)
    return pairs


@gluon.jit
def pairs_of(words, factors, TEXT: gl.constexpr, WITH: gl.constexpr, TYPES: gl.constexpr):
    """Make a lane's pairs of four words by inline assembly, of one or both of its rows."""
    return gl.inline_asm_elementwise(TEXT, WITH, taken_apart((words,), factors), dtype=TYPES, is_pure=True, pack=1)


@gluon.jit
def group_factors(words, scales, unit: gl.constexpr, c):
    """Make what a unit's nibbles are multiplied by, group by group, of the upper rows, then the lower ones. Without
    minima: two bfloat16 numbers, each twice in a word, whose sum is the group's scale times the row's. With them: the
    scale and the minimum, times the row's, float32."""
    GROUPS: gl.constexpr = groups_of(c.FORMAT)
    factors = ()
    for group in gl.static_range(GROUPS):
        for half in gl.static_range(2):
            block = words[half if c.R == 8 else 0]
            scale = block[2 + group]
            least = scale
            step = scale
            if is_nested(c.FORMAT):
                scale = block[2 + GROUPS]
                least = block[3 + GROUPS]
            elif has_minima(c.FORMAT):
                least = block[2 + GROUPS + group]
            if is_second(unit, c.R) or (c.R > 8 and half == 1):
                scale = scale >> 16
                least = least >> 16
                step = step >> 16
            factors = factors + factors_of(step, scale, least, scales[half], c)
    return factors


@gluon.jit
def factors_of(step, scale, least, of_row, c):
    """Make a group's two factors for a lane's row, of what lies in its words' lower halves."""
    if is_nested(c.FORMAT):
        factors = gl.inline_asm_elementwise(
            _NESTED, _NESTED_WITH, [step, scale, least, of_row], dtype=_TWO, is_pure=True, pack=1
        )  # fmt: skip
    elif has_minima(c.FORMAT):
        factors = gl.inline_asm_elementwise(
            _LEAST, _LEAST_WITH, [scale, least, of_row], dtype=_TWO, is_pure=True, pack=1
        )  # fmt: skip
    else:
        factors = gl.inline_asm_elementwise(_PARTED, _PARTED_WITH, [scale, of_row], dtype=_TWO, is_pure=True, pack=1)
    return factors


@gluon.jit
def nibble_pairs(words, factors, unit: gl.constexpr, c):
    """Make weights of a unit's words, in the order of compact_pairs. factors: of group_factors."""
    EVEN: gl.constexpr = unit % 2 == 0
    LEAST: gl.constexpr = has_minima(c.FORMAT)
    BOTH: gl.constexpr = (_LEAST_BOTH_0 if EVEN else _LEAST_BOTH_1) if LEAST else (_BOTH_0 if EVEN else _BOTH_1)
    FIRST: gl.constexpr = (_LEAST_FIRST_0 if EVEN else _LEAST_FIRST_1) if LEAST else (_FIRST_0 if EVEN else _FIRST_1)
    SECOND: gl.constexpr = (
        (_LEAST_SECOND_0 if EVEN else _LEAST_SECOND_1) if LEAST else (_SECOND_0 if EVEN else _SECOND_1)
    )
    ONE: gl.constexpr = SECOND if is_second(unit, c.R) else FIRST
    pairs = ()
    for plane in gl.static_range(2):
        own = factors
        if groups_of(c.FORMAT) == 2:
            own = factors[:4] if plane == 0 else factors[4:]
        if c.R > 8:
            pairs = pairs + pairs_of(words[0][plane], own, BOTH, _BOTH_SCALED_WITH, _EIGHT)
        else:
            upper = pairs_of(words[0][plane], own[:2], ONE, _ONE_SCALED_WITH, _FOUR)
            lower = pairs_of(words[1][plane], own[2:], ONE, _ONE_SCALED_WITH, _FOUR)
            pairs = pairs + taken_turns(upper, lower)
    return pairs
