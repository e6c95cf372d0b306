"""One-byte weights with a scale a row: a tile is one or two images of 8 KiB (rounding.py)."""

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
        images = unpaired(tiles.images.view(-1, 8192), self._rounding)
        made = rows_of(operands_of_threads(images), cols, self.shape)
        return restore_rows(made, tiles.scales, self._rounding, self.dtype)

    def expected(self, rows: Tensor) -> Tensor:
        return restore_rows(*round_rows(rows, self._rounding), self._rounding, self.dtype)

    def unpack(self, tiles: Tiles, places: Tensor, part: UnpackedRows) -> None:
        from onewave.wave.weights.pack_impl import unpack_bytes

        unpack_bytes(tiles, places, part, self.shape, self._rounding.number)


def byte_images(made: Tensor, shape: TileShape, rounding: RowRounding) -> Tensor:
    """Lay out whole row blocks as tiles of operand A. made: uint8 [blocks * shape.rows, cols], from round_rows.

    Returns uint8 [blocks * tiles, shape.images * 8192]: tile by tile along a row block, columns padded with zeros to
    whole tiles. An image's values are in the order of place_in_image; two in sequence are a pair (see paired).
    """
    images = bytes_of_threads(operands_of(padded(made, shape), shape))
    return paired(images.view(-1, shape.images * 8192), rounding)
