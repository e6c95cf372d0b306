"""Weights whose groups' scales and minima are small integers times shared ones, as in GGUF's K-quants.

4 bits: 128 columns share a float16 scale and a minimum, each times an integer for 32 columns. 8 bits: 32 columns share
them, each times an integer; without a minimum the second integer is the scale's of the second 16 columns. Integers are
signed bytes, a group's two beside each other. A tile's values are as group_nibbles.py and wide.py have them. Behind
them are three parts, each with the rows of all images, such a row as in group_nibbles.py:

    part     4 bits                          8 bits
    first    integers of groups 0 and 1      scales of four groups
    second   integers of groups 2 and 3      minima
    third    the scale, the minimum          integers
"""

import torch
from torch import Tensor

from onewave.base.group_rounding import GroupedRows
from onewave.base.weight_formats import MixedFormat
from onewave.wave.plan.layout import TILE_VALUES, TileShape
from onewave.wave.weights.formats.group_nibbles import beside_images, codes_of, nibble_images, numbers_of
from onewave.wave.weights.formats.tile_format import Groups, TileFormat, Tiles, operands_of, padded, rows_of
from onewave.wave.weights.rounding import bytes_of_threads, operands_of_threads


class NestedTiles(TileFormat):
    """Four or eight bits a weight, by how wide the tiles are: `bits`."""

    working_bytes = 20

    def __init__(self, form: MixedFormat, shape: TileShape, dtype: torch.dtype, width: int):
        super().__init__(form, shape, dtype)
        self.bits, self.product = 4 * width, form.nibbles.number if width == 1 else 0
        self._values = TILE_VALUES * self.bits // 8 * shape.images
        self.groups = Groups(self.bits, 32, minima=True, nested=True)

    def pack_groups(self, rows: GroupedRows) -> Tiles:
        """Lay out rows that are quantised already."""
        assert rows.minima is not None
        assert rows.steps is not None
        pairs = rows.steps.contiguous().view(torch.int16).squeeze(2)
        steps = beside_images(pairs, 32, self.shape).view(torch.float16)
        if self.bits == 4:
            both = [beside_images(part, 128, self.shape).view(torch.float16) for part in (rows.scales, rows.minima)]
            parts = [*steps.chunk(2, dim=1), torch.cat(both, dim=1)]
            images = nibble_images(operands_of(padded(rows.codes, self.shape), self.shape))
        else:
            both = [beside_images(part, 32, self.shape).view(torch.float16) for part in (rows.scales, rows.minima)]
            parts = [*both, steps]
            images = bytes_of_threads(operands_of(padded(rows.codes, self.shape, 128), self.shape))
        beside = torch.stack([part.reshape(-1, self.shape.images * part.shape[1]) for part in parts], dim=1)
        values = images.view(len(beside), -1)
        return Tiles(torch.cat((values, beside.flatten(1).view(torch.uint8)), dim=1), rows.row_scales)

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        assert tiles.scales is not None
        images = self.shape.images
        values = tiles.images[:, : self._values].reshape(-1, self._values // images)
        beside = tiles.images[:, self._values :].contiguous().view(torch.float16)
        parts = [part.reshape(len(values), -1) for part in beside.chunk(3, dim=1)]

        def numbers(part: Tensor, group: int) -> Tensor:
            return numbers_of(part.contiguous(), cols, group, self.shape)

        if self.bits == 4:
            operands, pairs = codes_of(values), torch.cat(parts[:2], dim=1)
            scales, minima = (numbers(part, 128) for part in parts[2].chunk(2, dim=1))
        else:
            operands, pairs = operands_of_threads(values), parts[2]
            scales, minima = (numbers(part, 32) for part in parts[:2])
        steps = numbers(pairs, 32).contiguous().view(torch.int8).view(len(scales), -1, 2)
        codes = rows_of(operands, cols, self.shape)
        return self.restore_groups(GroupedRows(codes, scales, minima, tiles.scales, steps))

    def restore_groups(self, rows: GroupedRows) -> Tensor:
        return restore_nested(rows, self.bits, self.dtype)


def restore_nested(rows: GroupedRows, bits: int, dtype: torch.dtype) -> Tensor:
    """Dequantise such rows, in float32 and rounded once to dtype: [n, cols]."""
    assert rows.minima is not None
    assert rows.steps is not None
    cols, group = rows.codes.shape[1], 128 if bits == 4 else 32

    def spread(numbers: Tensor, group: int) -> Tensor:
        return numbers.float().repeat_interleave(group, dim=1)[:, :cols]

    minima, (up, down) = spread(rows.minima, group), (spread(step, 32) for step in rows.steps.unbind(2))
    second = torch.arange(cols, device=up.device) // 16 % 2 == 1
    of_scale = torch.where(second & (minima == 0), down, up) if bits == 8 else up
    values = (rows.codes.float() - (128 if bits == 8 else 0)) * (spread(rows.scales, group) * of_scale)
    return ((values + minima * down) * rows.row_scales[:, None]).to(dtype)
