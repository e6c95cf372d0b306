"""Orders of the tiles of a grid, each a function from (rows, cols, parameter) to every tile exactly once.

All return int64 [rows * cols, 2], (row, column) pairs in the order of computing them.
"""

import math

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError

Ints = npt.NDArray[np.int64]


def row(rows: int, cols: int) -> Ints:
    """Row by row, left to right."""
    return np.stack(np.divmod(np.arange(rows * cols, dtype=np.int64), cols), axis=1)


def column(rows: int, cols: int) -> Ints:
    """Column by column, top to bottom."""
    return row(cols, rows)[:, ::-1].copy()


def snake(rows: int, cols: int) -> Ints:
    """Row by row, every other row from right to left."""
    tiles = row(rows, cols)
    back = tiles[:, 0] % 2 == 1
    tiles[back, 1] = cols - 1 - tiles[back, 1]
    return tiles


def grouped(rows: int, cols: int, parameter: int = 8) -> Ints:
    """Bands of `parameter` rows; inside a band column by column.

    Source: GROUP_SIZE_M of Triton's matrix multiplication tutorial.
    """
    tiles = row(rows, cols)
    return tiles[np.lexsort((tiles[:, 0], tiles[:, 1], tiles[:, 0] // parameter))]


def swizzle(rows: int, cols: int, parameter: int = 8) -> Ints:
    """Strips of 1, 2, 4 or 8 columns, walked down the rows, a strip's row from left to right.

    parameter: CUTLASS's N of GemmIdentityThreadblockSwizzle<N>, which picks the widest strip that N and the grid allow:
    8 from N = 8 and 6 columns on, 4 from N = 4 and 3 columns, 2 from N = 2 and 2 columns.
    Source: CUTLASS, include/cutlass/gemm/threadblock/threadblock_swizzle.h.
    """
    allowed = ((8, 8, 6), (4, 4, 3), (2, 2, 2))
    width = next((w for w, least_n, least_cols in allowed if parameter >= least_n and cols >= least_cols), 1)
    tiles = row(rows, cols)
    return tiles[np.lexsort((tiles[:, 1], tiles[:, 0], tiles[:, 1] // width))]


def morton(rows: int, cols: int) -> Ints:
    """Z order: by the interleaved bits of row and column, tiles outside the grid left out."""
    tiles = row(rows, cols)
    key = np.zeros(len(tiles), dtype=np.int64)
    for bit in range(max(rows, cols).bit_length()):
        key |= ((tiles[:, 0] >> bit) & 1) << (2 * bit + 1)
        key |= ((tiles[:, 1] >> bit) & 1) << (2 * bit)
    return tiles[np.argsort(key, kind="stable")]


def near_square(rows: int, cols: int, parameter: int = 132) -> Ints:
    """Blocks of floor(sqrt(P)) rows by P // that columns for P = `parameter` workers, so that a wave is nearly square.

    A wave of h x w tiles reads h row panels and w column panels, the fewest for its area when h = w. The bands of
    blocks go back and forth.
    """
    height = min(max(1, math.isqrt(parameter)), rows)
    width = min(max(1, parameter // height), cols)
    height = min(max(1, parameter // width), rows)
    tiles = row(rows, cols)
    band, block = tiles[:, 0] // height, tiles[:, 1] // width
    block = np.where(band % 2 == 1, -block, block)
    return tiles[np.lexsort((tiles[:, 1], tiles[:, 0], block, band))]


def stream_k(rows: int, cols: int, parameter: int = 132) -> Ints:
    """P = `parameter` contiguous runs of the row order, equal to within one tile, taking turns: each run's first, ...

    Stream-K's workers touch tiles in this order. Splitting a tile's K over two workers as well takes a
    different graph: builders.gemm_stream_k. Source: Osama et al. 2023, arXiv:2301.03598.
    """
    total = rows * cols
    runs = min(parameter, total)
    begin = np.arange(runs + 1, dtype=np.int64) * total // runs
    run = np.searchsorted(begin, np.arange(total), side="right") - 1
    turn = np.arange(total, dtype=np.int64) - begin[run]
    return row(rows, cols)[np.lexsort((run, turn))]


def random(rows: int, cols: int, parameter: int = 0) -> Ints:
    """A random order; `parameter` is its seed."""
    return row(rows, cols)[np.random.default_rng(parameter).permutation(rows * cols)]


def hilbert(rows: int, cols: int) -> Ints:
    """A Hilbert-like curve on any rectangle: neighbours in the order are neighbours in the grid.

    A rectangle is cut into two or three smaller ones that the curve enters and leaves at matching corners; sides are
    halved to even lengths, and only where one side is odd and the other even can a single step be diagonal.
    Source: the recursion of J. Cerveny's generalised Hilbert curve, https://github.com/jakubcerveny/gilbert.
    """
    found: list[tuple[int, int]] = []
    # A rectangle still to walk: its corner, its long side and its short side as vectors (row, column).
    todo = [((0, 0), (0, cols), (rows, 0)) if cols >= rows else ((0, 0), (rows, 0), (0, cols))]
    while todo:
        corner, long, short = todo.pop()
        length, breadth = abs(long[0] + long[1]), abs(short[0] + short[1])
        along, across = _unit(long), _unit(short)
        if breadth == 1 or length == 1:
            step = along if breadth == 1 else across
            found += [_add(corner, step, times) for times in range(max(length, breadth))]
            continue
        half, side = _half(long), _half(short)
        half_length, half_breadth = abs(half[0] + half[1]), abs(side[0] + side[1])
        if 2 * length > 3 * breadth:
            if half_length % 2 and length > 2:
                half = _add(half, along)
            todo += [(_add(corner, half), _minus(long, half), short), (corner, half, short)]
            continue
        if half_breadth % 2 and breadth > 2:
            side = _add(side, across)
        far = _add(_add(corner, _add(long, along, -1)), _add(side, across, -1))
        todo += [
            (far, _minus((0, 0), side), _minus(half, long)),
            (_add(corner, side), long, _minus(short, side)),
            (corner, side, half),
        ]
    return np.array(found, dtype=np.int64)


def explicit(rows: int, cols: int, tiles: Ints) -> Ints:
    """The caller's own order. Raises InvalidArgumentError unless it names every tile exactly once."""
    if tiles.ndim != 2 or tiles.shape[1] != 2:
        raise InvalidArgumentError("explicit order", got=f"shape {tiles.shape}", allowed="a list of [row, column]")
    outside = (tiles < 0).any(axis=1) | (tiles[:, 0] >= rows) | (tiles[:, 1] >= cols)
    if outside.any():
        raise InvalidArgumentError(
            "explicit order", got=str(tiles[outside][0].tolist()), allowed=f"tiles inside the {rows} x {cols} grid"
        )
    counts = np.bincount(tiles[:, 0] * cols + tiles[:, 1], minlength=rows * cols)
    if (counts != 1).any():
        wrong = int(np.flatnonzero(counts != 1)[0])
        raise InvalidArgumentError(
            "explicit order", got=f"{list(divmod(wrong, cols))} {counts[wrong]} times", allowed="each tile exactly once"
        )
    return tiles


def _unit(vector: tuple[int, int]) -> tuple[int, int]:
    return (vector[0] > 0) - (vector[0] < 0), (vector[1] > 0) - (vector[1] < 0)


def _half(vector: tuple[int, int]) -> tuple[int, int]:
    return vector[0] // 2, vector[1] // 2


def _add(a: tuple[int, int], b: tuple[int, int], times: int = 1) -> tuple[int, int]:
    return a[0] + times * b[0], a[1] + times * b[1]


def _minus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return _add(a, b, -1)
