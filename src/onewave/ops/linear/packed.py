"""Weights kept in the checkpoint's own number format for the CPU kernels.

Sixteen rows make a tile, and a block is what the format makes it: 32 or 256 columns. A tile's block is contiguous: the
numbers of the file's block one after another, each for the 16 rows side by side, so that one SIMD lane works on one row
and a weight is read exactly once, in order:

    format     bytes a block of a tile
    Q4_0       d[16] fp16, then 16 x 16 bytes: column j in the low nibble, column j + 16 in the high one
    Q4_1       d[16], m[16] fp16, then nibbles
    Q5_0/Q5_1  d[16] (and m[16]) fp16, 32 x 16 fifth bits, then nibbles
    Q8_0       d[16] fp16, then 32 x 16 int8
    Q4_K/Q5_K  d[16], m[16] fp16, 12 x 16 bytes of six-bit steps, Q5_K's 32 x 16 bytes of fifth bits, 128 x 16 bytes
    Q6_K       d[16] fp16, 16 x 16 int8 steps, 16 times 8 x 16 bytes of nibbles and 4 x 16 of their pairs of bits
    G4Z        d[16] fp16, 16 zero points, then nibbles
    G8/GF8     d[16] (G8: and m[16]) float32, then 32 x 16 int8 or e4m3 (base/own_blocks.py)
    BF16/F16   32 x 16 two-byte floats
    F32        32 x 16 floats

Rows beyond the last and columns beyond the last are zero. No format is re-quantised: the values are the file's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.base.grouped import in_order
from onewave.base.quantized import QuantizedRows, dequantize_rows
from onewave.ops.cpu import LANES

BLOCK = 32
"""Columns of a group, the unit of the kernels' sums."""
BITS = "bits"
_HALF_EXPONENT = 0x7C00  # all ones in infinity and NaN


@dataclass(frozen=True)
class Format:
    """Layout of one number format.

    columns: of a block. runs: the numbers of one block of one row, each (how many, NumPy type that moves one; BITS:
    words whose bits are moved one by one).
    halves: bytes of a row's block at which its fp16 numbers stand. shifted: whether a group has an offset. order: the
    file's bytes in the order in which the kernel reads them, and to which runs refer, where the file has another.
    """

    columns: int
    runs: tuple[tuple[int, str], ...]
    halves: tuple[int, ...] = ()
    shifted: bool = False
    order: tuple[int, ...] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether each number stands for itself, so that rows of any width can be filled up."""
        return len(self.runs) == 1

    @cached_property
    def groups(self) -> int:
        """Groups of 32 columns in a block."""
        return self.columns // BLOCK

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block of one tile."""
        return LANES * self.row_bytes

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one block of one row, as files store it."""
        return self.parts[-1][1]

    @property
    def parts(self) -> list[tuple[int, int, str]]:
        """The runs as (first byte, end byte, type)."""
        sizes = (count * (4 if unit is BITS else np.dtype(unit).itemsize) for count, unit in self.runs)
        ends = list(accumulate(sizes))
        return [(start, end, unit) for start, end, (_, unit) in zip([0, *ends], ends, self.runs, strict=False)]


def _sixes() -> tuple[int, ...]:
    """Q6_K's bytes: the scale, the steps, then for every four columns of a quarter what the kernel puts together.

    In the file's order a matrix that comes from memory takes more than twice as long (observed): the three streams of a
    block escape the prefetchers.
    """
    starts = (
        start
        for half in range(2)
        for first in range(0, 32, 4)
        for start in (64 * half + first, 64 * half + 32 + first, 128 + 32 * half + first)
    )
    return (208, 209, *range(192, 208), *(byte for start in starts for byte in range(start, start + 4)))


FORMATS = {
    "Q4_0": Format(32, ((1, "<u2"), (16, "u1")), (0,)),
    "Q4_1": Format(32, ((2, "<u2"), (16, "u1")), (0, 2), shifted=True),
    "Q5_0": Format(32, ((1, "<u2"), (1, BITS), (16, "u1")), (0,)),
    "Q5_1": Format(32, ((2, "<u2"), (1, BITS), (16, "u1")), (0, 2), shifted=True),
    "Q8_0": Format(32, ((1, "<u2"), (32, "u1")), (0,)),
    "Q4_K": Format(256, ((2, "<u2"), (140, "u1")), (0, 2), shifted=True),
    "Q5_K": Format(256, ((2, "<u2"), (172, "u1")), (0, 2), shifted=True),
    "Q6_K": Format(256, ((1, "<u2"), (208, "u1")), (208,), order=_sixes()),
    "G4Z": Format(32, ((1, "<u2"), (17, "u1")), (0,), shifted=True),
    "G8": Format(32, ((2, "<u4"), (32, "u1")), shifted=True),
    "GF8": Format(32, ((1, "<u4"), (32, "u1"))),
    "BF16": Format(32, ((32, "<u2"),)),
    "F16": Format(32, ((32, "<u2"),)),
    "F32": Format(32, ((32, "<u4"),)),
}
_DENSE = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class PackedRows:
    """A [rows, cols] matrix of one format in tiles. data: uint8 [tiles, blocks, bytes of a block], CPU, contiguous.
    columns: as of QuantizedRows, int64 [cols]: the inputs are brought into that order first."""

    kind: str
    rows: int
    cols: int
    data: Tensor
    columns: Tensor | None = None

    @cached_property
    def tiles(self) -> int:
        return self.data.shape[0]

    @cached_property
    def blocks(self) -> int:
        """Blocks of a tile."""
        return self.data.shape[1]

    @cached_property
    def address(self) -> int:
        return self.data.data_ptr()

    def dequantize(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the chosen rows, int64 [n], as float32 [n, cols]."""
        values = dequantize_rows(_untile(self.data.numpy(), FORMATS[self.kind], rows), self.kind)
        return in_order(values[:, : self.cols], None if self.columns is None else self.columns.numpy())


@dataclass(frozen=True)
class PackedWeight:
    """A matrix of pieces, rows below rows, each in its own format."""

    pieces: tuple[PackedRows, ...]

    @cached_property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @cached_property
    def padded_rows(self) -> int:
        """Rows with those that fill up the pieces' last tiles."""
        return sum(piece.tiles for piece in self.pieces) * LANES

    @cached_property
    def cols(self) -> int:
        return self.pieces[0].cols

    @cached_property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def nbytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.pieces)

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """Return the chosen rows (int64 [n]; all when None) as float32 [n, cols]."""
        index = np.arange(self.rows) if rows is None else rows.numpy()
        out = np.empty((len(index), self.cols), np.float32)
        first = 0
        for piece in self.pieces:
            own = (index >= first) & (index < first + piece.rows)
            out[own] = piece.dequantize(index[own] - first)
            first += piece.rows
        return torch.as_tensor(out)


def can_pack(kind: str) -> bool:
    """Whether the CPU kernels read this format as it is."""
    return kind in FORMATS


def has_finite_scales(stored: QuantizedRows) -> bool:
    """Whether each block's fp16 numbers are finite; of a format that `pack` takes."""
    form = FORMATS[stored.qtype]
    blocks = stored.data.reshape(-1, form.row_bytes)
    halves = (np.ascontiguousarray(blocks[:, byte : byte + 2]).view("<u2") for byte in form.halves)
    return not any(bool(((half & _HALF_EXPONENT) == _HALF_EXPONENT).any()) for half in halves)


def pack(stored: QuantizedRows) -> PackedWeight:
    """Tile the rows of a GGUF tensor.

    One row's blocks lie one after another, as in the file; cols is a multiple of a block's for block formats.
    Raises UnsupportedError, ShapeError.
    """
    kind, data = stored.qtype, stored.data
    if kind not in FORMATS:
        raise UnsupportedError("packing a weight", got=f"format {kind}", allowed=", ".join(FORMATS))
    form = FORMATS[kind]
    rows, cols = stored.shape
    blocks = -(-cols // form.columns)
    if not form.is_dense:
        if data.shape != (rows, blocks * form.row_bytes) or cols % form.columns:
            allowed = f"({rows}, {cols} / {form.columns} * {form.row_bytes})"
            raise ShapeError(f"packing {kind}", got=str(data.shape), allowed=allowed)
    else:
        width = form.row_bytes // form.columns
        if data.shape != (rows, cols * width):
            raise ShapeError(f"packing {kind}", got=str(data.shape), allowed=str((rows, cols * width)))
        if cols % form.columns:
            padded = np.zeros((rows, blocks * form.row_bytes), np.uint8)
            padded[:, : data.shape[1]] = data
            data = padded
    columns = None if stored.columns is None else torch.as_tensor(stored.columns)
    return PackedWeight((PackedRows(kind, rows, cols, torch.as_tensor(_tile(data, form)), columns),))


def stack(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Put packed matrices of one width below one another."""
    return PackedWeight(tuple(piece for weight in weights for piece in weight.pieces))


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
    if form.order is not None:
        stored = np.take(stored, form.order, axis=-1)
    out = np.empty((tiles, blocks, LANES * row_bytes), np.uint8)
    for start, end, unit in form.parts:
        source, target = stored[..., start:end], out[..., LANES * start : LANES * end]
        if unit is BITS:
            bits = _unpacked(source).transpose(0, 2, 3, 1)
            target[...] = np.packbits(bits, axis=None, bitorder="little").reshape(target.shape)
            continue
        source, target = source.view(unit), target.view(unit)
        target.reshape(tiles, blocks, -1, LANES)[...] = source.transpose(0, 2, 3, 1)
    return out


def _untile(data: NDArray[np.uint8], form: Format, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Undo _tile for the chosen rows: int64 [n] -> uint8 [n, blocks * row_bytes]."""
    tiles, blocks = data.shape[:2]
    tile, lane = rows // LANES, rows % LANES
    out = np.empty((len(rows), blocks, form.row_bytes), np.uint8)
    for start, end, unit in form.parts:
        source = data[..., LANES * start : LANES * end]
        if unit is BITS:
            bits = _unpacked(source).reshape(tiles, blocks, -1, LANES)[tile, :, :, lane]
            out[..., start:end] = np.packbits(bits, axis=None, bitorder="little").reshape(len(rows), blocks, -1)
            continue
        source = source.view(unit).reshape(tiles, blocks, -1, LANES)
        out[..., start:end].view(unit)[...] = source[tile, :, :, lane]
    if form.order is not None:
        stored = np.empty_like(out)
        stored[..., form.order] = out
        out = stored
    return out.reshape(len(rows), -1)


def _unpacked(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bits of bytes along the last axis, one a byte."""
    flat = np.unpackbits(np.ascontiguousarray(data).reshape(-1), bitorder="little")
    return flat.reshape(*data.shape[:-1], 8 * data.shape[-1])


def pack_dense(weight: Tensor) -> PackedWeight:
    """Tile a [rows, cols] bf16, fp16 or fp32 CPU tensor without changing a bit of it."""
    if weight.dtype not in _DENSE or weight.ndim != 2:
        raise UnsupportedError(
            "packing a weight", got=f"{weight.dtype} {tuple(weight.shape)}", allowed="2-D bf16|fp16|fp32"
        )
    data = weight.contiguous().view(torch.uint8).numpy()
    return pack(QuantizedRows(_DENSE[weight.dtype], data, (weight.shape[0], weight.shape[1])))
