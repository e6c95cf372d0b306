"""Best from here: the cheapest way found to finish a game that has begun, judged by the simulator's own count."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from onewave.base.errors import InvalidArgumentError
from onewave.lab.fields import tiles_of
from onewave.lab.game import Game, game_from
from onewave.tiles.orders import GRID_ORDERS, grid_order

__all__ = ["best_from", "strip_snake"]

MOST_TILES = 1024
MOST_WORK, MOST_TRIES = 600_000, 4000
"""Accesses that one answer may count, about a second; and paths, for each has a cost of its own."""

Path = list[tuple[int, int]]


def best_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """Continue a path at the least cost found. Returns order (the whole path), loads, bound, proven, tried.

    Starting points are all orders and all strip snakes, mirrored and turned, with the done tiles left out; then pieces
    of the cheapest are reversed or moved while that does not cost more (fixed seed, so an answer repeats). proven: the
    cost meets the lower bound of the whole game. Raises InvalidArgumentError.
    """
    game = game_from(given)
    done = tiles_of(given.get("order", []), game.m, game.n)
    if game.m * game.n > MOST_TILES:
        got = f"{game.m} x {game.n} tiles"
        raise InvalidArgumentError("best from here", got=got, allowed=f"up to {MOST_TILES} tiles of C")
    bound = game.bound()[1]
    accesses = 2 * game.m * game.n * (game.k if game.unit == "tiles" else 1)
    tries = min(max(MOST_WORK // accesses, 30), MOST_TRIES)
    taken = set(done)
    best, cost, tried = done, None, 0
    seen: set[tuple[tuple[int, int], ...]] = set()
    for path in _starts(game):
        rest = [tile for tile in path if tile not in taken]
        if tuple(rest) in seen or tried >= tries:
            continue
        seen.add(tuple(rest))
        tried += 1
        loads = game.loads([*done, *rest])
        if cost is None or loads < cost:
            best, cost = [*done, *rest], loads
    chance = random.Random(0)
    while cost is not None and cost > bound and len(best) - len(done) > 2 and tried < tries:
        tried += 1
        path = _changed(best, len(done), chance)
        loads = game.loads(path)
        if loads <= cost:
            best, cost = path, loads
    return {"order": best, "loads": cost, "bound": bound, "proven": cost == bound, "tried": tried}


def strip_snake(rows: int, cols: int, height: int) -> Path:
    """Strips of `height` rows, walked column by column, back and forth."""
    path: Path = []
    for place, top in enumerate(range(0, rows, height)):
        columns = range(cols) if place % 2 == 0 else range(cols - 1, -1, -1)
        for step, col in enumerate(columns):
            strip = range(top, min(top + height, rows))
            path += [(row, col) for row in (strip if step % 2 == 0 else reversed(strip))]
    return path


def _starts(game: Game) -> Iterator[Path]:
    m, n = game.m, game.n
    heights = sorted({*range(1, min(max(m, n), 12) + 1), min(max(game.slots - 1, 1), max(m, n))}, reverse=True)
    bases = [strip_snake(m, n, height) for height in heights]
    bases += [[(row, col) for col, row in strip_snake(n, m, height)] for height in heights]
    bases += [grid_order(name, m, n, workers=max(m, n)).to_list() for name in GRID_ORDERS]
    for base in bases:
        for down in (False, True):
            for right in (False, True):
                yield [(m - 1 - row if down else row, n - 1 - col if right else col) for row, col in base]


def _changed(path: Path, fixed: int, chance: random.Random) -> Path:
    """Reverse a piece of the path behind its first `fixed` tiles, or move it elsewhere."""
    first, last = sorted(chance.sample(range(fixed, len(path) + 1), 2))
    piece, rest = path[first:last], path[:first] + path[last:]
    if chance.random() < 0.5:
        return path[:first] + piece[::-1] + path[last:]
    at = chance.randint(fixed, len(rest))
    return rest[:at] + piece + rest[at:]
