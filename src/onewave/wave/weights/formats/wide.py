"""8-bit and 16-bit weights beside 4-bit ones, in tiles of as many bytes, as widen/wide.py reads them.

8 bits: half as many images of 8 KiB, then their scales in the order of group_nibbles.py. 16 bits: a quarter as many
images of 16 KiB; what lies beside them is unused.
"""

import torch
from torch import Tensor

from onewave.base.group_rounding import GroupedRows, restore_groups, round_bytes
from onewave.base.weight_formats import ROW_ROUNDINGS, MixedFormat
from onewave.wave.plan.layout import TILE_VALUES, TileShape
from onewave.wave.weights.formats.group_nibbles import beside_images, numbers_of
from onewave.wave.weights.formats.tile_format import Groups, TileFormat, Tiles, operands_of, padded, rows_of
from onewave.wave.weights.rounding import bytes_of_threads, operands_of_threads, paired, unpaired

_E4M3 = ROW_ROUNDINGS["fp8"]


class ScaledBytes(TileFormat):
    """Eight bits a weight with a scale a group, in the order of operand A's registers. zero: the code of 0."""

    working_bytes = 20
    zero = 0

    def in_order(self, images: Tensor) -> Tensor:
        """Lay out images' bytes, [images, 8192], as the kernel reads them."""
        return images

    def out_of_order(self, images: Tensor) -> Tensor:
        """Undo in_order."""
        return images

    def pack_groups(self, rows: GroupedRows) -> Tiles:
        """Lay out rows that are rounded already."""
        images = bytes_of_threads(operands_of(padded(rows.codes, self.shape, self.zero), self.shape))
        images = self.in_order(images).view(-1, TILE_VALUES * self.shape.images)
        beside = beside_images(rows.scales, self.groups.size, self.shape)
        return Tiles(torch.cat((images, beside.view(len(images), -1)), dim=1), rows.row_scales)

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        assert tiles.scales is not None
        values = TILE_VALUES * self.shape.images
        images = self.out_of_order(tiles.images[:, :values].reshape(-1, TILE_VALUES))
        numbers = tiles.images[:, values:].reshape(len(images), -1).contiguous().view(self.groups.number)
        scales = numbers_of(numbers, cols, self.groups.size, self.shape)
        codes = rows_of(operands_of_threads(images), cols, self.shape)
        return self.restore_groups(GroupedRows(codes, scales, None, tiles.scales))


class WideTiles(ScaledBytes):
    """Whole numbers, 128 for zero."""

    wide = True
    zero = 128

    def __init__(self, form: MixedFormat, shape: TileShape, dtype: torch.dtype):
        super().__init__(form, shape, dtype)
        self.groups = Groups(8, form.wide_group, torch.float32 if form.wide_number == 4 else torch.float16)

    def pack(self, rows: Tensor) -> Tiles:
        return self.pack_groups(round_bytes(rows, self.groups.size, self.groups.number))

    def restore_groups(self, rows: GroupedRows) -> Tensor:
        return restore_groups(rows, self.groups.size, self.dtype, zero=128)

    def expected(self, rows: Tensor) -> Tensor:
        return self.restore_groups(round_bytes(rows, self.groups.size, self.groups.number))


class FloatTiles(ScaledBytes):
    """e4m3 numbers, in pairs as row_bytes.py has them, with a float32 scale for 128 columns."""

    groups = Groups(8, 128, torch.float32, floats=True)

    def in_order(self, images: Tensor) -> Tensor:
        return paired(images, _E4M3)

    def out_of_order(self, images: Tensor) -> Tensor:
        return unpaired(images, _E4M3)

    def restore_groups(self, rows: GroupedRows) -> Tensor:
        values = rows.codes.view(torch.float8_e4m3fn).float()
        scales = rows.scales.repeat_interleave(128, dim=1)[:, : values.shape[1]]
        return (values * scales * rows.row_scales[:, None]).to(self.dtype)


class HalfTiles(TileFormat):
    """Sixteen bits a weight, as they are, in the order of operand A's registers."""

    working_bytes = 6
    groups = Groups(16)

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
