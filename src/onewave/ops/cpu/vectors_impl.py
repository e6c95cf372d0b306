"""LLVM instructions of 16 lanes, for what array languages have no words for that reach the machine: "16 lanes, load,
fused multiply-add". LLVM maps them to AVX-512, two AVX2 or four NEON registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils

from onewave.ops.cpu import LANES

FLOAT, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)


class Emitter:
    """Writes vector instructions; every method returns an LLVM value. Addresses are int64."""

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

    def numbers(self, value: float):
        return FLOATS([value] * LANES)

    def step(self, base, stride, number: int):
        """The address `number` strides after base."""
        return self.b.add(base, self.b.mul(stride, I64(number)))

    def loop(self, count, totals: Sequence, step: Callable) -> Sequence:
        """Run step(index, totals) -> totals `count` times, at least once; return the last totals."""
        builder = self.b
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        index.add_incoming(I64(0), before)
        carried = [builder.phi(FLOATS) for _ in totals]
        for phi, total in zip(carried, totals, strict=True):
            phi.add_incoming(total, before)
        found = step(index, carried)
        following = builder.add(index, I64(1))
        index.add_incoming(following, builder.block)
        for phi, total in zip(carried, found, strict=True):
            phi.add_incoming(total, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        builder.position_at_end(after)
        return found
