"""The tile game's model: a tile of C needs a row panel of A and a column panel of B; a cache holds whole panels.

A tile touches its row panel, then its column panel; loading the second never evicts the first. So LRU counts as a cache
that sees these accesses one by one would, and Belady is the least for tiles that need both panels at once.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.sim.caches import Stream, replay

MAX_PANEL_TILES = 1_000_000
"""Most tiles of a grid whose panels are counted: a second or two."""


def panel_loads(rows: int, cols: int, order: Iterable[Sequence[int]], capacity: int, policy: str = "lru") -> int:
    """Count the panels loaded while the tiles of C are computed in that order.

    rows, cols: C's grid. order: (row, column) pairs, each at most once; part of the grid is allowed. capacity: panels,
    at least 2. policy: lru, fifo or belady. Raises InvalidArgumentError.
    """
    tiles = [(int(t[0]), int(t[1])) for t in order]
    check_game(rows, cols, capacity)
    for row, col in tiles:
        if not (0 <= row < rows and 0 <= col < cols):
            raise InvalidArgumentError("tile", got=f"({row}, {col})", allowed=f"inside the {rows} x {cols} grid")
    if len(set(tiles)) != len(tiles):
        twice = next(tile for at, tile in enumerate(tiles) if tile in tiles[:at])
        raise InvalidArgumentError("order", got=f"{twice} twice", allowed="each tile at most once")
    panels = np.array([panel for row, col in tiles for panel in (row, rows + col)], dtype=np.int64)
    ones = np.ones(len(panels), dtype=np.int64)
    groups = np.repeat(np.arange(len(tiles), dtype=np.int64), 2)
    return replay(policy, Stream(panels, np.zeros(len(panels), dtype=np.bool_), ones, groups), capacity).num_loads


def strip_snake_loads(rows: int, cols: int, capacity: int) -> int:
    """Loads of the strip snake: strips of g = capacity - 1 rows, walked column by column, back and forth.

    m + ceil(m/g) n - (ceil(m/g) - 1): each row panel once, each column panel once a strip, less the one that the next
    strip finds still resident.
    """
    check_game(rows, cols, capacity)
    strips = -(-rows // (capacity - 1))
    return rows + strips * cols - (strips - 1)


def check_game(rows: int, cols: int, capacity: int) -> None:
    """Raise InvalidArgumentError for no grid, or a cache without room for a tile's two panels."""
    if rows < 1 or cols < 1:
        raise InvalidArgumentError("grid", got=f"{rows} x {cols}", allowed="1 x 1 or more")
    if capacity < 2:
        raise InvalidArgumentError("cache", got=f"{capacity} panels", allowed="2 or more: a tile needs two at once")
