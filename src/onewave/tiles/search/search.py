"""search: the order of C's tiles that loads the fewest panels, with a lower bound and whether it is proven least.

The model is that of tiles/search/panels.py: a tile of C needs a row panel of A and a column panel of B, a cache holds
`capacity` whole panels, a load costs 1. Belady counts the best evictions an order allows, LRU those of a cache that
sees row panel, column panel, row panel, ... one by one.
"""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from onewave.base.errors import InvalidArgumentError, check_one_of
from onewave.tiles.search.bounds import panel_bound
from onewave.tiles.search.local import improve
from onewave.tiles.search.panel_bound import pair_bound
from onewave.tiles.search.panels import MAX_PANEL_TILES, check_game, panel_loads
from onewave.tiles.search.spaces import BeladySpace, LruSpace
from onewave.tiles.search.starts import Path, block_snake, renamed, starting_orders
from onewave.tiles.search.tree import astar, beam

METHODS = ("auto", "exact", "beam", "local")
POLICIES = ("belady", "lru")

MAX_STATES_OF = 4096
"""Most tiles of a grid that exact and beam search take on: a state's size grows with it."""
MAX_TRIES = 200_000
FIRST_WIDTH, LAST_WIDTH = 4, 4096


@dataclass(frozen=True)
class Step:
    """The search's state at a time: seconds since its start, the fewest loads found, the best bound, and how."""

    seconds: float
    loads: int
    bound: int
    by: str


@dataclass(frozen=True)
class SearchResult:
    """The best order found. order: (row, column) pairs. bound: no order from that start has fewer loads.

    page_fetch: the simplest bound by formula, before pairs of panels and the search raised it. proven: loads equals
    bound. expanded: states that the exact search looked at. history: every improvement of loads or bound.
    """

    rows: int
    cols: int
    capacity: int
    policy: str
    start: tuple[int, int]
    method: str
    loads: int
    bound: int
    page_fetch: int
    order: Path
    expanded: int
    seconds: float
    history: tuple[Step, ...]

    @property
    def proven(self) -> bool:
        """Whether no order has fewer loads."""
        return self.loads == self.bound

    @property
    def gap(self) -> float:
        """loads / bound - 1."""
        return self.loads / self.bound - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        facts = {"cache_panels": self.capacity, "page_fetch_bound": self.page_fetch, "gap": self.gap}
        facts |= {name: value for name, value in asdict(self).items() if name not in ("capacity", "page_fetch")}
        return facts | {"proven": self.proven, "start": list(self.start), "order": [list(tile) for tile in self.order]}


@dataclass
class Hunt:
    """The best order and bound so far."""

    rows: int
    cols: int
    capacity: int
    policy: str
    began: float
    deadline: float
    bound: int
    loads: int
    order: Path
    expanded: int = 0
    history: list[Step] = field(default_factory=lambda: list[Step]())

    @property
    def over(self) -> bool:
        return self.loads <= self.bound or time.monotonic() > self.deadline

    def count(self, path: Path) -> int:
        return panel_loads(self.rows, self.cols, path, self.capacity, self.policy)

    def offer(self, path: Path, loads: int, by: str) -> None:
        if loads < self.loads:
            self.loads, self.order = loads, path
            self.note(by)

    def raise_bound(self, bound: int, by: str) -> None:
        if bound > self.bound:
            self.bound = bound
            self.note(by)

    def note(self, by: str) -> None:
        self.history.append(Step(time.monotonic() - self.began, self.loads, self.bound, by))


def search_panels(
    rows: int,
    cols: int,
    capacity: int,
    policy: str = "belady",
    *,
    start: tuple[int, int] = (0, 0),
    method: str = "auto",
    time_limit: float = 10.0,
) -> SearchResult:
    """Find the order of a rows x cols grid of C's tiles that loads the fewest panels.

    capacity: panels, at least 2. policy: belady or lru. start: the tile that comes first. method: exact (A* over
    undone tiles and resident panels: proves the least, or raises the bound until time is up), beam (beam search of
    growing width), local (simulated annealing from the best order so far), auto (A* for 40 % of the time, the beam for
    30 %, then local search). time_limit: seconds; the answer is whatever is known then. Every method first tries block
    snakes and the grid orders, and ends as soon as the loads meet the bound. Raises InvalidArgumentError.
    """
    _check(rows, cols, capacity, policy, start, method, time_limit)
    began = time.monotonic()
    page_fetch = panel_bound(rows, cols, capacity)
    order = block_snake(rows, cols, min(capacity - 1, rows), max(1, min(cols, capacity - min(capacity - 1, rows))))
    loads = panel_loads(rows, cols, order, capacity, policy)
    hunt = Hunt(rows, cols, capacity, policy, began, began + time_limit, page_fetch, loads, order)
    hunt.note("strip snake")
    hunt.raise_bound(_first_bound(hunt), "pairs of panels")
    for make in starting_orders(rows, cols, capacity):
        if hunt.over:
            break
        path = make()
        hunt.offer(path, hunt.count(path), "regular order")
    if method == "exact" or (method == "auto" and rows * cols <= MAX_STATES_OF):
        _exact(hunt, began + time_limit * (1.0 if method == "exact" else 0.4))
    if method == "beam" or (method == "auto" and rows * cols <= MAX_STATES_OF):
        _beam(hunt, began + time_limit * (1.0 if method == "beam" else 0.7))
    if method in ("local", "auto"):
        _local(hunt, hunt.deadline)
    return SearchResult(
        rows=rows,
        cols=cols,
        capacity=capacity,
        policy=policy,
        start=start,
        method=method,
        loads=hunt.loads,
        bound=hunt.bound,
        page_fetch=page_fetch,
        order=renamed(hunt.order, rows, cols, start),
        expanded=hunt.expanded,
        seconds=time.monotonic() - began,
        history=tuple(hunt.history),
    )


def _space(hunt: Hunt) -> Any:
    space = BeladySpace if hunt.policy == "belady" else LruSpace
    return space(hunt.rows, hunt.cols, hunt.capacity)


def _first_bound(hunt: Hunt) -> int:
    """Return the lower bound on loads that is known before any search."""
    if hunt.rows * hunt.cols > MAX_STATES_OF:
        return pair_bound(hunt.rows, hunt.cols, hunt.capacity)
    space = _space(hunt)
    state, loads = space.first()
    return loads + space.floor(state)


def _exact(hunt: Hunt, deadline: float) -> None:
    if hunt.over:
        return
    found = astar(_space(hunt), hunt.loads, deadline)
    hunt.expanded += found.expanded
    _take(hunt, found.tiles, "A*")
    hunt.raise_bound(min(found.bound, hunt.loads), "A*")


def _beam(hunt: Hunt, deadline: float) -> None:
    width = FIRST_WIDTH
    while not hunt.over and width <= LAST_WIDTH:
        found = beam(_space(hunt), width, hunt.loads, deadline)
        _take(hunt, found.tiles, f"beam of {width}")
        if not found.done:
            return
        width *= 4


def _local(hunt: Hunt, deadline: float) -> None:
    if not hunt.over:
        for path, loads in improve(hunt.order, hunt.count, hunt.bound, MAX_TRIES, deadline=deadline):
            hunt.offer(path, loads, "local search")


def _take(hunt: Hunt, tiles: tuple[int, ...] | None, by: str) -> None:
    """Count a path as the simulator does: it may even be cheaper than the search thought."""
    if tiles is not None:
        path = [divmod(tile, hunt.cols) for tile in tiles]
        hunt.offer(path, hunt.count(path), by)


def _check(
    rows: int, cols: int, capacity: int, policy: str, start: tuple[int, int], method: str, time_limit: float
) -> None:
    if rows * cols > MAX_PANEL_TILES:
        raise InvalidArgumentError("grid", got=f"{rows} x {cols} tiles", allowed=f"1 to {MAX_PANEL_TILES:,} in all")
    check_game(rows, cols, capacity)
    check_one_of("policy", policy, POLICIES)
    check_one_of("method", method, METHODS)
    if not (0 <= start[0] < rows and 0 <= start[1] < cols):
        allowed = f"a tile inside the {rows} x {cols} grid"
        raise InvalidArgumentError("start", got=f"{start[0]},{start[1]}", allowed=allowed)
    if method in ("exact", "beam") and rows * cols > MAX_STATES_OF:
        allowed, next = f"up to {MAX_STATES_OF:,}", "Use local, or larger tiles."
        raise InvalidArgumentError(f"method {method}", got=f"{rows * cols:,} tiles", allowed=allowed, next=next)
    check_time_limit(time_limit)


def check_time_limit(seconds: float) -> None:
    """Refuse a limit that is none. Raises InvalidArgumentError."""
    if not 0 < seconds < 1e9:
        raise InvalidArgumentError("time limit", got=f"{seconds}", allowed="above 0 and below 10^9 seconds")
