"""Weights kept in the checkpoint's own number format for the CPU kernels.

Sixteen rows make a tile, 32 columns a block. A tile's block is contiguous: first the 16 rows' scales, then the 32
columns with the 16 rows side by side, so that one SIMD lane works on one row and a weight is read exactly once, in
order:

    format   bytes a block of a tile
    Q4_1     d[16] fp16, m[16] fp16, then 16 x 16 bytes: column j in the low nibble, column j + 16 in the high one
    Q4_0     d[16] fp16, then the nibbles as above; value d * (q - 8)
    Q8_0     d[16] fp16, then 32 x 16 int8
    BF16/F16 32 x 16 two-byte floats
    F32      32 x 16 floats

Rows beyond the last and columns beyond the last are zero. No format is re-quantised: the values are the file's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.base.quantized import QuantizedRows, dequantize_rows

LANES = 16
_HALF_EXPONENT = 0x7C00  # all ones in infinity and NaN
BLOCK = 32


@dataclass(frozen=True)
class Format:
    """Layout of one number format. scale_bytes: per row and block, in front. value_bits: per weight."""

    scale_bytes: int
    value_bits: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one tile."""
        return LANES * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one block of one row, as GGUF files store it."""
        return self.scale_bytes + BLOCK * self.value_bits // 8

    @property
    def parts(self) -> list[tuple[int, int, str]]:
        """The runs of numbers in one block of one row: (first byte, end byte, NumPy type that moves one number)."""
        values = (self.scale_bytes, self.row_bytes, f"<u{max(1, self.value_bits // 8)}")
        return [(0, self.scale_bytes, "<u2"), values] if self.scale_bytes else [values]


FORMATS = {
    "Q4_0": Format(scale_bytes=2, value_bits=4),
    "Q4_1": Format(scale_bytes=4, value_bits=4),
    "Q8_0": Format(scale_bytes=2, value_bits=8),
    "BF16": Format(scale_bytes=0, value_bits=16),
    "F16": Format(scale_bytes=0, value_bits=16),
    "F32": Format(scale_bytes=0, value_bits=32),
}
_DENSE = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class PackedWeight:
    """A [rows, cols] matrix in tiles. data: uint8 [tiles, blocks, bytes of a block], CPU, contiguous."""

    kind: str
    rows: int
    cols: int
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """Return the chosen rows (int64 [n]; all when None) as float32 [n, cols]."""
        index = np.arange(self.rows) if rows is None else rows.numpy()
        values = dequantize_rows(_untile(self.data.numpy(), FORMATS[self.kind], index), self.kind)
        return torch.as_tensor(np.ascontiguousarray(values[:, : self.cols]))


def can_pack(kind: str) -> bool:
    """Whether the CPU kernels read this format as it is."""
    return kind in FORMATS


def has_finite_scales(stored: QuantizedRows) -> bool:
    """Whether each block's scale and offset are finite numbers; of a format that `pack` takes."""
    form = FORMATS[stored.qtype]
    if not form.scale_bytes:
        return True
    scales = stored.data.reshape(-1, form.row_bytes)[:, : form.scale_bytes].view("<u2")
    return not bool(((scales & _HALF_EXPONENT) == _HALF_EXPONENT).any())


def pack(stored: QuantizedRows) -> PackedWeight:
    """Tile the rows of a GGUF tensor.

    One row's blocks lie one after another, as in the file; cols is a multiple of 32 for block formats.
    Raises UnsupportedError, ShapeError.
    """
    kind, data = stored.qtype, stored.data
    if kind not in FORMATS:
        raise UnsupportedError("packing a weight", got=f"format {kind}", allowed=", ".join(FORMATS))
    form = FORMATS[kind]
    rows, cols = stored.shape
    if not form.scale_bytes:
        width = form.value_bits // 8
        if data.shape != (rows, cols * width):
            raise ShapeError(f"packing {kind}", got=str(data.shape), allowed=str((rows, cols * width)))
        columns = -(-cols // BLOCK) * BLOCK
        padded = np.zeros((rows, columns * width), np.uint8) if columns != cols else data
        if columns != cols:
            padded[:, : data.shape[1]] = data
        data = padded
    elif data.shape != (rows, cols // BLOCK * form.row_bytes) or cols % BLOCK:
        raise ShapeError(f"packing {kind}", got=str(data.shape), allowed=f"({rows}, {cols} / 32 * {form.row_bytes})")
    return PackedWeight(kind, rows, cols, torch.as_tensor(_tile(data, form)))


def _tile(data: NDArray[np.uint8], form: Format) -> NDArray[np.uint8]:
    """Rows of blocks, uint8 [rows, blocks * row_bytes] -> uint8 [tiles, blocks, LANES * row_bytes].

    Two transposing copies, which release the interpreter's lock: several weights can be tiled at once.
    """
    rows, row_bytes = data.shape[0], form.row_bytes
    tiles, blocks = -(-rows // LANES), data.shape[1] // row_bytes
    if rows % LANES:
        padded = np.zeros((tiles * LANES, data.shape[1]), np.uint8)
        padded[:rows] = data
        data = padded
    stored = np.ascontiguousarray(data).reshape(tiles, LANES, blocks, row_bytes)
    out = np.empty((tiles, blocks, LANES * row_bytes), np.uint8)
    for start, end, unit in form.parts:
        source = stored[..., start:end].view(unit)
        target = out[..., LANES * start : LANES * end].view(unit)
        target.reshape(tiles, blocks, -1, LANES)[...] = source.transpose(0, 2, 3, 1)
    return out


def _untile(data: NDArray[np.uint8], form: Format, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Undo _tile for the chosen rows: int64 [n] -> uint8 [n, blocks * row_bytes]."""
    tiles, blocks = data.shape[:2]
    tile, lane = rows // LANES, rows % LANES
    out = np.empty((len(rows), blocks, form.row_bytes), np.uint8)
    for start, end, unit in form.parts:
        source = data[..., LANES * start : LANES * end].view(unit).reshape(tiles, blocks, -1, LANES)
        out[..., start:end].view(unit)[...] = source[tile, :, :, lane]
    return out.reshape(len(rows), -1)


def pack_dense(weight: Tensor) -> PackedWeight:
    """Tile a [rows, cols] bf16, fp16 or fp32 CPU tensor without changing a bit of it."""
    if weight.dtype not in _DENSE or weight.ndim != 2:
        raise UnsupportedError(
            "packing a weight", got=f"{weight.dtype} {tuple(weight.shape)}", allowed="2-D bf16|fp16|fp32"
        )
    data = weight.contiguous().view(torch.uint8).numpy()
    return pack(QuantizedRows(_DENSE[weight.dtype], data, (weight.shape[0], weight.shape[1])))
