"""Formats of weights in a stream, one class each: how rows become tiles, and tiles rows."""

import torch

from onewave.base.weight_formats import COMPACT, SIX_BITS, GroupRounding, MixedFormat, RowRounding, WeightFormat
from onewave.wave.plan.layout import TileShape
from onewave.wave.weights.formats.compact_words import CompactTiles
from onewave.wave.weights.formats.group_nibbles import NibbleTiles
from onewave.wave.weights.formats.nested import NestedTiles
from onewave.wave.weights.formats.plain import PlainTiles
from onewave.wave.weights.formats.row_bytes import ByteTiles
from onewave.wave.weights.formats.six_bits import SixTiles
from onewave.wave.weights.formats.tile_format import TileFormat, Tiles
from onewave.wave.weights.formats.wide import FloatTiles, HalfTiles, WideTiles

__all__ = ["TileFormat", "Tiles", "tile_format"]


def tile_format(form: WeightFormat | None, shape: TileShape, dtype: torch.dtype, width: int = 1) -> TileFormat:
    """Return a format's tiles. form: None for 16 bits. shape: of its narrowest weights. dtype: of plain matrices,
    bf16|fp16. width: as of Operation."""
    assert shape.weight_bytes == (2 if form is None else form.weight_bytes)
    own = shape.of_width(width)
    if isinstance(form, MixedFormat):
        if width == SIX_BITS:
            return SixTiles(form, own, dtype)
        if form.nibbles.nested and width < 4:
            return NestedTiles(form, own, dtype, width)
        kinds = {2: FloatTiles if form.floats else WideTiles, 4: HalfTiles}
        return NibbleTiles(form.nibbles, shape, dtype) if width == 1 else kinds[width](form, own, dtype)
    if isinstance(form, RowRounding):
        return ByteTiles(form, shape, dtype)
    if isinstance(form, GroupRounding):
        return NibbleTiles(form, shape, dtype)
    assert form is None or (form is COMPACT and dtype is torch.bfloat16)
    return PlainTiles(form, shape, dtype) if form is None else CompactTiles(form, shape, dtype)
