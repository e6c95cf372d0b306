"""8-bit and 16-bit weights beside 4-bit ones, in tiles of as many bytes, as widen/wide.py reads them.

8 bits: half as many images of 8 KiB, then their scales in the order of group_nibbles.py. 16 bits: a quarter as many
images of 16 KiB; what lies beside them is unused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onewave.base.group_rounding import GroupedRows, restore_groups, round_bytes
from onewave.base.weight_formats import ROW_ROUNDINGS, MixedFormat
from onewave.wave.plan.layout import TILE_VALUES, TileShape
from onewave.wave.weights.formats.group_nibbles import beside_images, numbers_of
from onewave.wave.weights.formats.tile_format import TileFormat, Tiles, operands_of, padded, rows_of
from onewave.wave.weights.rounding import bytes_of_threads, paired, place_in_image, unpaired

if TYPE_CHECKING:
    from onewave.wave.weights.pack_impl import UnpackedRows

_E4M3 = ROW_ROUNDINGS["fp8"]


class WideTiles(TileFormat):
    """Eight bits a weight, 128 for zero, with a scale a group."""

    working_bytes = 20
    wide = True

    def __init__(self, form: MixedFormat, shape: TileShape, dtype: torch.dtype):
        super().__init__(form, shape, dtype)
        self._group, self._number = form.wide_group, torch.float32 if form.wide_number == 4 else torch.float16

    def pack(self, rows: Tensor) -> Tiles:
        return self.pack_groups(round_bytes(rows, self._group, self._number))

    def pack_groups(self, rows: GroupedRows) -> Tiles:
        """Lay out rows that are rounded already."""
        codes = padded(rows.codes, self.shape, 128)
        images = bytes_of_threads(operands_of(codes, self.shape)).view(-1, TILE_VALUES * self.shape.images)
        beside = beside_images(rows.scales, self._group, self.shape)
        return Tiles(torch.cat((images, beside.view(len(images), -1)), dim=1), rows.row_scales)

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        assert tiles.scales is not None
        values = TILE_VALUES * self.shape.images
        row = torch.arange(64, device=tiles.images.device)[:, None]
        at = place_in_image(row, torch.arange(128, device=tiles.images.device)[None, :])
        codes = rows_of(tiles.images[:, :values].reshape(-1, TILE_VALUES)[:, at], cols, self.shape)
        numbers = tiles.images[:, values:].reshape(-1, 1, self.shape.tile_bytes // self.shape.images - TILE_VALUES)
        scales = numbers_of(numbers.contiguous().view(self._number)[:, 0], cols, self._group, self.shape)
        return self.restore_groups(GroupedRows(codes, scales, None, tiles.scales))

    def restore_groups(self, rows: GroupedRows) -> Tensor:
        return restore_groups(rows, self._group, self.dtype, zero=128)

    def expected(self, rows: Tensor) -> Tensor:
        return self.restore_groups(round_bytes(rows, self._group, self._number))

    def unpack(self, tiles: Tiles, places: Tensor, part: UnpackedRows) -> None:
        from onewave.wave.weights.pack_impl import unpack_wide

        unpack_wide(tiles, places, part, self.shape, self._group, self._number)


class FloatTiles(TileFormat):
    """e4m3 numbers, in pairs as row_bytes.py has them, with a float32 scale for 128 columns."""

    working_bytes = 20

    def pack_groups(self, rows: GroupedRows) -> Tiles:
        """Lay out rows that are quantised already."""
        images = bytes_of_threads(operands_of(padded(rows.codes, self.shape), self.shape))
        images = paired(images, _E4M3).view(-1, TILE_VALUES * self.shape.images)
        beside = beside_images(rows.scales, 128, self.shape)
        return Tiles(torch.cat((images, beside.view(len(images), -1)), dim=1), rows.row_scales)

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        assert tiles.scales is not None
        values = TILE_VALUES * self.shape.images
        row = torch.arange(64, device=tiles.images.device)[:, None]
        at = place_in_image(row, torch.arange(128, device=tiles.images.device)[None, :])
        images = unpaired(tiles.images[:, :values].reshape(-1, TILE_VALUES), _E4M3)
        numbers = tiles.images[:, values:].contiguous().view(torch.float32).view(-1, 64)
        scales = numbers_of(numbers, cols, 128, self.shape)
        return self.restore_groups(GroupedRows(rows_of(images[:, at], cols, self.shape), scales, None, tiles.scales))

    def restore_groups(self, rows: GroupedRows) -> Tensor:
        values = rows.codes.view(torch.float8_e4m3fn).float()
        scales = rows.scales.repeat_interleave(128, dim=1)[:, : values.shape[1]]
        return (values * scales * rows.row_scales[:, None]).to(self.dtype)

    def unpack(self, tiles: Tiles, places: Tensor, part: UnpackedRows) -> None:
        from onewave.wave.weights.pack_impl import unpack_wide

        unpack_wide(tiles, places, part, self.shape, 128, torch.float32, floats=True)


class HalfTiles(TileFormat):
    """Sixteen bits a weight, as they are, in the order of operand A's registers."""

    working_bytes = 6

    def pack(self, rows: Tensor) -> Tiles:
        operands = operands_of(padded(rows, self.shape), self.shape)
        # [16 rows, half of them, row in 8, 16 columns, 8 of them, pair of columns, column]
        cut = operands.reshape(-1, 4, 2, 8, 8, 2, 4, 2).permute(0, 4, 1, 3, 6, 5, 2, 7)
        images = cut.reshape(-1, TILE_VALUES * self.shape.images).contiguous().view(torch.uint8)
        missing = self.shape.tile_bytes - images.shape[1]
        ones = torch.ones(len(rows), device=rows.device)
        return Tiles(torch.nn.functional.pad(images, (0, missing)), ones)

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        values = tiles.images[:, : 2 * TILE_VALUES * self.shape.images].contiguous().view(self.dtype)
        cut = values.view(-1, 8, 4, 8, 4, 2, 2, 2).permute(0, 2, 6, 3, 1, 5, 4, 7)
        return rows_of(cut.reshape(-1, 64, 128), cols, self.shape)

    def unpack(self, tiles: Tiles, places: Tensor, part: UnpackedRows) -> None:
        from onewave.wave.weights.pack_impl import unpack_halves

        unpack_halves(tiles, places, part, self.shape)
