"""Weights of compact tiles in registers, as operand A of wgmma: the widening of packed_kernel.py, and what it shares
with other formats' (narrow_values.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.kernel.widen.widen import joined

_LIST_WORDS = gl.constexpr(32)


class Packed(NamedTuple):
    """A matrix in a stream. words: of all tiles. lists: LIST_WORDS a tile. longest: of the lists of 64 rows' tiles;
    None of other than compact ones. places: of its tiles, row block by row block. scales: of its rows. tiles: a row
    block. blocks: row blocks."""

    words: Any
    lists: Any
    longest: Any
    places: Any
    scales: Any
    tiles: Any
    blocks: Any


def _masked(to: int, word: str, factor: str) -> list[str]:
    """The pair that a word has in the numbers' own places, times a factor."""
    return [f"and.b32 x, {word}, 0x8fff8fff;", f"mul.rn.bf16x2 ${to}, x, {factor};"]


def _gathered(to: int, planes: list[list[str]], beside: str, k: int, factor: str) -> list[str]:
    """The fourth pair of 16 columns, in the gaps of the words of the other ones and beside them, times a factor."""
    if k == 3:
        return _masked(to, beside, factor)
    lines = ["mov.b32 x, 0;"]
    words = (planes[0][k], planes[1][k], planes[2][k], planes[k][3])
    for number, mask in enumerate(("0x0e000e00", "0x01c001c0", "0x00380038", "0x00070007")):
        # (y & mask) | x
        lines += [f"shr.u32 y, {words[number]}, {3 * number + 3};", f"lop3.b32 x, y, {mask}, x, 0xEA;"]
    lines += [f"shl.b32 y, {beside}, {3 - k};", "lop3.b32 x, y, 0x80008000, x, 0xEA;"]
    return [*lines, f"mul.rn.bf16x2 ${to}, x, {factor};"]


def _words(first: int) -> tuple[list[list[str]], str]:
    """Three planes of four words from an operand on, and the word beside them (wave/weights/compact.py)."""
    return [[f"${first + 4 * plane + k}" for k in range(4)] for plane in range(3)], f"${first + 12}"


def _text(lines: list[str]) -> Any:
    return gl.constexpr("\n".join(["{", ".reg .b32 x, y;", *lines, "}"]))


def _all_pairs() -> Any:
    """PTX: sixteen pairs (k * 2 + i) * 2 + j of thirteen words. Then the factors of j = 0 and of 1."""
    planes, beside = _words(16)
    lines: list[str] = []
    for k in range(4):
        lines += [each for at in range(3) for each in _masked(4 * k + at, planes[at][k], f"${29 + at % 2}")]
        lines += _gathered(4 * k + 3, planes, beside, k, "$30")
    return _text(lines)


def _first_pairs() -> Any:
    """PTX: eight pairs k * 2 + i with j = 0, of the first and the third plane. Then their factor."""
    return _text([each for n in range(8) for each in _masked(n, f"${8 + n // 2 + n % 2 * 4}", "$16")])


def _second_pairs() -> Any:
    """PTX: the same with j = 1, of thirteen words."""
    planes, beside = _words(8)
    lines: list[str] = []
    for k in range(4):
        lines += _masked(2 * k, planes[1][k], "$21") + _gathered(2 * k + 1, planes, beside, k, "$21")
    return _text(lines)


def _with(outputs: int, inputs: int) -> Any:
    return gl.constexpr(",".join(["=&r"] * outputs + ["r"] * inputs))


_ALL, _ALL_WITH = _all_pairs(), _with(16, 15)
_FIRST, _FIRST_WITH = _first_pairs(), _with(8, 9)
_SECOND, _SECOND_WITH = _second_pairs(), _with(8, 14)
_SIXTEEN, _EIGHT = gl.constexpr((gl.int32,) * 16), gl.constexpr((gl.int32,) * 8)


@gluon.constexpr_function
def words_layout():
    """Layout of words [16 rows each warp's, 32 lanes, 4]."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def blocks_of(R):
    """Row blocks of the stream that 16 rows lie in."""
    return 2 if R == 8 else 1


@gluon.constexpr_function
def is_second(unit, R):
    """Whether a unit is the second of two in its words' place, 128 columns apart, with R = 8."""
    return R == 8 and unit % 4 > 1


@gluon.jit
def thread_of(unit, R: gl.constexpr):
    """Where a unit's words begin among a tile's threads. With R = 8 one place has two units, 128 columns apart."""
    IN_IMAGE: gl.constexpr = 128 // R
    within = unit % IN_IMAGE
    if R == 8:
        warp = within // 4
    else:
        warp = within // 2 * (R // 16)
    return (unit // IN_IMAGE * 2 + within % 2) * 128 + warp * 32


@gluon.jit
def warp_rows(first_row):
    """The first row of each warp of a warpgroup: [4]."""
    return first_row + gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, words_layout()))) * 16


@gluon.jit
def row_scales(packed, first_row, c):
    """Load rows' scales as words, of the upper and the lower rows of each warp: [4, 32] each."""
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, words_layout())))
    row = warp_rows(first_row)[:, None] + lane[None, :] // 4
    # Rows beyond the last block are no part of the result; they read the last one's.
    last = packed.blocks * c.R - 1
    upper = gl.load(packed.scales + gl.minimum(row, last)).to(gl.int32, bitcast=True)
    lower = gl.load(packed.scales + gl.minimum(row + 8, last)).to(gl.int32, bitcast=True)
    return upper, lower


@gluon.jit
def row_factors(packed, first_row, c):
    """Load the powers of two that make weights of rows' compact numbers, twice in a word: as row_scales."""
    upper, lower = row_scales(packed, first_row, c)
    # A scale is 2^(base - 64), its factor 2^base: 64 more in the exponent's place, of float32 as of bfloat16.
    upper = (upper >> 16) + (64 << 7)
    lower = (lower >> 16) + (64 << 7)
    return upper | (upper << 16), lower | (lower << 16)


@gluon.jit
def fourths(words):
    """Take the four words of each lane apart, along the last axis."""
    even, odd = gl.split(gl.reshape(words, [words.shape[0], 32, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def taken_apart(words, factors):
    """Each lane's words and factors as tensors of their own, [4, 32], in one layout."""
    taken = ()
    for number in gl.static_range(len(words)):
        if len(words[number].shape) == 3:
            taken = taken + fourths(words[number])
        else:
            taken = taken + (gl.convert_layout(words[number], taken[0].type.layout, assert_trivial=True),)
    for number in gl.static_range(len(factors)):
        taken = taken + (gl.convert_layout(factors[number], taken[0].type.layout, assert_trivial=True),)
    return taken


@gluon.jit
def compact_pairs(words, factors, SECOND: gl.constexpr, c):
    """Make weights of a unit's words: sixteen pairs [4, 32], (k * 2 + i) * 2 + j of row r + 8 j and columns
    16 k + 8 i + 2 t and the next, in lane 4 r + t. SECOND: with R = 8, of the second unit in the words' place."""
    if c.R > 8:
        pairs = gl.inline_asm_elementwise(
            _ALL, _ALL_WITH, taken_apart(words[0], factors), dtype=_SIXTEEN, is_pure=True, pack=1
        )  # fmt: skip
    else:
        TEXT: gl.constexpr = _SECOND if SECOND else _FIRST
        WITH: gl.constexpr = _SECOND_WITH if SECOND else _FIRST_WITH
        upper = gl.inline_asm_elementwise(
            TEXT, WITH, taken_apart(words[0], factors[:1]), dtype=_EIGHT, is_pure=True, pack=1
        )  # fmt: skip
        lower = gl.inline_asm_elementwise(
            TEXT, WITH, taken_apart(words[1], factors[1:]), dtype=_EIGHT, is_pure=True, pack=1
        )  # fmt: skip
        pairs = ()
        for number in gl.static_range(8):
            pairs = pairs + (upper[number], lower[number])
    return pairs


@gluon.jit
def both(words):
    """Split each word into its lower and its upper 16 bits, along a new last axis."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(low, high)


@gluon.jit
def operand(pairs, SUMS: gl.constexpr):
    """Build operand A [64, 64] of pairs. No value moves between threads."""
    tensors = ()
    for number in gl.static_range(16):
        tensors = tensors + (both(pairs[number]),)
    for level in gl.static_range(4):
        tensors = joined(tensors, 8 >> level)
    # [warp, row in 8, pair in 8 columns, column of a pair, 16 columns, half of them, half of 16 rows]
    whole = gl.reshape(tensors[0].to(gl.bfloat16, bitcast=True), [4, 8, 4, 2, 4, 2, 2])
    whole = gl.reshape(gl.permute(whole, (0, 6, 1, 4, 5, 2, 3)), [64, 64])
    return gl.convert_layout(whole, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def load_longest(packed, row, k):
    """Load the length of the longest list of the tiles of the stream that hold a row's 64 rows."""
    return gl.load(packed.longest + row // 64 * packed.tiles + k)


@gluon.jit
def with_listed(pairs, packed, first_row, k, unit, most, factors, c):
    """Write the weights of tiles' lists over what stands for them in a unit's pairs."""
    L: gl.constexpr = words_layout()
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L))) % max(c.R // 16, 1)
    upper, lower = factors
    for block in gl.static_range(blocks_of(c.R)):
        row = gl.minimum((warp_rows(first_row) + block * 8) // c.R, packed.blocks - 1)
        list_of = packed.lists + gl.load(packed.places + row * packed.tiles + k).to(gl.int64) * _LIST_WORDS
        count = gl.load(list_of)
        for number in range(1, most + 1):
            listed = gl.load(list_of + number, mask=number <= count, other=0)
            # Half and warp, lane, 16 columns, half of them, half of 16 rows, column of a pair: as of the lower bits.
            mine = (number <= count) & ((listed >> 10 & 15) == thread_of(unit, c.R) // 32 + warp)
            which = listed >> 1 & 15
            if c.R == 8:  # in that place the second half of 16 rows is the second unit
                mine = mine & ((which & 1) == unit // 2 % 2)
                which = (which & 14) | block
            here = mine[:, None] & ((listed >> 5 & 31)[:, None] == lane[None, :])
            # A listed number is 2^64 times what the tile would hold.
            scale = ((gl.where((which & 1)[:, None] > 0, lower, upper) & 0xFFFF) - (64 << 7)) << 16
            value = (listed & -0x10000).to(gl.float32, bitcast=True)[:, None] * scale.to(gl.float32, bitcast=True)
            bits = (value.to(gl.int32, bitcast=True) >> 16) & 0xFFFF
            is_second = (listed & 1)[:, None] > 0
            keep = gl.where(is_second, 0xFFFF, -0x10000)
            put = gl.where(is_second, bits << 16, bits)
            made = ()
            for at in gl.static_range(16):
                this = gl.convert_layout(here & (which == at)[:, None], pairs[0].type.layout, assert_trivial=True)
                kept = pairs[at] & gl.convert_layout(
                    keep + gl.zeros_like(put), pairs[0].type.layout, assert_trivial=True
                )
                kept = kept | gl.convert_layout(put, pairs[0].type.layout, assert_trivial=True)
                made = made + (gl.where(this, kept, pairs[at]),)
            pairs = made
    return pairs
