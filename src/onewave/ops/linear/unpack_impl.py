"""Blocks of packed weights in registers: LLVM instructions that turn a tile's bytes into floats.

A tile has 16 rows (ops/linear/packed.py), and one SIMD lane holds one row. Array languages have no words for "16 lanes,
unpack, fused multiply-add" that reach the machine, so the instructions are written as LLVM IR; LLVM maps 16-lane
vectors to AVX-512, two AVX2 or four NEON registers.

A format's function takes the emitter and the address of a tile's block, and returns chunks. A chunk is a list of groups
of 32 columns, and a generator of (group, column in the group, 16 weights before scaling) that covers them once; groups
that share bytes share a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from onewave.ops.linear.packed import FORMATS, LANES

FLOAT, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
_BYTES, _HALVES = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(16), LANES)
_Values = Iterator[tuple[int, int, Any]]


@dataclass(frozen=True)
class Group:
    """32 columns of a tile. scales: of columns 0 to 15 and of 16 to 31, or None for ones. shift: what the sum of the
    inputs is multiplied by, or None."""

    scales: tuple[Any, Any] | None
    shift: Any = None


class Emitter:
    """Writes the vector instructions of one tile; every method returns an LLVM value."""

    def __init__(self, builder: ir.IRBuilder):
        self.b = builder
        self._fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(FLOATS, [FLOATS] * 3), "llvm.fma.v16f32"
        )

    def pointer(self, base, offset: int, kind):
        return self.b.inttoptr(self.b.add(base, I64(offset)), kind.as_pointer())

    def load(self, base, offset: int, kind, align: int):
        value = self.b.load(self.pointer(base, offset, kind))
        value.align = align
        return value

    def store(self, value, base, offset: int, align: int = 4) -> None:
        self.b.store(value, self.pointer(base, offset, value.type)).align = align

    def broadcast(self, base, offset: int):
        first = self.b.insert_element(FLOATS(ir.Undefined), self.load(base, offset, FLOAT, 4), I32(0))
        return self.b.shuffle_vector(first, FLOATS(ir.Undefined), WORDS([0] * LANES))

    def fma(self, x, y, z):
        return self.b.call(self._fma, [x, y, z])

    def splat(self, value: int):
        return WORDS([value] * LANES)

    def numbers(self, value: float):
        return FLOATS([value] * LANES)

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


_Chunks = Iterator[tuple[list[Group], _Values]]


def _one(e: Emitter, base, values: _Values, *, shifted: bool = False) -> _Chunks:
    """A block of 32 columns that begins with its scale, and, where shifted, its offset."""
    scale = e.half(base, 0)
    yield [Group((scale, scale), e.half(base, 2) if shifted else None)], values


def _nibbles(e: Emitter, base, start: int, middle: int) -> _Values:
    for column in range(16):
        packed = e.byte(base, start + column)
        yield 0, column, e.number(e.bits(packed, 0, 4), middle)
        yield 0, column + 16, e.number(e.bits(packed, 4, 4), middle)


def _fives(e: Emitter, base, start: int, middle: int) -> _Values:
    fifth = e.load(base, start * LANES, WORDS, 1)
    for column in range(16):
        packed = e.byte(base, start + 4 + column)
        for at, low in ((column, e.bits(packed, 0, 4)), (column + 16, e.bits(packed, 4, 4))):
            yield 0, at, e.number(e.b.or_(low, e.bits(fifth, at, 1, 4)), middle)


def _q4_0(e: Emitter, base) -> _Chunks:
    return _one(e, base, _nibbles(e, base, 2, 8))


def _q4_1(e: Emitter, base) -> _Chunks:
    return _one(e, base, _nibbles(e, base, 4, 0), shifted=True)


def _q5_0(e: Emitter, base) -> _Chunks:
    return _one(e, base, _fives(e, base, 2, 16))


def _q5_1(e: Emitter, base) -> _Chunks:
    return _one(e, base, _fives(e, base, 4, 0), shifted=True)


def _q8_0(e: Emitter, base) -> _Chunks:
    return _one(e, base, ((0, column, e.number(e.signed_byte(base, 2 + column))) for column in range(32)))


def _k_groups(e: Emitter, base) -> list[Group]:
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


def _k_values(e: Emitter, base, start: int, chunk: int, fifth: int | None) -> _Values:
    """64 columns in 32 bytes: low nibbles, then high ones. fifth: where 32 bytes of fifth bits begin."""
    for column in range(32):
        packed = e.byte(base, start + 32 * chunk + column)
        high = None if fifth is None else e.byte(base, fifth + column)
        for group in range(2):
            code = e.bits(packed, 4 * group, 4)
            if high is not None:
                code = e.b.or_(code, e.bits(high, 2 * chunk + group, 1, 4))
            yield group, column, e.number(code)


def _q4_k(e: Emitter, base) -> _Chunks:
    groups = _k_groups(e, base)
    for chunk in range(4):
        yield groups[2 * chunk : 2 * chunk + 2], _k_values(e, base, 16, chunk, None)


def _q5_k(e: Emitter, base) -> _Chunks:
    groups = _k_groups(e, base)
    for chunk in range(4):
        yield groups[2 * chunk : 2 * chunk + 2], _k_values(e, base, 48, chunk, 16)


def _sixes(e: Emitter, base, half: int) -> _Values:
    """128 columns: of 64 bytes the low nibbles, then the high ones, and two bits more of each in 32 bytes."""
    for column in range(32):
        lows = [e.byte(base, 64 * half + 32 * part + column) for part in range(2)]
        high = e.byte(base, 128 + 32 * half + column)
        for group in range(4):
            code = e.b.or_(e.bits(lows[group % 2], 4 * (group // 2), 4), e.bits(high, 2 * group, 2, 4))
            yield group, column, e.number(code, 32)


def _q6_k(e: Emitter, base) -> _Chunks:
    d = e.half(base, 208)
    for half in range(2):
        steps = [e.b.fmul(d, e.number(e.signed_byte(base, 192 + 8 * half + place))) for place in range(8)]
        groups = [Group((steps[2 * group], steps[2 * group + 1])) for group in range(4)]
        yield groups, _sixes(e, base, half)


def _dense(weight: Callable[[Emitter, Any, int], Any]) -> Callable[[Emitter, Any], _Chunks]:
    def chunks(e: Emitter, base) -> _Chunks:
        yield [Group(None)], ((0, column, weight(e, base, column)) for column in range(32))

    return chunks


def _bf16(e: Emitter, base, column: int):
    raw = e.b.zext(e.load(base, 2 * LANES * column, _HALVES, 2), WORDS)
    return e.b.bitcast(e.b.shl(raw, e.splat(16)), FLOATS)


CHUNKS: dict[str, Callable[[Emitter, Any], _Chunks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "BF16": _dense(_bf16),
    "F16": _dense(lambda e, base, column: e.half(base, 2 * column)),
    "F32": _dense(lambda e, base, column: e.load(base, 4 * LANES * column, FLOATS, 4)),
}
"""What unpacks each of packed.FORMATS."""
assert CHUNKS.keys() == FORMATS.keys()
