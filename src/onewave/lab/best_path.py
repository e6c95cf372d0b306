"""Best from here: the cheapest way found to finish a path, and whether it is proven to be the cheapest."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onewave.base.errors import InvalidArgumentError
from onewave.lab.fields import tiles_of
from onewave.lab.game import Game, game_from
from onewave.lab.game_spaces import BeladyFrom, FifoFrom, LruFrom, TooManyCaches
from onewave.tiles.order.orders import GRID_ORDERS, grid_order
from onewave.tiles.search.local import improve
from onewave.tiles.search.search import search_panels
from onewave.tiles.search.starts import block_snake
from onewave.tiles.search.tree import Found, astar

MAX_TILES = 1024
MAX_EXACT_TILES = 64
MAX_WORK, MAX_TRIES = 300_000, 2000
"""Accesses that the local search of one answer may count, half a second; and paths, for each has a cost of its own."""
EXACT_S = 2.0
"""Seconds for the exact search, or for tiles/search where that has no chance."""

Path = list[tuple[int, int]]


@dataclass
class Hunt:
    """The best path so far. fixed: how many of its tiles a person has chosen."""

    game: Game
    fixed: int
    path: Path
    loads: int
    bound: int
    tried: int = 0

    def count(self, path: Path) -> int:
        self.tried += 1
        return self.game.loads(path)

    def offer(self, path: Path, loads: int) -> None:
        if loads < self.loads:
            self.path, self.loads = path, loads


def best_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """Continue a path at the least cost found. Returns order (the whole path), loads, bound, proven, tried.

    First all orders and strip snakes, mirrored and turned, with the done tiles left out; then a local search; then,
    where slots hold panels and the grid is small, A* over what is undone and resident. bound: no way to finish this
    path loads less. proven: loads equals bound. Raises InvalidArgumentError.
    """
    game = game_from(given)
    done = tiles_of(given.get("order", []), game.m, game.n)
    tiles = game.m * game.n
    if tiles > MAX_TILES:
        got = f"{game.m} x {game.n} tiles"
        raise InvalidArgumentError("best from here", got=got, allowed=f"up to {MAX_TILES} tiles of C")
    # Rows and columns may be renamed, so any first tile is as good as any other.
    begun = done or [(0, 0)]
    taken = set(begun)
    path = [*begun, *(tile for tile in grid_order("snake", game.m, game.n).to_list() if tile not in taken)]
    hunt = Hunt(game, len(begun), path, game.loads(path), max(game.bound()[1], game.loads(done)))
    _try_orders(hunt, begun)
    if not done and game.unit == "panels" and game.policy != "fifo" and tiles > MAX_EXACT_TILES:
        found = search_panels(game.m, game.n, game.slots, game.policy, time_limit=EXACT_S)
        hunt.offer(found.order, found.loads)
        hunt.bound = max(hunt.bound, found.bound)
    for path, loads in improve(hunt.path, hunt.count, hunt.bound, _max_tries(game), fixed=hunt.fixed):
        hunt.offer(path, loads)
    if game.unit == "panels" and tiles <= MAX_EXACT_TILES and hunt.loads > hunt.bound and hunt.fixed < tiles:
        _prove(hunt, begun)
    assert hunt.bound <= hunt.loads, f"{hunt.loads} loads below the bound of {hunt.bound}: {game}"
    if hunt.fixed == tiles:
        hunt.bound = hunt.loads
    return {
        "order": hunt.path,
        "loads": hunt.loads,
        "bound": hunt.bound,
        "proven": hunt.loads == hunt.bound,
        "tried": hunt.tried,
    }


def _prove(hunt: Hunt, begun: Path) -> None:
    """Search exactly for less than what is known."""
    game = hunt.game
    until = time.monotonic() + EXACT_S
    sizes = (game.m, game.n, game.slots)
    try:
        if game.policy == "belady":
            found: Found = astar(BeladyFrom(*sizes, begun), hunt.loads, until)
        else:
            found = astar((LruFrom if game.policy == "lru" else FifoFrom)(*sizes, begun), hunt.loads, until)
    except TooManyCaches:
        return
    hunt.tried += found.expanded
    if found.tiles is not None:
        # The first entry stands for the done tiles.
        path = [*begun, *(divmod(tile, game.n) for tile in found.tiles[1:])]
        hunt.offer(path, game.loads(path))
    hunt.bound = max(hunt.bound, min(found.bound, hunt.loads))


def _try_orders(hunt: Hunt, begun: Path) -> None:
    taken = set(begun)
    seen: set[tuple[tuple[int, int], ...]] = set()
    for path in _starts(hunt.game):
        rest = [tile for tile in path if tile not in taken]
        if hunt.loads <= hunt.bound or hunt.tried >= _max_tries(hunt.game):
            return
        if tuple(rest) not in seen:
            seen.add(tuple(rest))
            hunt.offer([*begun, *rest], hunt.count([*begun, *rest]))


def _max_tries(game: Game) -> int:
    accesses = 2 * game.m * game.n * (game.k if game.unit == "tiles" else 1)
    return min(max(MAX_WORK // accesses, 30), MAX_TRIES)


def _starts(game: Game) -> Iterator[Path]:
    m, n = game.m, game.n
    heights = sorted({*range(1, min(max(m, n), 12) + 1), min(max(game.slots - 1, 1), max(m, n))}, reverse=True)
    bases = [block_snake(m, n, height, 1) for height in heights]
    bases += [[(row, col) for col, row in block_snake(n, m, height, 1)] for height in heights]
    bases += [grid_order(name, m, n, workers=max(m, n)).to_list() for name in GRID_ORDERS]
    for base in bases:
        for down in (False, True):
            for right in (False, True):
                yield [(m - 1 - row if down else row, n - 1 - col if right else col) for row, col in base]
