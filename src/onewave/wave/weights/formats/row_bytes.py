"""One-byte weights with a scale a row: a tile is one or two images of 8 KiB (rounding.py).

For products with digits, of one sequence, whose tiles have 8 rows, an image is int8 numbers as they are, in the order
of bytes_of_registers.
"""

import torch
from torch import Tensor

from onewave.base.rounding import restore_rows, round_rows
from onewave.base.weight_formats import RowRounding
from onewave.wave.plan.layout import TileShape
from onewave.wave.weights.formats.tile_format import TileFormat, Tiles, UnpackedRows, operands_of, padded, rows_of
from onewave.wave.weights.rounding import bytes_of_threads, operands_of_threads, paired, unpaired


class ByteTiles(TileFormat):
    """int8 or fp8."""

    working_bytes = 20  # in float32 and a few copies
    wide = True

    def __init__(self, form: RowRounding, shape: TileShape, dtype: torch.dtype):
        super().__init__(form, shape, dtype)
        assert shape.rows > 8 or shape.batch == 1, "tiles of 8 rows are one sequence's"
        self._rounding, self.product = form, form.number

    def pack(self, rows: Tensor) -> Tiles:
        made, scales = round_rows(rows, self._rounding)
        return Tiles(byte_images(made, self.shape, self._rounding), scales)

    def pack_by_kernel(self, into: Tiles, places: Tensor, matrices: tuple[Tensor, ...], gain: Tensor | None) -> bool:
        from onewave.wave.weights.round_impl import pack_bytes

        pack_bytes(into, places, matrices, gain, self.shape, self._rounding)
        return True

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        assert tiles.scales is not None
        images = tiles.images.view(-1, 8192)
        if is_whole(self.shape, self._rounding):
            operands = operands_of_registers(images)
        else:
            operands = operands_of_threads(unpaired(images, self._rounding))
        made = rows_of(operands, cols, self.shape)
        return restore_rows(made, tiles.scales, self._rounding, self.dtype)

    def expected(self, rows: Tensor) -> Tensor:
        return restore_rows(*round_rows(rows, self._rounding), self._rounding, self.dtype)

    def unpack(self, tiles: Tiles, places: Tensor, part: UnpackedRows) -> None:
        from onewave.wave.weights.pack_impl import unpack_bytes

        unpack_bytes(tiles, places, part, self.shape, self._rounding.number)


def byte_images(made: Tensor, shape: TileShape, rounding: RowRounding) -> Tensor:
    """Lay out whole row blocks as tiles of operand A. made: uint8 [blocks * shape.rows, cols], from round_rows.

    Returns uint8 [blocks * tiles, shape.images * 8192]: tile by tile along a row block, columns padded with zeros to
    whole tiles. An image's values are in the order of place_in_image, two in sequence a pair (see paired), or of
    bytes_of_registers.
    """
    operands = operands_of(padded(made, shape), shape)
    if is_whole(shape, rounding):
        return bytes_of_registers(operands).view(-1, shape.images * 8192)
    return paired(bytes_of_threads(operands).view(-1, shape.images * 8192), rounding)


def is_whole(shape: TileShape, rounding: RowRounding) -> bool:
    """Whether tiles have whole bytes, as words.whole_bytes says."""
    return rounding.name == "int8" and shape.rows == 8


def bytes_of_registers(operands: Tensor) -> Tensor:
    """Reorder operands A, uint8 [images, 64, 128], by the threads that use them: [images, 8192].

    Slowest first: 32 columns, 16 rows, row in 8, pair of columns in 8, 8 columns in 16, half of 16 rows, column of a
    pair, 16 columns. So a thread's 16 bytes are its registers of an m16n8k32 product's A, in their order.
    """
    # [16 rows, half of them, row in 8, 32 columns, 16 of them, 8 of them, pair, column]
    cut = operands.view(-1, 4, 2, 8, 4, 2, 2, 4, 2)
    return cut.permute(0, 4, 1, 3, 7, 6, 2, 8, 5).reshape(-1, 8192)


def operands_of_registers(images: Tensor) -> Tensor:
    """Undo bytes_of_registers: uint8 [images, 64, 128]."""
    return images.view(-1, 4, 4, 8, 4, 2, 2, 2, 2).permute(0, 2, 6, 3, 1, 8, 5, 4, 7).reshape(-1, 64, 128)
