"""bfloat16 weights in thirteen bits, without loss (compact.py)."""

from torch import Tensor

from onewave.base.weight_formats import COMPACT
from onewave.wave.weights.compact import bases_of, compact_images, restore_images, scales_of
from onewave.wave.weights.formats.tile_format import TileFormat, Tiles, UnpackedRows


class CompactTiles(TileFormat):
    """Thirteen bits a weight, and a list beside each tile."""

    working_bytes = 32
    product = COMPACT.number

    def pack(self, rows: Tensor) -> Tiles:
        bases = bases_of(rows)
        images, lists, reached = compact_images(rows, bases, self.shape)
        return Tiles(images, scales_of(bases), lists, reached)

    def restore(self, tiles: Tiles, cols: int) -> Tensor:
        assert tiles.lists is not None
        assert tiles.scales is not None
        return restore_images(tiles.images, tiles.lists, tiles.scales, cols, self.shape)

    def pack_by_kernel(self, into: Tiles, places: Tensor, matrices: tuple[Tensor, ...], gain: Tensor | None) -> bool:
        from onewave.wave.weights.compact_impl import pack_compact

        assert into.lists is not None
        assert into.scales is not None
        assert into.reached is not None
        pack_compact(into.images, into.lists, into.scales, into.reached, places, matrices, gain, self.shape)
        return True

    def unpack(self, tiles: Tiles, places: Tensor, part: UnpackedRows) -> None:
        from onewave.wave.weights.compact_impl import unpack_compact

        assert tiles.lists is not None
        assert tiles.scales is not None
        unpack_compact(tiles.images, tiles.lists, places, tiles.scales, part, self.shape)
