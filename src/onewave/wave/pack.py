"""Weights in the order in which the wave's blocks use them: one stream of 16 KiB tiles, dealt out worker by worker."""

# pyright: reportUnknownMemberType=false
# (torch.from_numpy and tolist are only partly annotated.)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.wave.layout import TILE_BYTES, TileShape
from onewave.wave.program import WaveProgram

__all__ = ["pack_stream", "tile_images"]

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


def pack_stream(
    program: WaveProgram,
    weights: Mapping[str, Sequence[Tensor]],
    device: torch.device,
    *,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Pack all matrices of a program: [stream tiles * 128, 64] of their dtype on `device`.

    weights: name -> one matrix [rows, cols] 16-bit, or two of one shape whose rows alternate. They may lie on another
    device; beside them and the stream at most 256 MiB is held. progress: told the tiles done so far. Tiles that no
    worker reads (the shorter lanes' ends) stay zero. Raises ShapeError.
    """
    dtype = next(iter(weights.values()))[0].dtype
    stream = torch.zeros(program.stream_tiles, TILE_BYTES // 2, dtype=dtype, device=device)
    done = 0
    for name, entries in program.stream.items():
        matrices = weights[name]
        rows, cols = matrices[0].shape
        rows *= len(matrices)
        if any(matrix.shape != matrices[0].shape or matrix.dtype is not dtype for matrix in matrices):
            raise ShapeError(f"weight {name!r}", got="matrices that differ", allowed="one shape and dtype")
        step = program.shape.rows
        tiles = -(-cols // program.shape.cols)
        most = max(1, _WORKING_BYTES // (4 * tiles * TILE_BYTES))
        wanted = torch.from_numpy(entries)
        order = torch.argsort(wanted[:, 0] * tiles + wanted[:, 1])
        source = (wanted[:, 0] * tiles + wanted[:, 1])[order]
        target = wanted[:, 2][order]
        for block in range(0, rows // step, most):
            end = min(rows // step, block + most)
            low, high = (int(torch.searchsorted(source, row * tiles)) for row in (block, end))
            if low == high:
                continue
            part = slice(block * step // len(matrices), end * step // len(matrices))
            cut = torch.stack([matrix[part].to(device) for matrix in matrices], dim=1).reshape(-1, cols)
            images = tile_images(cut, program.shape)
            stream.index_copy_(0, target[low:high].to(device), images[(source[low:high] - block * tiles).to(device)])
            done += high - low
            if progress is not None:
                progress(done)
    return stream.view(-1, 64)
