"""y = x W^T on the CPU, straight from packed weights, in float32.

Mapping: a tile of 16 weight rows is one unit of work, and tiles are shared out over the threads. Inside a tile one SIMD
lane holds one row. One or two tokens: the kernel reads the tile's bytes, turns them into floats in registers and
multiplies them with a token, broadcast from x. More: 256 columns of a tile are unpacked into the thread's own room,
which stays in L1, and eight tokens at a time are multiplied from there.
Roofline: of few tokens the bytes of the weights, read once a token; of many the fused multiply-adds.

A token's sum always goes through the same four accumulators in the same order, so its result does not depend on how
many tokens are multiplied with it. For every 32 columns the sums of columns 0 to 15 and of 16 to 31 are multiplied by
their scales and added to the total, then the sum of the 32 inputs times the group's shift.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.ops.cpu import LANES
from onewave.ops.cpu.math_impl import floats, integers
from onewave.ops.cpu.team_impl import Job, kernel, ordered_kernel
from onewave.ops.linear.loops_impl import direct, over_rooms, unpack
from onewave.ops.linear.packed import FORMATS, PackedRows, PackedWeight

# Up to so many tokens are multiplied straight from the tile's bytes.
_DIRECT_TOKENS = 2

_shifted_tiles, _plain_tiles = over_rooms(shifted=True), over_rooms(shifted=False)


@ordered_kernel
def _shifted_rooms(table_at, first, last):
    _shifted_tiles(table_at, first, last)


@ordered_kernel
def _plain_rooms(table_at, first, last):
    _plain_tiles(table_at, first, last)


# Numba keeps on disk only functions that close over nothing: what is built above becomes part of these.
_q4_0_tiles, _q4_0_blocks = direct("Q4_0"), unpack("Q4_0")
_q4_1_tiles, _q4_1_blocks = direct("Q4_1"), unpack("Q4_1")
_q5_0_tiles, _q5_0_blocks = direct("Q5_0"), unpack("Q5_0")
_q5_1_tiles, _q5_1_blocks = direct("Q5_1"), unpack("Q5_1")
_q8_0_tiles, _q8_0_blocks = direct("Q8_0"), unpack("Q8_0")
_q4_k_tiles, _q4_k_blocks = direct("Q4_K"), unpack("Q4_K")
_q5_k_tiles, _q5_k_blocks = direct("Q5_K"), unpack("Q5_K")
_q6_k_tiles, _q6_k_blocks = direct("Q6_K"), unpack("Q6_K")
_g4z_tiles, _g4z_blocks = direct("G4Z"), unpack("G4Z")
_g8_tiles, _g8_blocks = direct("G8"), unpack("G8")
_gf8_tiles, _gf8_blocks = direct("GF8"), unpack("GF8")
_bf16_tiles, _bf16_blocks = direct("BF16"), unpack("BF16")
_f16_tiles, _f16_blocks = direct("F16"), unpack("F16")
_f32_tiles, _f32_blocks = direct("F32"), unpack("F32")


@ordered_kernel
def _direct_q4_0(table_at, first, last):
    _q4_0_tiles(table_at, first, last)


@ordered_kernel
def _unpack_q4_0(tile, room, blocks):
    _q4_0_blocks(tile, room, blocks)


@ordered_kernel
def _direct_q4_1(table_at, first, last):
    _q4_1_tiles(table_at, first, last)


@ordered_kernel
def _unpack_q4_1(tile, room, blocks):
    _q4_1_blocks(tile, room, blocks)


@ordered_kernel
def _direct_q5_0(table_at, first, last):
    _q5_0_tiles(table_at, first, last)


@ordered_kernel
def _unpack_q5_0(tile, room, blocks):
    _q5_0_blocks(tile, room, blocks)


@ordered_kernel
def _direct_q5_1(table_at, first, last):
    _q5_1_tiles(table_at, first, last)


@ordered_kernel
def _unpack_q5_1(tile, room, blocks):
    _q5_1_blocks(tile, room, blocks)


@ordered_kernel
def _direct_q8_0(table_at, first, last):
    _q8_0_tiles(table_at, first, last)


@ordered_kernel
def _unpack_q8_0(tile, room, blocks):
    _q8_0_blocks(tile, room, blocks)


@ordered_kernel
def _direct_q4_k(table_at, first, last):
    _q4_k_tiles(table_at, first, last)


@ordered_kernel
def _unpack_q4_k(tile, room, blocks):
    _q4_k_blocks(tile, room, blocks)


@ordered_kernel
def _direct_q5_k(table_at, first, last):
    _q5_k_tiles(table_at, first, last)


@ordered_kernel
def _unpack_q5_k(tile, room, blocks):
    _q5_k_blocks(tile, room, blocks)


@ordered_kernel
def _direct_q6_k(table_at, first, last):
    _q6_k_tiles(table_at, first, last)


@ordered_kernel
def _unpack_q6_k(tile, room, blocks):
    _q6_k_blocks(tile, room, blocks)


@ordered_kernel
def _direct_g4z(table_at, first, last):
    _g4z_tiles(table_at, first, last)


@ordered_kernel
def _unpack_g4z(tile, room, blocks):
    _g4z_blocks(tile, room, blocks)


@ordered_kernel
def _direct_g8(table_at, first, last):
    _g8_tiles(table_at, first, last)


@ordered_kernel
def _unpack_g8(tile, room, blocks):
    _g8_blocks(tile, room, blocks)


@ordered_kernel
def _direct_gf8(table_at, first, last):
    _gf8_tiles(table_at, first, last)


@ordered_kernel
def _unpack_gf8(tile, room, blocks):
    _gf8_blocks(tile, room, blocks)


@ordered_kernel
def _direct_bf16(table_at, first, last):
    _bf16_tiles(table_at, first, last)


@ordered_kernel
def _unpack_bf16(tile, room, blocks):
    _bf16_blocks(tile, room, blocks)


@ordered_kernel
def _direct_f16(table_at, first, last):
    _f16_tiles(table_at, first, last)


@ordered_kernel
def _unpack_f16(tile, room, blocks):
    _f16_blocks(tile, room, blocks)


@ordered_kernel
def _direct_f32(table_at, first, last):
    _f32_tiles(table_at, first, last)


@ordered_kernel
def _unpack_f32(tile, room, blocks):
    _f32_blocks(tile, room, blocks)


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


# What multiplies one or two tokens, and what unpacks, by format.
_KERNELS = {
    "Q4_0": (_direct_q4_0, _unpack_q4_0),
    "Q4_1": (_direct_q4_1, _unpack_q4_1),
    "Q5_0": (_direct_q5_0, _unpack_q5_0),
    "Q5_1": (_direct_q5_1, _unpack_q5_1),
    "Q8_0": (_direct_q8_0, _unpack_q8_0),
    "Q4_K": (_direct_q4_k, _unpack_q4_k),
    "Q5_K": (_direct_q5_k, _unpack_q5_k),
    "Q6_K": (_direct_q6_k, _unpack_q6_k),
    "G4Z": (_direct_g4z, _unpack_g4z),
    "G8": (_direct_g8, _unpack_g8),
    "GF8": (_direct_gf8, _unpack_gf8),
    "BF16": (_direct_bf16, _unpack_bf16),
    "F16": (_direct_f16, _unpack_f16),
    "F32": (_direct_f32, _unpack_f32),
}


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """x W^T. x: [tokens, cols] float32. Returns [tokens, rows] float32."""
    width = weight.padded_rows
    out = torch.empty((x.shape[0], width), dtype=torch.float32)
    at = out.data_ptr()
    for piece in weight.pieces:
        product = Product(_inputs(x, piece), piece, at, width)
        for job in product.jobs:
            job.run()
        at += 4 * LANES * piece.tiles
    if width == weight.rows:
        return out
    parts = out.split([piece.tiles * LANES for piece in weight.pieces], dim=1)
    return torch.cat([part[:, : piece.rows] for piece, part in zip(weight.pieces, parts, strict=True)], dim=1)


def reads_plain(weight: PackedWeight) -> bool:
    """Whether products() takes a weight: no row or column is padding, and inputs stand in order."""
    return weight.padded_rows == weight.rows and all(
        piece.columns is None and piece.blocks * FORMATS[piece.kind].columns == piece.cols for piece in weight.pieces
    )


def products(x: Tensor, weight: PackedWeight, out: Tensor) -> list[Product]:
    """The products that make out = x W^T, contiguous float32, of a weight that reads_plain."""
    starts = accumulate((4 * LANES * piece.tiles for piece in weight.pieces), initial=out.data_ptr())
    return [Product(x, piece, at, weight.rows) for piece, at in zip(weight.pieces, starts, strict=False)]


def _inputs(x: Tensor, piece: PackedRows) -> Tensor:
    """What a piece multiplies, contiguous."""
    columns = piece.blocks * FORMATS[piece.kind].columns
    if columns != x.shape[1]:
        x = F.pad(x, (0, columns - x.shape[1]))
    return x.contiguous() if piece.columns is None else x[:, piece.columns]


class Product:
    """Jobs that write x W^T of one piece to the address `out`, in rows of `width` floats. Keeps what they read."""

    def __init__(self, x: Tensor, piece: PackedRows, out: int, width: int):
        form, tokens, blocks = FORMATS[piece.kind], x.shape[0], piece.blocks
        self.jobs: list[Job] = []
        self.kept = [x]
        x_at, sums_at = x.data_ptr(), 0
        if form.shifted:
            # The shift of a group multiplies the sum of its 32 inputs, taken once here for all rows.
            groups = blocks * form.groups
            sums = torch.empty((tokens, groups), dtype=torch.float32)
            self.kept.append(sums)
            sums_at = sums.data_ptr()
            self.jobs.append(Job(_block_sums, tokens, (x_at, sums_at, groups), alone=tokens < 16))
        few, unpacks = _KERNELS[piece.kind]
        arguments = (piece.address, x_at, sums_at, out, blocks, tokens, width)
        if tokens <= _DIRECT_TOKENS:
            self.jobs.append(Job(few, piece.tiles, arguments))
        else:
            rooms = _shifted_rooms if form.shifted else _plain_rooms
            unpacking = (unpacks.address, form.block_bytes, form.groups)
            self.jobs.append(Job(rooms, piece.tiles, (*arguments, *unpacking)))
