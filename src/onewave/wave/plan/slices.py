"""Slices of the inner dimension K of a product: how many, and where they begin.

A slice is work of its own for a worker, and needs its part of the activations alone. But one more hand-off reduces the
slices' float32 sums.
"""

from __future__ import annotations

from onewave.base.errors import UnsupportedError
from onewave.tiles.graph.builders import cuts
from onewave.wave.plan.layout import TileShape

# SMs of today's GPUs, about. One or two sequences need no slices of a long K if at least _MIN_ROW_BLOCKS SMs have a row
# block.
NUM_SMS, _MIN_ROW_BLOCKS = 128, 97
# Cost of a reduction for 32 sequences, in tiles that a worker could stream meanwhile: at all, and for each slice
# (docs/log/ffn.md, "K slices that need no adding").
_TILES_OF_A_SUM, _TILES_OF_A_SLICE = 16, 2
# Cost of activations that pass through shared memory, in bytes of tiles (docs/log/ffn.md, "Tall tiles").
_COST_OF_READING = 0.8


def slice_bounds(cols: int, slices: int, shape: TileShape) -> tuple[int, ...]:
    """Return the columns at which slices of K begin, and `cols`: whole tiles each, as even as they go.

    Raises UnsupportedError for more slices than tiles.
    """
    tiles = cuts(cols, shape.cols)
    if not 1 <= slices <= tiles:
        raise UnsupportedError("wave: slices of K", got=str(slices), allowed=f"1 to {tiles}")
    return (*(min(cols, tiles * i // slices * shape.cols) for i in range(slices)), cols)


def slices_of(rows: int, cols: int, shape: TileShape, *, reading: bool = False) -> int:
    """Choose the slices of K of a product of a matrix [rows, cols].

    For more than two sequences: the number with the lowest cost, the busiest worker's tiles plus the reduction, on
    NUM_SMS SMs. Activations that do not fit shared memory pass through it once for each group of row blocks. reading:
    count that as well, and the reduction as for 32 sequences. For one or two sequences: as few as fit shared memory, or
    one where most workers have a single row block.
    """
    blocks, tiles = cuts(rows, shape.rows), cuts(cols, shape.cols)
    if shape.batch <= 2:
        single = _MIN_ROW_BLOCKS <= blocks <= NUM_SMS or passes_once(rows, shape)
        return 1 if single else fitting_slices(cols, shape)

    def cost(slices: int) -> float:
        sums = _TILES_OF_A_SUM + _TILES_OF_A_SLICE * slices if slices > 1 else 0
        sums *= 1 if reading else shape.batch / 32
        units, length = _largest_share(blocks, tiles, slices)
        passing = cuts(units, shape.group) * length if reading and passes(cols, slices, shape) else 0
        bytes_passing = passing * shape.chunk_bytes / shape.chunk
        return units * length + sums + _COST_OF_READING * bytes_passing / shape.tile_bytes

    return min(range(1, fitting_slices(cols, shape) + 1), key=cost)


def unevenness(rows: int, cols: int, slices: int, shape: TileShape) -> float:
    """Return the busiest worker's tiles of a product so cut, relative to the mean, on NUM_SMS SMs."""
    blocks, tiles = cuts(rows, shape.rows), cuts(cols, shape.cols)
    units, length = _largest_share(blocks, tiles, slices)
    return units * length * NUM_SMS / (blocks * tiles)


def _largest_share(blocks: int, tiles: int, slices: int) -> tuple[int, int]:
    """Return the busiest worker's row blocks of a slice of K, and the longest slice's tiles."""
    return cuts(blocks * slices, NUM_SMS), cuts(tiles, slices)


def fitting_slices(cols: int, shape: TileShape) -> int:
    """Return the fewest slices of K with activations that fit shared memory."""
    return cuts(cuts(cols, shape.cols), shape.max_tiles)


def passes_once(rows: int, shape: TileShape) -> bool:
    """Say whether one sequence's activations in digits may pass through shared memory at no cost: most workers have
    one group of row blocks."""
    return shape.digits and shape.batch == 1 and cuts(rows, shape.rows * NUM_SMS) <= shape.group


def passes(cols: int, slices: int, shape: TileShape) -> bool:
    """Say whether the activations of so many slices exceed shared memory, and so pass through it for each group of row
    blocks, a task each."""
    return cuts(cuts(cols, shape.cols), slices) > shape.max_tiles
