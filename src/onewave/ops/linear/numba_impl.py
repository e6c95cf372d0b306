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
from onewave.ops.cpu.team_impl import Job, kernel
from onewave.ops.linear.loops_impl import direct, over_rooms, unpack
from onewave.ops.linear.packed import FORMATS, PackedRows, PackedWeight

# Up to so many tokens are multiplied straight from the tile's bytes.
_DIRECT_TOKENS = 2


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


# Loops that multiply one or two tokens, and that unpack, by format; those that multiply rooms with more, by shifted.
_DIRECT, _UNPACK = ({kind: build(kind) for kind in FORMATS} for build in (direct, unpack))
_ROOMS = {shifted: over_rooms(shifted=shifted) for shifted in (False, True)}


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
    """The columns of x that a piece multiplies, contiguous."""
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
        arguments = (piece.address, x_at, sums_at, out, blocks, tokens, width)
        if tokens <= _DIRECT_TOKENS:
            self.jobs.append(Job(_DIRECT[piece.kind], piece.tiles, arguments))
        else:
            unpacking = (_UNPACK[piece.kind].address, form.block_bytes, form.groups)
            self.jobs.append(Job(_ROOMS[form.shifted], piece.tiles, (*arguments, *unpacking)))
