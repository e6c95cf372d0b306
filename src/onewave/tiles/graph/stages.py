"""A graph's operators: runs of consecutive tasks of one kind; parts of a graph, and what a part moves on its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.graph import Task, TileGraph, entries_of
from onewave.tiles.order.orders import task_order
from onewave.tiles.sim.caches import Stream, replay

Ints = npt.NDArray[np.int64]

PART_ORDERS = ("sequential", "row-by-row", "rows:2", "half-row", "accumulate-first-column")
"""Orders to try for a part of a graph."""


@dataclass(frozen=True)
class Stages:
    """names: of every stage, numbered where a name comes again. of: each task's stage. rank: its place in the stage."""

    names: tuple[str, ...]
    of: Ints
    rank: Ints

    def tasks(self, stages: Sequence[int]) -> Ints:
        """The ids of the tasks of these stages, in program order."""
        return np.flatnonzero(np.isin(self.of, np.array(list(stages), dtype=np.int64))).astype(np.int64)


def stages_of(graph: TileGraph) -> Stages:
    """Cut the program order into runs of tasks with the same phase and name. Raises InvalidArgumentError for none."""
    if not graph.tasks:
        raise InvalidArgumentError("graph", got="no tasks", allowed="1 or more")
    names: list[str] = []
    seen: dict[str, int] = {}
    of = np.zeros(len(graph.tasks), dtype=np.int64)
    before: tuple[str, str] | None = None
    for task in graph.tasks:
        if (task.phase, task.name) != before:
            before = (task.phase, task.name)
            count = seen[task.name] = seen.get(task.name, 0) + 1
            names.append(task.name if count == 1 else f"{task.name} {count}")
        of[task.id] = len(names) - 1
    first = np.searchsorted(of, np.arange(len(names)))
    return Stages(tuple(names), of, np.arange(len(of), dtype=np.int64) - first[of])


def subgraph(graph: TileGraph, ids: Ints) -> TileGraph:
    """The tasks with these ids (ascending) as a graph of their own, renumbered; tensors stay as they are."""
    numbers: list[int] = ids.tolist()
    tasks = [graph.tasks[number] for number in numbers]
    return TileGraph(
        graph.tensors,
        tuple(Task(i, t.name, t.reads, t.writes, t.flops, t.phase, t.index) for i, t in enumerate(tasks)),
    )


@dataclass(frozen=True)
class PartTraffic:
    """The bytes that a part of a graph loads and stores when it runs on its own in `order`."""

    order: str
    loads: int
    stores: int

    @property
    def moved(self) -> int:
        """Bytes loaded and stored."""
        return self.loads + self.stores


def part_traffic(
    graph: TileGraph,
    ids: Ints,
    capacity: int,
    policy: str = "belady",
    orders: Sequence[str] = PART_ORDERS,
) -> PartTraffic:
    """The least traffic of the tasks with these ids, run on their own through an empty on-chip memory.

    capacity: bytes. orders: names in ORDERS to try, one task after the other. A tile is stored when it is evicted
    before its last use, or when something outside the part reads it or nothing ever does (a result); an intermediate
    that dies on chip is never stored. Raises InvalidArgumentError.
    """
    part = subgraph(graph, ids)
    kept = _needed_after(graph, ids)
    best: PartTraffic | None = None
    seen: set[bytes] = set()
    for name in orders:
        order = task_order(part, name)
        if order.tobytes() in seen:
            continue
        seen.add(order.tobytes())
        loads, stores = _replayed(part, order, capacity, policy, kept)
        if best is None or loads + stores < best.moved:
            best = PartTraffic(name, loads, stores)
    assert best is not None
    return best


def _needed_after(graph: TileGraph, ids: Ints) -> npt.NDArray[np.bool_]:
    """bool per tile number: must a tile that the part wrote outlive it?"""
    start, tile, is_write = graph.accesses
    inside = np.zeros(len(graph.tasks), dtype=np.bool_)
    inside[ids] = True
    mine = np.repeat(inside, np.diff(start))
    places = np.arange(len(tile), dtype=np.int64)

    def last(chosen: npt.NDArray[np.bool_]) -> Ints:
        found = np.full(graph.num_tiles, -1, dtype=np.int64)
        np.maximum.at(found, tile[chosen], places[chosen])
        return found

    written, read, read_outside = last(mine & is_write), last(mine & ~is_write), last(~mine & ~is_write)
    is_result = (read < written) & (read_outside < written)
    return (written >= 0) & ((read_outside > written) | is_result)


def _replayed(part: TileGraph, order: Ints, capacity: int, policy: str, kept: npt.NDArray[np.bool_]) -> tuple[int, int]:
    start, tile, is_write = part.accesses
    _, source = entries_of(start, order)
    numbers = tile[source]
    result = replay(policy, Stream(numbers, is_write[source], part.bytes_of_numbers(numbers)), capacity)
    last_use = np.full(part.num_tiles, -1, dtype=np.int64)
    np.maximum.at(last_use, numbers, np.arange(len(numbers), dtype=np.int64))
    out = result.evicted_tile[result.evicted_dirty]
    at = result.evicted_at[result.evicted_dirty]
    stored = out[kept[out] | (last_use[out] > at)]
    return result.loaded_bytes, int(part.bytes_of_numbers(stored).sum())
