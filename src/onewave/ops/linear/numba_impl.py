"""y = x W^T on the CPU, straight from packed weights, in float32.

Mapping: a tile of 16 weight rows is one unit of work, and tiles are shared out over the threads. Inside a tile one SIMD
lane holds one row. For every block of 32 columns the kernel reads the tile's bytes once, turns them into floats in
registers and multiplies them with one (decode) or four (prefill) tokens, broadcast from x. A token's sum always goes
through the same four accumulators in the same order, so its result does not depend on how many tokens are multiplied
with it. Roofline: the bytes of the weights, read once for up to four tokens.

The inner loop is built as LLVM IR because no array language says "16 lanes, unpack, fused multiply-add" without losing
it on the way; LLVM maps the 16-lane vectors to AVX-512, two AVX2 or four NEON registers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from onewave.ops.cpu.math_impl import floats, integers
from onewave.ops.cpu.team_impl import kernel, run
from onewave.ops.linear.packed import BLOCK, LANES, PackedWeight

_LANES = 16
_FLOAT, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_I32, _LANES)
_BYTES, _HALVES = ir.VectorType(ir.IntType(8), _LANES), ir.VectorType(ir.IntType(16), _LANES)


class _Emitter:
    """Writes the vector instructions of one tile; every method returns an LLVM value."""

    def __init__(self, builder: ir.IRBuilder):
        self.b = builder
        self.fma_function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32"
        )

    def load(self, base, offset: int, kind, align: int):
        pointer = self.b.inttoptr(self.b.add(base, _I64(offset)), kind.as_pointer())
        value = self.b.load(pointer)
        value.align = align
        return value

    def broadcast(self, base, offset: int):
        first = self.b.insert_element(_FLOATS(ir.Undefined), self.load(base, offset, _FLOAT, 4), _I32(0))
        return self.b.shuffle_vector(first, _FLOATS(ir.Undefined), _WORDS([0] * _LANES))

    def fma(self, x, y, z):
        return self.b.call(self.fma_function, [x, y, z])

    def splat(self, value: int):
        return _WORDS([value] * _LANES)

    def bytes(self, base, offset: int):
        return self.load(base, offset, _BYTES, 1)

    def half(self, base, offset: int):
        """16 fp16 numbers as floats by integer shifts: exact, subnormals, infinities and NaN included, and needs no
        F16C."""
        raw = self.b.zext(self.load(base, offset, _HALVES, 2), _WORDS)
        magnitude = self.b.bitcast(self.b.shl(self.b.and_(raw, self.splat(0x7FFF)), self.splat(13)), _FLOATS)
        magnitude = self.b.fmul(magnitude, _FLOATS([2.0**112] * _LANES))
        sign = self.b.shl(self.b.and_(raw, self.splat(0x8000)), self.splat(16))
        highest = self.splat(0x7C00)
        endless = self.b.sext(self.b.icmp_unsigned("==", self.b.and_(raw, highest), highest), _WORDS)
        sign = self.b.or_(sign, self.b.and_(endless, self.splat(0x7F800000)))
        return self.b.bitcast(self.b.or_(self.b.bitcast(magnitude, _WORDS), sign), _FLOATS)


# One function a format: yields (column, 16 weights before scaling) for the 32 columns of a block.


def _nibbles(e: _Emitter, base, start: int, zero_point: int):
    for column in range(16):
        packed = e.b.zext(e.bytes(base, start + 16 * column), _WORDS)
        for value, at in ((e.b.and_(packed, e.splat(15)), column), (e.b.lshr(packed, e.splat(4)), column + 16)):
            shifted = e.b.sub(value, e.splat(zero_point)) if zero_point else value
            yield at, e.b.sitofp(shifted, _FLOATS)


def _q4_0(e: _Emitter, base):
    return _nibbles(e, base, 2 * _LANES, 8)


def _q4_1(e: _Emitter, base):
    return _nibbles(e, base, 4 * _LANES, 0)


def _q8_0(e: _Emitter, base):
    for column in range(32):
        yield column, e.b.sitofp(e.b.sext(e.bytes(base, (2 + column) * _LANES), _WORDS), _FLOATS)


def _bf16(e: _Emitter, base):
    for column in range(32):
        raw = e.b.zext(e.load(base, 2 * _LANES * column, _HALVES, 2), _WORDS)
        yield column, e.b.bitcast(e.b.shl(raw, e.splat(16)), _FLOATS)


def _f16(e: _Emitter, base):
    for column in range(32):
        yield column, e.half(base, 2 * _LANES * column)


def _f32(e: _Emitter, base):
    for column in range(32):
        yield column, e.load(base, 4 * _LANES * column, _FLOATS, 4)


def _tile(columns: Callable, block_bytes: int, tokens: int, *, scaled: bool = False, offset: bool = False):
    """Build the intrinsic that multiplies one tile with `tokens` rows of x.

    Arguments at run time: addresses of the tile, x, the per-block sums of x and out; number of blocks; strides in bytes
    of x, the sums and out. scaled: a block begins with 16 fp16 scales. offset: then come 16 fp16 offsets (Q4_1).
    """

    @intrinsic
    def tile(_context, tile, x, sums, out, blocks, x_stride, sums_stride, out_stride):
        def emit(context, builder, _signature, args):
            tile, x, sums, out, blocks, x_stride, sums_stride, out_stride = args
            e = _Emitter(builder)
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            block = builder.phi(_I64)
            block.add_incoming(_I64(0), before)
            totals = [builder.phi(_FLOATS) for _ in range(tokens)]
            zero = _FLOATS([0.0] * _LANES)
            for total in totals:
                total.add_incoming(zero, before)
            base = builder.add(tile, builder.mul(block, _I64(block_bytes)))
            rows = [
                builder.add(builder.add(x, builder.mul(block, _I64(32 * 4))), builder.mul(_I64(t), x_stride))
                for t in range(tokens)
            ]
            parts = [[zero] * 4 for _ in range(tokens)]
            for column, weights in columns(e, base):
                # Four chains hide the latency of the multiply-add; which chain a column uses never changes.
                chain = column % 2 + 2 * (column // 16)
                for t in range(tokens):
                    parts[t][chain] = e.fma(weights, e.broadcast(rows[t], 4 * column), parts[t][chain])
            scale = e.half(base, 0) if scaled else None
            shift = e.half(base, 2 * _LANES) if offset else None
            following = builder.add(block, _I64(1))
            for t, total in enumerate(totals):
                a, b, c, d = parts[t]
                value = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
                value = builder.fadd(value, total) if scale is None else e.fma(value, scale, total)
                if shift is not None:
                    at = builder.add(builder.add(sums, builder.mul(block, _I64(4))), builder.mul(_I64(t), sums_stride))
                    value = e.fma(shift, e.broadcast(at, 0), value)
                total.add_incoming(value, builder.block)
                totals[t] = value
            block.add_incoming(following, builder.block)
            builder.cbranch(builder.icmp_signed("<", following, blocks), loop, after)
            builder.position_at_end(after)
            for t, total in enumerate(totals):
                address = builder.add(out, builder.mul(_I64(t), out_stride))
                builder.store(total, builder.inttoptr(address, _FLOATS.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), emit

    return tile


def _over_tiles(columns: Callable, block_bytes: int, *, scaled: bool = False, offset: bool = False):
    """Build the loop over tiles of one format: four tokens at a time, then the rest one by one."""
    one, four = (_tile(columns, block_bytes, tokens, scaled=scaled, offset=offset) for tokens in (1, 4))

    @njit
    def tiles(table_at, first, last):
        table = integers(table_at, 19)
        data, x, sums, out, blocks, tokens = table[1], table[2], table[3], table[4], table[5], table[6]
        x_stride, sums_stride, out_stride = blocks * 128, blocks * 4, table[7] * 4
        for tile in range(first, last):
            at, to = data + tile * blocks * block_bytes, out + tile * 64
            for t in range(0, tokens - 3, 4):
                s = sums + t * sums_stride
                four(at, x + t * x_stride, s, to + t * out_stride, blocks, x_stride, sums_stride, out_stride)
            for t in range(tokens - tokens % 4, tokens):
                s = sums + t * sums_stride
                one(at, x + t * x_stride, s, to + t * out_stride, blocks, x_stride, sums_stride, out_stride)

    return tiles


# Numba keeps on disk only functions that close over nothing: the loops above become part of these.
_q4_0_tiles = _over_tiles(_q4_0, 288, scaled=True)
_q4_1_tiles = _over_tiles(_q4_1, 320, scaled=True, offset=True)
_q8_0_tiles = _over_tiles(_q8_0, 544, scaled=True)
_bf16_tiles = _over_tiles(_bf16, 1024)
_f16_tiles = _over_tiles(_f16, 1024)
_f32_tiles = _over_tiles(_f32, 2048)


@kernel
def _matmul_q4_0(table_at, first, last):
    _q4_0_tiles(table_at, first, last)


@kernel
def _matmul_q4_1(table_at, first, last):
    _q4_1_tiles(table_at, first, last)


@kernel
def _matmul_q8_0(table_at, first, last):
    _q8_0_tiles(table_at, first, last)


@kernel
def _matmul_bf16(table_at, first, last):
    _bf16_tiles(table_at, first, last)


@kernel
def _matmul_f16(table_at, first, last):
    _f16_tiles(table_at, first, last)


@kernel
def _matmul_f32(table_at, first, last):
    _f32_tiles(table_at, first, last)


@kernel
def _block_sums(table_at, first, last):
    table = integers(table_at, 19)
    x, sums, blocks = table[1], table[2], table[3]
    for t in range(first, last):
        inputs, block_sums = floats(x + t * blocks * 128, blocks * 32), floats(sums + t * blocks * 4, blocks)
        for i in range(blocks):
            total = np.float32(0.0)
            for j in range(32):
                total += inputs[32 * i + j]
            block_sums[i] = total


_MATMUL = {
    "Q4_0": _matmul_q4_0,
    "Q4_1": _matmul_q4_1,
    "Q8_0": _matmul_q8_0,
    "BF16": _matmul_bf16,
    "F16": _matmul_f16,
    "F32": _matmul_f32,
}


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """x W^T. x: [tokens, cols] float32. Returns [tokens, rows] float32."""
    tokens = x.shape[0]
    tiles, blocks, _ = weight.data.shape
    if blocks * BLOCK != x.shape[1]:
        x = F.pad(x, (0, blocks * BLOCK - x.shape[1]))
    x = x.contiguous()
    x_at, sums = x.data_ptr(), x
    if weight.kind == "Q4_1":
        # The offsets of a block multiply the sum of its 32 inputs, taken once here for all rows.
        sums = torch.empty((tokens, blocks), dtype=torch.float32)
        run(_block_sums, tokens, (x_at, sums.data_ptr(), blocks), alone=tokens < 16)
    out = torch.empty((tokens, tiles * LANES), dtype=torch.float32)
    addresses = (weight.data.data_ptr(), x_at, sums.data_ptr(), out.data_ptr())
    run(_MATMUL[weight.kind], tiles, (*addresses, blocks, tokens, tiles * LANES))
    return out if tiles * LANES == weight.rows else out[:, : weight.rows].contiguous()
