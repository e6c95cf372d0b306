"""6-bit weights as GGUF's Q6_K has them, in tiles beside nested 4-bit ones, as widen/six_bits.py reads them.

A code is a number from 0 to 63, 32 for zero. 128 columns share a float16 scale, times an integer for 16 columns, a
signed byte. The rest of a tile is unused.
"""

import torch
from torch import Tensor

from onewave.base.group_rounding import GroupedRows
from onewave.wave.plan.layout import TILE_VALUES
from onewave.wave.weights.formats.group_nibbles import beside_images, numbers_of
from onewave.wave.weights.formats.tile_format import TileFormat, Tiles, UnpackedRows, operands_of, padded, rows_of

# Bytes of an image: its three planes, its integers, and all that comes before its scales.
_PLANES, _STEPS, _SCALES = TILE_VALUES * 6 // 8, 512, 56 * 128


class SixTiles(TileFormat):
    """Six bits a weight."""

    working_bytes, bits = 40, 6

    def pack_groups(self, rows: GroupedRows) -> Tiles:
        """Lay out rows that are quantised already."""
        assert rows.steps is not None
        images = self.shape.images
        values = six_images(operands_of(padded(rows.codes, self.shape, 32), self.shape))
        pairs = beside_images(rows.steps.contiguous().view(torch.int16).squeeze(2), 32, self.shape)
        # [image, 32 columns, 16 rows, row in 8, half of 16 rows, bytes of two integers]
        steps = pairs.view(-1, 4, 4, 8, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(-1, images * _STEPS)
        tiles = torch.zeros(len(steps), self.shape.tile_bytes, dtype=torch.uint8, device=steps.device)
        tiles[:, : images * _PLANES] = values.view(len(steps), -1)
        tiles[:, images * _PLANES :][:, : images * _STEPS] = steps
        scales = beside_images(rows.scales, 128, self.shape).view(len(steps), -1)
        tiles[:, images * _SCALES :][:, : scales.shape[1]] = scales
        return Tiles(tiles, rows.row_scales)

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        assert tiles.scales is not None
        images = self.shape.images
        codes = codes_of(tiles.images[:, : images * _PLANES].reshape(-1, _PLANES))
        steps = tiles.images[:, images * _PLANES :][:, : images * _STEPS].reshape(-1, 4, 8, 4, 2, 2)
        pairs = steps.permute(0, 3, 1, 2, 4, 5).reshape(-1, _STEPS).view(torch.float16)
        found = numbers_of(pairs, cols, 32, self.shape).contiguous().view(torch.int8)
        scales = tiles.images[:, images * _SCALES :][:, : images * 128].contiguous().view(torch.float16)
        numbers = numbers_of(scales, cols, 128, self.shape)
        rows = rows_of(codes, cols, self.shape)
        return self.restore_groups(GroupedRows(rows, numbers, None, tiles.scales, found.view(len(numbers), -1, 2)))

    def restore_groups(self, rows: GroupedRows) -> Tensor:
        assert rows.steps is not None
        cols = rows.codes.shape[1]
        scales, steps = rows.scales.float(), rows.steps.flatten(1).float()
        scale = scales.repeat_interleave(128, dim=1)[:, :cols] * steps.repeat_interleave(16, dim=1)[:, :cols]
        return ((rows.codes.float() - 32) * scale * rows.row_scales[:, None]).to(self.dtype)

    def unpack(self, tiles: Tiles, places: Tensor, part: UnpackedRows) -> None:
        from onewave.wave.weights.pack_impl import unpack_sixes

        unpack_sixes(tiles, places, part, self.shape)


def six_images(operands: Tensor) -> Tensor:
    """Pack operands A, uint8 [images, 64, 128] below 64: uint8 [images, 6144], three planes of words by thread, each
    of the four 32 columns in turn.

    A byte has a number less 32 in its upper six bits, signed, and in the lower two some of a fourth number's: the first
    plane's byte its highest two. A word's bytes are two neighbouring columns, each with the one 16 columns on beside
    it; the planes, and then the fourth numbers, are both halves of 16 rows, and the same of the next 8 columns.
    """
    # [image, 16 rows, half of them, row in 8, 32 columns, 16 of them, 8 of them, pair, column]
    cut = (operands ^ 32).view(-1, 4, 2, 8, 4, 2, 2, 4, 2).permute(0, 6, 2, 1, 3, 7, 4, 8, 5)
    *three, fourth = cut.flatten(1, 2).unbind(1)
    words = [(one << 2) | (fourth >> shift & 3) for one, shift in zip(three, (4, 2, 0), strict=True)]
    return torch.stack(words, dim=1).view(len(operands), -1)


def codes_of(images: Tensor) -> Tensor:
    """Undo six_images: uint8 [images, 64, 128]."""
    words = images.view(-1, 3, 4, 8, 4, 4, 2, 2)
    first, second, third = (words & 3).unbind(1)
    numbers = torch.cat((words >> 2, ((first << 4) | (second << 2) | third)[:, None]), dim=1) ^ 32
    # [image, 8 columns, half of 16 rows, 16 rows, row in 8, pair, 32 columns, column, 16 columns]
    return numbers.unflatten(1, (2, 2)).permute(0, 3, 2, 4, 6, 8, 1, 5, 7).reshape(-1, 64, 128)
