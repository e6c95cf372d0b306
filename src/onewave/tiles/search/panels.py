"""The tile game's model: a tile of C needs a row panel of A and a column panel of B; a cache holds whole panels.

A tile touches its row panel, then its column panel; loading the second never evicts the first. So LRU counts as a cache
that sees these accesses one by one would, and Belady is the least for tiles that need both panels at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.sim.caches import CacheResult, Stream, replay

MAX_PANEL_TILES = 1_000_000
"""Most tiles of a grid whose panels are counted: a second or two."""


@dataclass(frozen=True)
class PanelStep:
    """One tile of C: what it found, what it loaded, what it pushed out. Panels are named "A0", "B2"."""

    tile: tuple[int, int]
    hits: tuple[str, ...]
    loads: tuple[str, ...]
    evictions: tuple[str, ...]
    resident: tuple[str, ...]
    total_loads: int


def panel_loads(rows: int, cols: int, order: Iterable[Sequence[int]], capacity: int, policy: str = "lru") -> int:
    """Count the panels loaded while the tiles of C are computed in that order.

    rows, cols: C's grid. order: (row, column) pairs, each at most once; part of the grid is allowed. capacity: panels,
    at least 2. policy: lru, fifo or belady. Raises InvalidArgumentError.
    """
    return _replay(rows, cols, [(int(t[0]), int(t[1])) for t in order], capacity, policy).num_loads


def panel_trace(
    rows: int, cols: int, order: Iterable[Sequence[int]], capacity: int, policy: str = "lru"
) -> tuple[PanelStep, ...]:
    """Tell what happened at each tile of the order, for people. Takes and raises what panel_loads does."""
    tiles = [(int(t[0]), int(t[1])) for t in order]
    result = _replay(rows, cols, tiles, capacity, policy)
    gone: dict[int, list[int]] = {}
    for place, panel in zip(result.evicted_at.tolist(), result.evicted_tile.tolist(), strict=True):
        gone.setdefault(place // 2, []).append(panel)
    resident: dict[int, None] = {}
    steps: list[PanelStep] = []
    total = 0
    for at, (row, col) in enumerate(tiles):
        panels = (row, rows + col)
        hit = [bool(result.hit[2 * at]), bool(result.hit[2 * at + 1])]
        for panel in gone.get(at, ()):
            resident.pop(panel, None)
        resident |= dict.fromkeys(panels)
        loads = tuple(_name(p, rows) for p, found in zip(panels, hit, strict=True) if not found)
        total += len(loads)
        steps.append(
            PanelStep(
                tile=(row, col),
                hits=tuple(_name(p, rows) for p, found in zip(panels, hit, strict=True) if found),
                loads=loads,
                evictions=tuple(_name(p, rows) for p in gone.get(at, ())),
                resident=tuple(_name(p, rows) for p in sorted(resident)),
                total_loads=total,
            )
        )
    return tuple(steps)


def strip_snake_loads(rows: int, cols: int, capacity: int) -> int:
    """Loads of the strip snake: strips of g = capacity - 1 rows, walked column by column, back and forth.

    m + ceil(m/g) n - (ceil(m/g) - 1): each row panel once, each column panel once a strip, less the one that the next
    strip finds still resident.
    """
    _check(rows, cols, capacity)
    strips = -(-rows // (capacity - 1))
    return rows + strips * cols - (strips - 1)


def _replay(rows: int, cols: int, tiles: list[tuple[int, int]], capacity: int, policy: str) -> CacheResult:
    _check(rows, cols, capacity)
    for row, col in tiles:
        if not (0 <= row < rows and 0 <= col < cols):
            raise InvalidArgumentError("tile", got=f"({row}, {col})", allowed=f"inside the {rows} x {cols} grid")
    if len(set(tiles)) != len(tiles):
        twice = next(tile for at, tile in enumerate(tiles) if tile in tiles[:at])
        raise InvalidArgumentError("order", got=f"{twice} twice", allowed="each tile at most once")
    panels = np.array([panel for row, col in tiles for panel in (row, rows + col)], dtype=np.int64)
    ones = np.ones(len(panels), dtype=np.int64)
    groups = np.repeat(np.arange(len(tiles), dtype=np.int64), 2)
    return replay(policy, Stream(panels, np.zeros(len(panels), dtype=np.bool_), ones, groups), capacity)


def _check(rows: int, cols: int, capacity: int) -> None:
    if rows < 1 or cols < 1:
        raise InvalidArgumentError("grid", got=f"{rows} x {cols}", allowed="1 x 1 or more")
    if capacity < 2:
        raise InvalidArgumentError("cache", got=f"{capacity} panels", allowed="2 or more: a tile needs two at once")


def _name(panel: int, rows: int) -> str:
    return f"A{panel}" if panel < rows else f"B{panel - rows}"
