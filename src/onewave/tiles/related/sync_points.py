"""Where one launch of several operators needs a grid-wide barrier, and where none.

If every task that an operator's task depends on ran on the same worker before, no barrier is needed between the two: a
worker is ordered with itself. Souffle (Xia et al. 2024, ASPLOS, doi 10.1145/3617232.3624858) fuses across such
element-wise relations and puts a grid sync only where one task relies on many. Here that is read off the tiles
themselves: every dependency (RAW, WAR, WAW) that crosses workers needs a barrier somewhere between its two operators.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError, check_one_of
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.graph.stages import Stages, stages_of
from onewave.tiles.order.chain import coordinates
from onewave.tiles.sim.machine import MAX_WORKERS

Ints = npt.NDArray[np.int64]

MAPPINGS = ("follow", "deal", "row", "column")


@dataclass(frozen=True)
class StagePair:
    """Two operators with dependencies: how many pairs of tasks, how many of them on different workers."""

    producer: str
    consumer: str
    pairs: int
    crossing: int


@dataclass(frozen=True)
class SyncPlan:
    """stages: the operators in program order. barriers: the stages that a grid sync must precede, the fewest possible.

    pairs: every two operators that depend on each other. inside: operators with dependencies between workers among
    their own tasks (a split sum, say), which no barrier between operators can order; they need flags of their own.
    busy: the share of worker slots that have a task, over all operators.
    """

    stages: tuple[str, ...]
    barriers: tuple[int, ...]
    pairs: tuple[StagePair, ...]
    inside: tuple[str, ...]
    workers: int
    mapping: str
    busy: float

    @property
    def boundaries(self) -> int:
        """Boundaries between operators: a launch each would sync at every one."""
        return len(self.stages) - 1


def grid_syncs(graph: TileGraph, workers: int = 132, mapping: str = "follow") -> SyncPlan:
    """Find the fewest grid syncs that order all dependencies between workers.

    mapping: how an operator's tasks are dealt out: "deal" (its i-th task to worker i mod workers), "row" or "column"
    (by the task's row block or column), "follow" (to the one worker that ran all it depends on, where there is one and
    it has not had its share of this operator yet; else as "deal", to the next that has not). Each dependency is an
    interval of boundaries. One of them must have a barrier; taking each interval's end as late as possible gives the
    fewest. Raises InvalidArgumentError.
    """
    if not 1 <= workers <= MAX_WORKERS:
        raise InvalidArgumentError("workers", got=str(workers), allowed=f"1 to {MAX_WORKERS}")
    check_one_of("mapping", mapping, MAPPINGS)
    stages = stages_of(graph)
    count = len(stages.names)
    worker = _workers(graph, stages, workers, mapping)
    edges = graph.edges
    links = np.unique(edges.producer * len(graph.tasks) + edges.consumer)
    producer, consumer = links // len(graph.tasks), links % len(graph.tasks)
    boundary = stages.of[producer] * count + stages.of[consumer]
    crosses = worker[producer] != worker[consumer]
    kinds, where = np.unique(boundary, return_inverse=True)
    totals: list[int] = np.bincount(where, minlength=len(kinds)).tolist()
    crossings: list[int] = np.bincount(where[crosses], minlength=len(kinds)).tolist()
    named: list[int] = kinds.tolist()
    pairs: list[tuple[int, int, StagePair]] = []
    inside: list[str] = []
    for kind, total, crossing in zip(named, totals, crossings, strict=True):
        first, second = divmod(kind, count)
        if first == second:
            inside += [stages.names[first]] if crossing else []
        else:
            pairs.append((first, second, StagePair(stages.names[first], stages.names[second], total, crossing)))
    return SyncPlan(
        stages=stages.names,
        barriers=_fewest(sorted((second, first) for first, second, pair in pairs if pair.crossing)),
        pairs=tuple(pair for _, _, pair in pairs),
        inside=tuple(inside),
        workers=workers,
        mapping=mapping,
        busy=_busy(stages, worker, workers),
    )


def _workers(graph: TileGraph, stages: Stages, workers: int, mapping: str) -> Ints:
    if mapping == "deal":
        return stages.rank % workers
    if mapping == "follow":
        return _followed(graph, stages, workers)
    at = coordinates(graph)
    return (at.row if mapping == "row" else at.column) % workers


def _followed(graph: TileGraph, stages: Stages, workers: int) -> Ints:
    edges = graph.edges
    start: list[int] = np.searchsorted(edges.consumer, np.arange(len(graph.tasks) + 1)).tolist()
    producers: list[int] = edges.producer.tolist()
    ends = np.searchsorted(stages.of, np.arange(len(stages.names) + 1)).tolist()
    found = [0] * len(graph.tasks)
    for first, end in itertools.pairwise(ends):
        share = -(-(end - first) // workers)
        load = [0] * workers
        left: list[int] = []
        for task in range(first, end):
            # Only other stages: a task's own stage is being dealt out.
            before = {found[producer] for producer in producers[start[task] : start[task + 1]] if producer < first}
            if len(before) == 1 and load[next(iter(before))] < share:
                found[task] = before.pop()
                load[found[task]] += 1
            else:
                left.append(task)
        slots = (worker for turn in range(share) for worker in range(workers) if load[worker] <= turn)
        for task, worker in zip(left, slots, strict=False):
            found[task] = worker
    return np.array(found, dtype=np.int64)


def _fewest(intervals: list[tuple[int, int]]) -> tuple[int, ...]:
    """intervals: (consumer, producer) stages by consumer; a barrier before stage b orders those with p < b <= c."""
    barriers: list[int] = []
    for consumer, producer in intervals:
        if not barriers or barriers[-1] <= producer:
            barriers.append(consumer)
    return tuple(barriers)


def _busy(stages: Stages, worker: Ints, workers: int) -> float:
    """Tasks over the slots that they take: each operator lasts as long as its fullest worker."""
    load = np.bincount(stages.of * workers + worker, minlength=len(stages.names) * workers)
    return len(worker) / (workers * int(load.reshape(-1, workers).max(axis=1).sum()))
