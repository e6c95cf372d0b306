"""Blocks of packed weights in registers: LLVM instructions that turn a tile's bytes into floats.

A tile has 16 rows (ops/linear/packed.py), and one SIMD lane holds one row.

A format's function takes the emitter and the address of a tile's block, and returns chunks. A chunk is a list of groups
of 32 columns, and a generator of (group, column in the group, 16 weights before scaling) that covers them once; groups
that share bytes share a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from onewave.ops.cpu import LANES
from onewave.ops.cpu.vectors_impl import FLOATS, I32, I64, WORDS, Emitter
from onewave.ops.linear.packed import FORMATS

_BYTES, _HALVES = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(16), LANES)
_QUAD, _MARKS = ir.VectorType(ir.IntType(8), 4 * LANES), ir.VectorType(ir.IntType(1), 4 * LANES)
_Values = Iterator[tuple[int, int, Any]]


@dataclass(frozen=True)
class Group:
    """32 columns of a tile. scales: of columns 0 to 15 and of 16 to 31, or None for ones. shift: what the sum of the
    inputs is multiplied by, or None."""

    scales: tuple[Any, Any] | None
    shift: Any = None


class BlockEmitter(Emitter):
    """Writes the vector instructions of one tile."""

    def splat(self, value: int):
        return WORDS([value] * LANES)

    def byte(self, base, number: int):
        """The bytes `number` of 16 rows as words."""
        return self.b.zext(self.load(base, number * LANES, _BYTES, 1), WORDS)

    def signed_byte(self, base, number: int):
        return self.b.sext(self.load(base, number * LANES, _BYTES, 1), WORDS)

    def bits(self, words, first: int, count: int, to: int = 0):
        """`count` bits from bit `first` on, moved to bit `to`."""
        if first != to:
            move = self.b.lshr if first > to else self.b.shl
            words = move(words, self.splat(abs(first - to)))
        return self.b.and_(words, self.splat(((1 << count) - 1) << to))

    def number(self, words, middle: int = 0):
        """Small integers, less `middle`, as floats."""
        return self.b.sitofp(self.b.sub(words, self.splat(middle)) if middle else words, FLOATS)

    def quad(self, base, number: int):
        """The bytes `number` to number + 3 of 16 rows, 64 lanes.

        Codes with bits in two places are put together here, at a quarter of the instructions; four bits alone are not
        worth taking the lanes out again.
        """
        return self.load(base, number * LANES, _QUAD, 1)

    def each(self, quad: Any, operation: str, value: int):
        """An operation of each byte with a constant."""
        return getattr(self.b, operation)(quad, _QUAD([value] * 4 * LANES))

    def nibbles(self, quad: Any, high: int):
        """Low nibbles of 64 bytes, or high ones."""
        return self.each(self.each(quad, "lshr", 4) if high else quad, "and_", 15)

    def bits_at(self, quad: Any, first: int, count: int, to: int):
        """`count` bits of each byte from bit `first` on, moved to bit `to`."""
        moved = self.each(quad, "lshr" if first > to else "shl", abs(first - to)) if first != to else quad
        return self.each(moved, "and_", ((1 << count) - 1) << to)

    def columns(self, quad: Any, middle: int = 0) -> Iterator[Any]:
        """Four columns of small codes, less `middle`, as floats."""
        codes = self.each(quad, "sub", middle) if middle else quad
        for column in range(4):
            places = ir.VectorType(I32, LANES)(list(range(column * LANES, (column + 1) * LANES)))
            yield self.number(self.b.sext(self.b.shuffle_vector(codes, _QUAD(ir.Undefined), places), WORDS))

    def e4m3(self, words):
        """Bytes in e4m3 as floats, subnormals included."""
        magnitude = self.b.bitcast(self.b.shl(self.b.and_(words, self.splat(127)), self.splat(20)), FLOATS)
        magnitude = self.b.fmul(magnitude, self.numbers(2.0**120))
        sign = self.b.shl(self.b.and_(words, self.splat(128)), self.splat(24))
        return self.b.bitcast(self.b.or_(self.b.bitcast(magnitude, WORDS), sign), FLOATS)

    def half(self, base, byte: int):
        """16 fp16 numbers as floats by integer shifts: exact, subnormals, infinities and NaN included, and needs no
        F16C. byte: where they stand in a row's block."""
        raw = self.b.zext(self.load(base, byte * LANES, _HALVES, 2), WORDS)
        magnitude = self.b.bitcast(self.b.shl(self.b.and_(raw, self.splat(0x7FFF)), self.splat(13)), FLOATS)
        magnitude = self.b.fmul(magnitude, self.numbers(2.0**112))
        sign = self.b.shl(self.b.and_(raw, self.splat(0x8000)), self.splat(16))
        highest = self.splat(0x7C00)
        endless = self.b.sext(self.b.icmp_unsigned("==", self.b.and_(raw, highest), highest), WORDS)
        sign = self.b.or_(sign, self.b.and_(endless, self.splat(0x7F800000)))
        return self.b.bitcast(self.b.or_(self.b.bitcast(magnitude, WORDS), sign), FLOATS)


_Chunks = Callable[[BlockEmitter, Any], Iterator[tuple[list[Group], _Values]]]


def _one(values: Callable[..., _Values], *numbers: int, shifted: bool = False) -> _Chunks:
    """A block of 32 columns that begins with its scale, and, where shifted, its offset. numbers: of `values`."""

    def chunks(e: BlockEmitter, base):
        scale = e.half(base, 0)
        yield [Group((scale, scale), e.half(base, 2) if shifted else None)], values(e, base, *numbers)

    return chunks


def _nibbles(e: BlockEmitter, base, start: int, middle: int) -> _Values:
    for column in range(16):
        packed = e.byte(base, start + column)
        yield 0, column, e.number(e.bits(packed, 0, 4), middle)
        yield 0, column + 16, e.number(e.bits(packed, 4, 4), middle)


def _fives(e: BlockEmitter, base, start: int, middle: int) -> _Values:
    """Fifth bits, 16 rows of a column in two bytes, then nibbles."""
    for first in range(0, 16, 4):
        packed = e.quad(base, start + 4 + first)
        for high in range(2):
            column = first + 16 * high
            marks = e.b.bitcast(e.load(e.b.add(base, I64(2 * column)), start * LANES, I64, 1), _MARKS)
            low = e.nibbles(packed, high)
            code = e.b.select(marks, e.each(low, "or_", 16), low)
            for at, value in enumerate(e.columns(code, middle), column):
                yield 0, at, value


def _signed(e: BlockEmitter, base, start: int) -> _Values:
    for column in range(32):
        yield 0, column, e.number(e.signed_byte(base, start + column))


def _k_groups(e: BlockEmitter, base) -> list[Group]:
    """Eight groups whose scales and minima are six-bit steps, in 12 bytes behind two fp16 numbers."""
    d, m = e.half(base, 0), e.b.fneg(e.half(base, 2))
    steps = [e.byte(base, 4 + place) for place in range(12)]
    groups: list[Group] = []
    for group in range(8):
        if group < 4:
            scale, low = e.bits(steps[group], 0, 6), e.bits(steps[group + 4], 0, 6)
        else:
            scale = e.b.or_(e.bits(steps[group + 4], 0, 4), e.bits(steps[group - 4], 6, 2, 4))
            low = e.b.or_(e.bits(steps[group + 4], 4, 4), e.bits(steps[group], 6, 2, 4))
        scale = e.b.fmul(d, e.number(scale))
        groups.append(Group((scale, scale), e.b.fmul(m, e.number(low))))
    return groups


def _k_fours(e: BlockEmitter, base, chunk: int) -> _Values:
    """64 columns in 32 bytes: low nibbles, then high ones."""
    for column in range(32):
        packed = e.byte(base, 16 + 32 * chunk + column)
        for group in range(2):
            yield group, column, e.number(e.bits(packed, 4 * group, 4))


def _k_fives(e: BlockEmitter, base, chunk: int) -> _Values:
    """As _k_fours, with the fifth bits of all eight groups in 32 bytes."""
    for first in range(0, 32, 4):
        packed, fifth = e.quad(base, 48 + 32 * chunk + first), e.quad(base, 16 + first)
        for group in range(2):
            code = e.b.or_(e.nibbles(packed, group), e.bits_at(fifth, 2 * chunk + group, 1, 4))
            for column, value in enumerate(e.columns(code), first):
                yield group, column, value


def _k(values: Callable[[BlockEmitter, Any, int], _Values]) -> _Chunks:
    """Eight groups of K-quants in four chunks."""

    def chunks(e: BlockEmitter, base):
        groups = _k_groups(e, base)
        for chunk in range(4):
            yield groups[2 * chunk : 2 * chunk + 2], values(e, base, chunk)

    return chunks


def _sixes(e: BlockEmitter, base, half: int) -> _Values:
    """128 columns: for four in a quarter of them two quads with low and high nibbles, and one with two bits of each."""
    for first in range(0, 32, 4):
        start = 18 + 96 * half + 3 * first
        lows = [e.quad(base, start), e.quad(base, start + 4)]
        high = e.quad(base, start + 8)
        for group in range(4):
            code = e.b.or_(e.nibbles(lows[group % 2], group // 2), e.bits_at(high, 2 * group, 2, 4))
            for column, value in enumerate(e.columns(code, 32), first):
                yield group, column, value


def _q6_k(e: BlockEmitter, base):
    d = e.half(base, 0)
    for half in range(2):
        steps = [e.b.fmul(d, e.number(e.signed_byte(base, 2 + 8 * half + place))) for place in range(8)]
        groups = [Group((steps[2 * group], steps[2 * group + 1])) for group in range(4)]
        yield groups, _sixes(e, base, half)


def _g4z(e: BlockEmitter, base):
    scale = e.half(base, 0)
    shift = e.b.fneg(e.b.fmul(scale, e.number(e.byte(base, 2))))
    yield [Group((scale, scale), shift)], _nibbles(e, base, 3, 0)


def _g8(e: BlockEmitter, base):
    scale, shift = (e.load(base, 4 * place * LANES, FLOATS, 4) for place in range(2))
    yield [Group((scale, scale), shift)], _signed(e, base, 8)


def _gf8(e: BlockEmitter, base):
    scale = e.load(base, 0, FLOATS, 4)
    yield [Group((scale, scale))], ((0, column, e.e4m3(e.byte(base, 4 + column))) for column in range(32))


def _dense(weight: Callable[[BlockEmitter, Any, int], Any]) -> _Chunks:
    def chunks(e: BlockEmitter, base):
        yield [Group(None)], ((0, column, weight(e, base, column)) for column in range(32))

    return chunks


def _bf16(e: BlockEmitter, base, column: int):
    raw = e.b.zext(e.load(base, 2 * LANES * column, _HALVES, 2), WORDS)
    return e.b.bitcast(e.b.shl(raw, e.splat(16)), FLOATS)


CHUNKS: dict[str, _Chunks] = {
    "Q4_0": _one(_nibbles, 2, 8),
    "Q4_1": _one(_nibbles, 4, 0, shifted=True),
    "Q5_0": _one(_fives, 2, 16),
    "Q5_1": _one(_fives, 4, 0, shifted=True),
    "Q8_0": _one(_signed, 2),
    "Q4_K": _k(_k_fours),
    "Q5_K": _k(_k_fives),
    "Q6_K": _q6_k,
    "G4Z": _g4z,
    "G8": _g8,
    "GF8": _gf8,
    "BF16": _dense(_bf16),
    "F16": _dense(lambda e, base, column: e.half(base, 2 * column)),
    "F32": _dense(lambda e, base, column: e.load(base, 4 * LANES * column, FLOATS, 4)),
}
"""Code that unpacks each of packed.FORMATS."""
assert CHUNKS.keys() == FORMATS.keys()
