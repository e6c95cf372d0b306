"""How many slices the inner dimension K of a product is cut in, and where.

A slice is work of its own for a worker, and needs its part of the activations alone; but the slices' float32 sums are
added up behind one more hand-off.
"""

from __future__ import annotations

from onewave.base.errors import UnsupportedError
from onewave.tiles.graph.builders import cuts
from onewave.wave.plan.layout import TileShape

# Multiprocessors of today's cards, about, and how many of them must have a row block, if long sums over K of one or two
# sequences are not to be cut in slices, which would have to be added up.
MULTIPROCESSORS, _MOST_OF_THEM = 128, 97
# What adding them up costs 32 sequences, in tiles that a worker could stream meanwhile: at all, and for each slice
# (docs/log/ffn.md, "K slices that need no adding").
_TILES_OF_A_SUM, _TILES_OF_A_SLICE = 16, 2
# What a worker's reading of activations that pass costs, beside as many bytes of tiles (docs/log/ffn.md, "Tall tiles").
_COST_OF_READING = 0.8


def slice_bounds(cols: int, slices: int, shape: TileShape) -> tuple[int, ...]:
    """Columns at which slices of K begin, and `cols`: whole tiles each, as even as they go.

    Raises UnsupportedError for more slices than tiles.
    """
    tiles = cuts(cols, shape.cols)
    if not 1 <= slices <= tiles:
        raise UnsupportedError("wave: slices of K", got=str(slices), allowed=f"1 to {tiles}")
    return (*(min(cols, tiles * i // slices * shape.cols) for i in range(slices)), cols)


def slices_of(rows: int, cols: int, shape: TileShape, *, reading: bool = False) -> int:
    """Slices of K that a product of a matrix [rows, cols] is cut in: for more than two sequences those with which the
    busiest worker's tiles and what adding up costs are least, on a card of today's size. Activations that do not fit
    shared memory then pass through it, once for each group of row blocks; reading: whether that counts as well, and
    adding up as much as of 32. (For one or two, whose activations are short, as many as fit, or one where most workers
    have a single row block.)"""
    blocks, tiles = cuts(rows, shape.rows), cuts(cols, shape.cols)
    if shape.batch <= 2:
        return 1 if _MOST_OF_THEM <= blocks <= MULTIPROCESSORS else fitting_slices(cols, shape)

    def cost(slices: int) -> float:
        sums = _TILES_OF_A_SUM + _TILES_OF_A_SLICE * slices if slices > 1 else 0
        sums *= 1 if reading else shape.batch / 32
        units, length = _largest_share(blocks, tiles, slices)
        passing = cuts(units, shape.group) * length if reading and passes(cols, slices, shape) else 0
        bytes_passing = passing * shape.chunk_bytes / shape.chunk
        return units * length + sums + _COST_OF_READING * bytes_passing / shape.tile_bytes

    return min(range(1, fitting_slices(cols, shape) + 1), key=cost)


def unevenness(rows: int, cols: int, slices: int, shape: TileShape) -> float:
    """How many times the mean's tiles the busiest worker has of a product so cut, on a card of today's size."""
    blocks, tiles = cuts(rows, shape.rows), cuts(cols, shape.cols)
    units, length = _largest_share(blocks, tiles, slices)
    return units * length * MULTIPROCESSORS / (blocks * tiles)


def _largest_share(blocks: int, tiles: int, slices: int) -> tuple[int, int]:
    """Row blocks of a slice of K that the busiest worker has, and the longest slice's tiles."""
    return cuts(blocks * slices, MULTIPROCESSORS), cuts(tiles, slices)


def fitting_slices(cols: int, shape: TileShape) -> int:
    """Fewest slices of K whose activations fit shared memory."""
    return cuts(cuts(cols, shape.cols), shape.most_tiles)


def passes(cols: int, slices: int, shape: TileShape) -> bool:
    """Whether the activations of so many slices do not fit shared memory at once, and pass through it for each group of
    row blocks, a task each."""
    return cuts(cuts(cols, shape.cols), slices) > shape.most_tiles
