"""16-bit weights as they are: a tile is operand A [64, 128], in two halves of 64 columns."""

from torch import Tensor

from onewave.wave.plan.layout import TILE_BYTES, TileShape
from onewave.wave.weights.formats.tile_format import TileFormat, Tiles, UnpackedRows, padded


class PlainTiles(TileFormat):
    """16 bits a weight."""

    working_bytes = 6

    def pack(self, rows: Tensor) -> Tiles:
        return Tiles(tile_images(rows, self.shape))

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        count = -(-cols // self.shape.cols)
        cut = tiles.images.view(-1, count, 2, self.shape.quarters, self.shape.rows, 64).permute(0, 4, 1, 3, 2, 5)
        return cut.reshape(-1, count * self.shape.cols)[:, :cols]

    def pack_by_kernel(self, into: Tiles, places: Tensor, matrices: tuple[Tensor, ...], gain: Tensor | None) -> bool:
        from onewave.wave.weights.pack_impl import pack_tiles

        pack_tiles(into.images, places, matrices, gain, self.shape)
        return True

    def unpack(self, tiles: Tiles, places: Tensor, part: UnpackedRows) -> None:
        from onewave.wave.weights.pack_impl import unpack_tiles

        unpack_tiles(tiles.images, places, part, self.shape)


def tile_images(rows: Tensor, shape: TileShape) -> Tensor:
    """Lay out whole row blocks of a matrix as images of operand A. rows: [blocks * shape.rows, cols] 16-bit.

    Returns [blocks * tiles, 8192]: tile by tile along a row block, columns padded with zeros to whole tiles. An image
    is [2 halves of a column group, 64 rows, 64 columns]; row q * shape.rows + r is row r, column group q.
    """
    cut = padded(rows, shape).view(len(rows) // shape.rows, shape.rows, -1, shape.quarters, 2, 64)
    return cut.permute(0, 2, 4, 3, 1, 5).reshape(-1, TILE_BYTES // 2)
