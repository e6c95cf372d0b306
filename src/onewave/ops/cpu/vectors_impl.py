"""LLVM instructions of 16 lanes, for what array languages have no words for that reach the machine: "16 lanes, load,
fused multiply-add". LLVM maps them to AVX-512, two AVX2 or four NEON registers."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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

    def add_neighbours(self, one, other):
        """Sums of lanes 2i and 2i + 1, of one and then of other."""
        even, odd = (WORDS(list(range(first, 2 * LANES, 2))) for first in range(2))
        return self.b.fadd(self.b.shuffle_vector(one, other, even), self.b.shuffle_vector(one, other, odd))

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


def product(vectors: int, rows: int) -> Any:
    """Build the intrinsic out[row] += sum over i of scalar[row, i] * vector[i], `vectors` x 16 columns wide.

    Arguments at run time: addresses of the first vector, scalar and output; n >= 1 terms; bytes from a vector to the
    next, from a scalar to the next term's and to the next row's, from an output to the next row's; whether outputs are
    added to.
    """

    @intrinsic
    def multiply(_context, vector, scalar, out, terms, next_vector, next_scalar, next_row, next_out, adds):
        def emit(context, builder: ir.IRBuilder, _signature, args):
            vector, scalar, out, terms, next_vector, next_scalar, next_row, next_out, adds = args
            e = Emitter(builder)
            outs = [(e.step(out, next_out, row), 4 * LANES * v) for row in range(rows) for v in range(vectors)]
            is_later = builder.icmp_signed("!=", adds, I64(0))
            scalars = [e.step(scalar, next_row, row) for row in range(rows)]

            def term(index, totals):
                base = builder.add(vector, builder.mul(index, next_vector))
                at = builder.mul(index, next_scalar)
                values = [e.load(base, 4 * LANES * v, FLOATS, 4) for v in range(vectors)]
                found = []
                for row in range(rows):
                    factor = e.broadcast(builder.add(scalars[row], at), 0)
                    found += [e.fma(factor, values[v], totals[row * vectors + v]) for v in range(vectors)]
                return found

            zero = e.numbers(0.0)
            totals = [builder.select(is_later, e.load(*at, FLOATS, 4), zero) for at in outs]
            for at, total in zip(outs, e.loop(terms, totals, term), strict=True):
                e.store(total, *at)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), emit

    return multiply


def dots(keys: int) -> Any:
    """Build the intrinsic out[key] = q . k[key] for 1 or 8 keys, whose bits do not depend on how many there are.

    Arguments at run time: addresses of q, the first key and the output; vectors >= 1 of a row; bytes from a key to the
    next.
    """

    @intrinsic
    def multiply(_context, q, k, out, vectors, next_key):
        def emit(context, builder: ir.IRBuilder, _signature, args):
            q, k, out, vectors, next_key = args
            e = Emitter(builder)
            rows = [e.step(k, next_key, key) for key in range(keys)]

            def vector(index, totals):
                at = builder.mul(index, I64(4 * LANES))
                left = e.load(builder.add(q, at), 0, FLOATS, 4)
                return [
                    e.fma(left, e.load(builder.add(row, at), 0, FLOATS, 4), total)
                    for row, total in zip(rows, totals, strict=True)
                ]

            totals = list(e.loop(vectors, [e.numbers(0.0)] * keys, vector))
            # After four rounds lane i holds the sum of vector i.
            for _ in range(4):
                pairs = zip(totals[::2], totals[1::2] or totals, strict=True)
                totals = [e.add_neighbours(one, other) for one, other in pairs]
            first = builder.shuffle_vector(totals[0], totals[0], ir.VectorType(I32, keys)(list(range(keys))))
            e.store(first, out, 0)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), emit

    return multiply


@intrinsic
def scale_and_max(_context, values, vectors, scale):
    """Multiply `vectors` >= 1 vectors at an address by a float32; return the largest product. A NaN is passed over."""

    def emit(_context, builder: ir.IRBuilder, _signature, args):
        values, vectors, scale = args
        e = Emitter(builder)
        largest = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(FLOATS, [FLOATS] * 2), "llvm.maxnum.v16f32"
        )
        reduced = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(FLOAT, [FLOATS]), "llvm.vector.reduce.fmax.v16f32"
        )
        factor = builder.shuffle_vector(
            builder.insert_element(FLOATS(ir.Undefined), scale, I32(0)), FLOATS(ir.Undefined), WORDS([0] * LANES)
        )

        def vector(index, totals):
            at = builder.add(values, builder.mul(index, I64(4 * LANES)))
            scaled = builder.fmul(e.load(at, 0, FLOATS, 4), factor)
            e.store(scaled, at, 0)
            return [builder.call(largest, [scaled, totals[0]])]

        return builder.call(reduced, e.loop(vectors, [e.numbers(float("-inf"))], vector))

    return types.float32(types.int64, types.int64, types.float32), emit


@intrinsic
def prefetch(_context, address, lines):
    """Ask for `lines` >= 1 cache lines from an address on, of 64 bytes, which need not exist."""

    def emit(context, builder: ir.IRBuilder, _signature, args):
        address, lines = args
        kinds = [ir.IntType(8).as_pointer(), I32, I32, I32]
        ask = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0i8"
        )

        def line(index, totals):
            at = builder.inttoptr(builder.add(address, builder.mul(index, I64(64))), kinds[0])
            # To be read, kept in L2, data.
            builder.call(ask, [at, I32(0), I32(2), I32(1)])
            return totals

        Emitter(builder).loop(lines, [], line)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit
