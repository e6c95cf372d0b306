"""Weights in the order in which the wave's blocks use them: one stream of 16 KiB tiles, dealt out worker by worker."""

# pyright: reportUnknownMemberType=false
# (torch.from_numpy and tolist are only partly annotated.)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.wave.layout import TILE_BYTES, TileShape
from onewave.wave.program import WaveProgram

__all__ = ["Weight", "pack_stream", "tile_images"]

# Bytes that packing holds beside the weights and the stream at any time.
_WORKING_BYTES = 256 << 20


def tile_images(rows: Tensor, shape: TileShape) -> Tensor:
    """Whole row blocks of a matrix as images of operand A. rows: [blocks * shape.rows, cols] 16-bit.

    Returns [blocks * tiles, 8192]: tile by tile along a row block, columns padded with zeros to whole tiles. An image
    is [2 halves of a column group, 64 rows, 64 columns]; row q * shape.rows + r is row r, column group q.
    """
    count, cols = rows.shape
    tiles = -(-cols // shape.cols)
    if tiles * shape.cols != cols:
        rows = torch.nn.functional.pad(rows, (0, tiles * shape.cols - cols))
    cut = rows.view(count // shape.rows, shape.rows, tiles, shape.quarters, 2, 64)
    return cut.permute(0, 2, 4, 3, 1, 5).reshape(-1, TILE_BYTES // 2)


@dataclass(frozen=True)
class Weight:
    """A matrix of a program: [rows, cols] 16-bit, or several of one shape whose rows take turns.

    gain: [cols], multiplied into the columns in float32 and rounded once (the gain of the norm before the product).
    """

    matrices: tuple[Tensor, ...]
    gain: Tensor | None = None

    def block(self, first: int, last: int, device: torch.device) -> Tensor:
        """Rows first to last of the whole, zeros beyond its end. Both are multiples of the number of matrices."""
        count = len(self.matrices)
        cut = torch.stack([matrix[first // count : last // count].to(device) for matrix in self.matrices], dim=1)
        cut = cut.reshape(-1, cut.shape[-1])
        if self.gain is not None:
            cut = (cut.float() * self.gain.to(device).float()).to(cut.dtype)
        missing = last - first - len(cut)
        return torch.nn.functional.pad(cut, (0, 0, 0, missing)) if missing else cut


def pack_stream(
    program: WaveProgram,
    weights: Mapping[str, Weight],
    device: torch.device,
    *,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Pack all matrices of a program: [stream tiles * 128, 64] of their dtype on `device`.

    The matrices may lie on another device; beside them and the stream about 256 MiB is held. progress: told the tiles
    done so far. Tiles that no worker reads (the shorter lanes' ends) stay zero. Raises ShapeError.
    """
    dtype = next(iter(weights.values())).matrices[0].dtype
    stream = torch.zeros(program.stream_tiles, TILE_BYTES // 2, dtype=dtype, device=device)
    done = 0
    for name, entries in program.stream.items():
        weight = weights[name]
        first = weight.matrices[0]
        if any(matrix.shape != first.shape or matrix.dtype is not dtype for matrix in weight.matrices):
            raise ShapeError(f"weight {name!r}", got="matrices that differ", allowed="one shape and dtype")
        step, tiles = program.shape.rows, -(-first.shape[1] // program.shape.cols)
        blocks = -(-first.shape[0] * len(weight.matrices) // step)
        most = max(1, _WORKING_BYTES // (6 * tiles * TILE_BYTES))
        wanted = torch.from_numpy(entries)
        numbers = wanted[:, 0] * tiles + wanted[:, 1]
        order = torch.argsort(numbers)
        source, target = numbers[order], wanted[:, 2][order]
        for block in range(0, blocks, most):
            end = min(blocks, block + most)
            low, high = (int(torch.searchsorted(source, row * tiles)) for row in (block, end))
            if low == high:
                continue
            images = tile_images(weight.block(block * step, end * step, device), program.shape)
            stream.index_copy_(0, target[low:high].to(device), images[(source[low:high] - block * tiles).to(device)])
            done += high - low
            if progress is not None:
                progress(done)
    return stream.view(-1, 64)
