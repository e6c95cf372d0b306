"""4-bit weights with a scale, and perhaps a minimum, a group (base/group_rounding.py), as widen/groups.py reads them.

A tile is one, two or four images of 4 KiB, then their scales, image by image: for each group of columns a row of 128
bytes, then the minima likewise. Such a row has two float16 numbers, of operand A's row r in 8 and of the one 8 below,
for each of 4 times 16 rows and 8 r.
"""

import torch
from torch import Tensor

from onewave.base.group_rounding import GroupedRows, restore_groups, round_groups
from onewave.base.weight_formats import GroupRounding
from onewave.wave.plan.layout import TILE_VALUES, TileShape
from onewave.wave.weights.formats.tile_format import Groups, TileFormat, Tiles, operands_of, padded, rows_of

_IMAGE_BYTES = TILE_VALUES // 2


class NibbleTiles(TileFormat):
    """Four bits a weight."""

    working_bytes = 40  # in float32 and a few copies, for the search of scales
    wide = True

    def __init__(self, form: GroupRounding, shape: TileShape, dtype: torch.dtype):
        super().__init__(form, shape, dtype)
        self._rounding, self.product = form, form.number
        self.groups = Groups(4, form.group, minima=form.minima)

    def pack(self, rows: Tensor) -> Tiles:
        return self.pack_groups(round_groups(rows, self._rounding))

    def pack_by_kernel(self, into: Tiles, places: Tensor, matrices: tuple[Tensor, ...], gain: Tensor | None) -> bool:
        from onewave.wave.weights.round_impl import pack_nibbles

        if self._rounding.minima:
            return False
        pack_nibbles(into, places, matrices, gain, self.shape, self._rounding)
        return True

    def pack_groups(self, rows: GroupedRows) -> Tiles:
        """Lay out rows that are rounded already."""
        images = nibble_images(operands_of(padded(rows.codes, self.shape), self.shape))
        kinds = [rows.scales] if rows.minima is None else [rows.scales, rows.minima]
        parts = [beside_images(kind, self._rounding.group, self.shape) for kind in kinds]
        beside = torch.cat(parts, dim=1).view(-1, self._rounding.beside_rows * 128 * self.shape.images)
        return Tiles(torch.cat((images.view(len(beside), -1), beside), dim=1), rows.row_scales)

    def groups_of(self, tiles: Tiles, cols: int) -> GroupedRows:
        """Undo pack_groups."""
        assert tiles.scales is not None
        images, a_row = self.shape.images, 128 // self._rounding.group
        values, beside = tiles.images.split((images * _IMAGE_BYTES, self.shape.tile_bytes - images * _IMAGE_BYTES), 1)
        codes = rows_of(codes_of(values.reshape(-1, _IMAGE_BYTES)), cols, self.shape)
        kinds = 1 + self._rounding.minima
        numbers = beside.reshape(-1, kinds, a_row * 128).view(torch.float16)
        found = [numbers_of(numbers[:, kind], cols, self._rounding.group, self.shape) for kind in range(kinds)]
        return GroupedRows(codes, found[0], found[1] if self._rounding.minima else None, tiles.scales)

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        return self.restore_groups(self.groups_of(tiles, cols))

    def restore_groups(self, rows: GroupedRows) -> Tensor:
        return restore_groups(rows, self._rounding.group, self.dtype)

    def expected(self, rows: Tensor) -> Tensor:
        return self.restore_groups(round_groups(rows, self._rounding))


def nibble_images(operands: Tensor) -> Tensor:
    """Pack operands A, uint8 [images, 64, 128] below 16: uint8 [images, 4096].

    A word has two neighbouring columns of a row, those 16 columns on, and the same four of the second 64 columns. Its
    lower half has the first column of each pair; from the lowest bit on: the column, in the second 64 columns, 16
    columns on, likewise. Words in order, slowest first: 32 of 64 columns, 16 rows, row in 8, pair of columns in 8, half
    of 16 rows, 8 columns in 16. So 16 bytes of a thread are two 16-column steps of its own part of either half of A,
    and four bytes' lower or upper nibbles are columns of one row.
    """
    # [16 rows, half of them, row in 8, half of the columns, 32 columns, 16 of them, 8 of them, pair, column]
    cut = operands.view(-1, 4, 2, 8, 2, 2, 2, 2, 4, 2).permute(0, 5, 1, 3, 8, 2, 7, 9, 6, 4)
    low, high = cut.reshape(-1, _IMAGE_BYTES, 2).unbind(-1)
    return (low | (high << 4)).view(-1, _IMAGE_BYTES)


def codes_of(images: Tensor) -> Tensor:
    """Undo nibble_images: uint8 [images, 64, 128]."""
    values = torch.stack((images & 15, images >> 4), dim=-1).view(-1, 2, 4, 8, 4, 2, 2, 2, 2, 2)
    return values.permute(0, 2, 5, 3, 9, 1, 8, 6, 4, 7).reshape(-1, 64, 128)


def beside_images(of_groups: Tensor, group: int, shape: TileShape) -> Tensor:
    """Lay out a number a group, [rows, groups]: uint8 [images, bytes]."""
    a_row = 128 // group
    missing = -of_groups.shape[1] % (shape.cols // group)
    whole = torch.nn.functional.pad(of_groups, (0, missing))
    cut = whole.view(len(whole) // shape.rows, shape.rows, -1, shape.quarters, a_row)
    # [images, 16 rows, half of them, row in 8, group of a row]
    operand = cut.permute(0, 2, 3, 1, 4).reshape(-1, 4, 2, 8, a_row)
    return operand.permute(0, 4, 1, 3, 2).reshape(len(operand), -1).contiguous().view(torch.uint8)


def numbers_of(numbers: Tensor, cols: int, group: int, shape: TileShape) -> Tensor:
    """Undo beside_images. numbers: [images, groups * 64]. Returns [rows, groups]."""
    a_row, tiles = 128 // group, -(-cols // shape.cols)
    operand = numbers.reshape(-1, a_row, 4, 8, 2).permute(0, 2, 4, 3, 1)
    cut = operand.reshape(-1, tiles * shape.images, shape.quarters, shape.rows, a_row).permute(0, 3, 1, 2, 4)
    return cut.reshape(cut.shape[0] * shape.rows, -1)[:, : -(-cols // group)]
