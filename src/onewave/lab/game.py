"""The tile game's numbers: what orders cost on the page's grid, and the lower bound.

Two units. "panels": a tile of C needs a whole row panel of A and column panel of B, and slots hold panels
(tiles/search/panels.py). "tiles": a tile of C walks along K and needs A(i,k) and B(k,j) at step k; slots hold those
tiles. C's accumulator stays in registers and each tile of C is stored once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onewave.base.errors import InvalidArgumentError
from onewave.lab.fields import choice, whole
from onewave.tiles.order.orders import GRID_ORDERS, grid_order
from onewave.tiles.search.bounds import best_bound, gemm_bounds, panel_bounds
from onewave.tiles.search.panels import panel_loads, strip_snake_loads
from onewave.tiles.sim.caches import Stream, replay

GAME_POLICIES = ("lru", "fifo", "belady")
MAX_SIDE = 64
MAX_ACCESSES = 400_000
"""Most cache accesses of one game: about a second for all orders together."""


@dataclass(frozen=True)
class Game:
    """One setting of the game. m, n, k: tiles; slots: panels or tiles, as unit says; policy: a name in CACHES."""

    m: int
    n: int
    k: int
    slots: int
    unit: str
    policy: str

    def loads(self, order: Sequence[tuple[int, int]]) -> int:
        """Panels (or tiles) loaded while these tiles of C are computed."""
        if self.unit == "panels":
            return panel_loads(self.m, self.n, order, self.slots, self.policy)
        pairs = np.array(order, dtype=np.int64).reshape(-1, 2)
        along = np.arange(self.k, dtype=np.int64)
        a = pairs[:, :1] * self.k + along
        b = self.m * self.k + along * self.n + pairs[:, 1:]
        tiles = np.stack((a, b), axis=2).reshape(-1)
        ones = np.ones(len(tiles), dtype=np.int64)
        groups = np.repeat(np.arange(len(tiles) // 2, dtype=np.int64), 2)
        return replay(
            self.policy, Stream(tiles, np.zeros(len(tiles), dtype=np.bool_), ones, groups), self.slots
        ).num_loads

    def bound(self) -> tuple[str, int]:
        """The best lower bound on loads that applies, and its name."""
        if self.unit == "panels":
            best = best_bound(panel_bounds(self.m, self.n, self.slots))
            return best.name, math.ceil(best.value)
        # In units of tiles: a cache of `slots` beside one accumulator; C's stores are not loads.
        best = best_bound(gemm_bounds(self.m, self.n, self.k, self.slots, itemsize=1, accumulators=1))
        return best.name, max(math.ceil(best.value - 1e-9) - self.m * self.n, self.k * (self.m + self.n))


def game_from(given: Mapping[str, Any]) -> Game:
    """Read a game's setting. Raises InvalidArgumentError."""
    m, n, k = (whole(given, name, 3, MAX_SIDE) for name in ("m", "n", "k"))
    if 2 * m * n * k > MAX_ACCESSES:
        raise InvalidArgumentError(
            "game", got=f"{m} x {n} x {k} tiles", allowed=f"M x N x K up to {MAX_ACCESSES // 2:,}"
        )
    unit = choice(given, "unit", "panels", ("panels", "tiles"))
    slots = whole(given, "slots", 3, 100_000, least=2)
    return Game(m, n, k, slots, unit, choice(given, "policy", "lru", GAME_POLICIES))


def overview(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loads of every order in this game, with the paths; the bound; stores."""
    game = game_from(given)
    orders: dict[str, Any] = {}
    for name in GRID_ORDERS:
        # A band or strip as high as the cache allows is what these orders are for.
        text = f"{name}:{max(game.slots - 1, 1)}" if name == "grouped" and game.unit == "panels" else name
        made = grid_order(text, game.m, game.n, workers=max(game.m, game.n))
        path = made.to_list()
        orders[name] = {"name": text, "loads": game.loads(path), "path": path}
    bound, value = game.bound()
    strip = strip_snake_loads(game.m, game.n, game.slots) if game.unit == "panels" else None
    return {
        "orders": orders,
        "bound": {"name": bound, "loads": value},
        "strip_snake": strip,
        "stores": game.m * game.n,
    }


def sweep(given: Mapping[str, Any]) -> dict[str, Any]:
    """Panel loads of every grid order against the cache's size, with the bound."""
    rows, cols = whole(given, "m", 16, MAX_SIDE), whole(given, "n", 16, MAX_SIDE)
    policy = choice(given, "policy", "lru", GAME_POLICIES)
    sizes = sorted({min(max(round(2 * ((rows + cols) / 2) ** (i / 11)), 2), rows + cols) for i in range(12)})
    paths = {name: grid_order(name, rows, cols, workers=max(rows, cols)).to_list() for name in GRID_ORDERS}
    series = {name: [panel_loads(rows, cols, path, size, policy) for size in sizes] for name, path in paths.items()}
    bound = [math.ceil(best_bound(panel_bounds(rows, cols, size)).value) for size in sizes]
    return {"unit": "panel loads", "x": sizes, "x_unit": "panels of cache", "series": series, "bound": bound}
