"""On which level each intermediate lives: as near to the workers as it fits, by the traffic that this saves.

A worker takes whole row blocks, so a tile that only tasks of one row block touch may stay in that worker's private
memory; one that several workers touch needs a shared level. Welder (Shi et al. 2023, OSDI) connects operators at the
memory level where their tiles meet; here the tiles' lifetimes come from the graph and an interleaving of its stages,
and all placements are searched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.graph.stages import PART_ORDERS
from onewave.tiles.order.chain import coordinates
from onewave.tiles.order.orders import task_order
from onewave.tiles.sim.machine import MAX_WORKERS, CacheLevel

Ints = npt.NDArray[np.int64]

MEMORY = "memory"
MAX_INTERMEDIATES, MAX_LEVELS = 10, 4
MAX_CELLS = 4_000_000


@dataclass(frozen=True)
class Placed:
    """One intermediate. level: where it lives. accessed: bytes written and read there. peak: the most bytes of it that
    are alive at once, on the fullest worker for a private level, on all together for a shared one or memory.
    """

    tensor: str
    level: str
    accessed: int
    peak: int


@dataclass(frozen=True)
class Placement:
    """order: the interleaving. traffic: bytes of intermediates by level, outermost (memory) first. unplaced: the same
    bytes with everything in memory. rest: bytes of inputs and results, which are in memory anyway, without reuse.
    """

    order: str
    tensors: tuple[Placed, ...]
    traffic: dict[str, int]
    unplaced: int
    rest: int


@dataclass(frozen=True)
class Life:
    """An intermediate under one order: bytes alive at each step, on each worker and on all together."""

    tensor: str
    accessed: int
    private: npt.NDArray[np.int64] | None
    shared: Ints


def place_intermediates(
    graph: TileGraph, levels: Sequence[CacheLevel], workers: int = 132, orders: Sequence[str] = PART_ORDERS
) -> Placement:
    """Choose an interleaving and a level for every intermediate, so that the fewest bytes go out to memory.

    levels: from the workers outwards. Of placements with equal memory traffic, the one with the least traffic at the
    next level inwards, and so on. Workers run in step: at step s each runs the s-th task of its row blocks. A level
    holds all that is placed there at every step. Raises InvalidArgumentError.
    """
    if not 1 <= workers <= MAX_WORKERS:
        raise InvalidArgumentError("workers", got=str(workers), allowed=f"1 to {MAX_WORKERS}")
    if len(levels) > MAX_LEVELS or len({MEMORY, *(level.name for level in levels)}) <= len(levels):
        got = ", ".join(level.name for level in levels)
        raise InvalidArgumentError("levels", got=got, allowed=f"up to {MAX_LEVELS}, of different names, none {MEMORY}")
    names = _intermediates(graph)
    if len(names) > MAX_INTERMEDIATES:
        raise InvalidArgumentError("intermediates", got=str(len(names)), allowed=f"up to {MAX_INTERMEDIATES}")
    best: tuple[tuple[int, ...], int, str, list[Life], list[int]] | None = None
    for rank, name in enumerate(orders):
        lives = _lives(graph, names, task_order(graph, name), workers)
        lives.sort(key=lambda life: -life.accessed)
        cost, chosen = _assign(lives, levels)
        if best is None or (cost, rank) < best[:2]:
            best = (cost, rank, name, lives, chosen)
    assert best is not None
    cost, _, name, lives, chosen = best
    labels = [*(level.name for level in levels), MEMORY]
    placed = tuple(
        Placed(life.tensor, labels[at], life.accessed, _peak(life, levels[at] if at < len(levels) else None))
        for life, at in zip(lives, chosen, strict=True)
    )
    total = int(graph.bytes_of_numbers(graph.accesses.tile).sum())
    between = sum(life.accessed for life in lives)
    return Placement(name, placed, dict(zip(reversed(labels), cost, strict=True)), between, total - between)


def _intermediates(graph: TileGraph) -> list[str]:
    """Tensors that are written and then read, and whose every written tile is read."""
    tile, is_write = graph.accesses.tile, graph.accesses.is_write
    last_write = np.full(graph.num_tiles, -1, dtype=np.int64)
    last_read = last_write.copy()
    places = np.arange(len(tile), dtype=np.int64)
    np.maximum.at(last_write, tile[is_write], places[is_write])
    np.maximum.at(last_read, tile[~is_write], places[~is_write])
    found: list[str] = []
    for name, tensor in graph.tensors.items():
        mine = slice(graph.tile_offset[name], graph.tile_offset[name] + tensor.num_tiles)
        written = last_write[mine] >= 0
        if written.any() and (last_read[mine][written] > last_write[mine][written]).all():
            found.append(name)
    return found


def _lives(graph: TileGraph, names: list[str], order: Ints, workers: int) -> list[Life]:
    worker = coordinates(graph).row % workers
    step = np.empty(len(order), dtype=np.int64)
    by_worker = np.argsort(worker[order], kind="stable")
    dealt = order[by_worker]
    counts = np.bincount(worker, minlength=workers)
    step[dealt] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    steps = int(counts.max())
    if steps * workers > MAX_CELLS:
        raise InvalidArgumentError(
            "steps x workers", got=f"{steps * workers:,}", allowed=f"up to {MAX_CELLS:,}", next="Use larger tiles."
        )
    tile, is_write = graph.accesses.tile, graph.accesses.is_write
    tasks = graph.access_tasks
    lives: list[Life] = []
    for name in names:
        mine = (tile >= graph.tile_offset[name]) & (tile < graph.tile_offset[name] + graph.tensors[name].num_tiles)
        numbers, place = np.unique(tile[mine], return_inverse=True)
        sizes = graph.bytes_of_numbers(numbers)
        when, worker_of = step[tasks[mine]], worker[tasks[mine]]
        first = np.full(len(numbers), steps, dtype=np.int64)
        last = np.zeros(len(numbers), dtype=np.int64)
        np.minimum.at(first, place, np.where(is_write[mine], when, steps))
        np.maximum.at(last, place, when)
        low = np.full(len(numbers), workers, dtype=np.int64)
        high = np.zeros(len(numbers), dtype=np.int64)
        np.minimum.at(low, place, worker_of)
        np.maximum.at(high, place, worker_of)
        shared = np.zeros(steps + 1, dtype=np.int64)
        np.add.at(shared, first, sizes)
        np.add.at(shared, last + 1, -sizes)
        private = None
        if (low == high).all():
            private = np.zeros((workers, steps + 1), dtype=np.int64)
            np.add.at(private, (low, first), sizes)
            np.add.at(private, (low, last + 1), -sizes)
            private = np.cumsum(private, axis=1)[:, :-1]
        accessed = int(graph.bytes_of_numbers(tile[mine]).sum())
        lives.append(Life(name, accessed, private, np.cumsum(shared)[:-1]))
    return lives


def _peak(life: Life, level: CacheLevel | None) -> int:
    alive = life.private if level is not None and level.private and life.private is not None else life.shared
    return int(alive.max())


def _assign(lives: list[Life], levels: Sequence[CacheLevel]) -> tuple[tuple[int, ...], list[int]]:
    """Depth-first search with the best cost so far as the limit. Returns bytes by level, memory first, and levels."""
    best_cost: tuple[int, ...] | None = None
    best: list[int] = []
    held: list[npt.NDArray[np.int64] | None] = [None] * len(levels)

    def put(at: int, chosen: list[int], cost: list[int]) -> None:
        nonlocal best_cost, best
        # Costs only grow, so a part that already costs as much can't win.
        if best_cost is not None and tuple(cost) >= best_cost:
            return
        if at == len(lives):
            best_cost, best = tuple(cost), list(chosen)
            return
        life = lives[at]
        for level in range(len(levels) + 1):
            before = held[level] if level < len(levels) else None
            if level < len(levels):
                alive = life.private if levels[level].private else life.shared
                if alive is None:
                    continue
                both = alive if before is None else before + alive
                if both.max() > levels[level].capacity:
                    continue
                held[level] = both
            cost[len(levels) - level] += life.accessed
            put(at + 1, [*chosen, level], cost)
            cost[len(levels) - level] -= life.accessed
            if level < len(levels):
                held[level] = before

    put(0, [], [0] * (len(levels) + 1))
    assert best_cost is not None
    return best_cost, best
