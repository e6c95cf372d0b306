"""Orders of a whole graph's tasks: how a chain's stages interleave. Each is a linear extension of any graph.

An interleaving only states a wish, a sort key per task. The order is the wish where the dependencies allow it: of the
tasks whose producers are done, the one with the least key comes next.

A stage is a kind of work (name and phase); stages are numbered as they first appear. Task.index is read as (row block,
column, K split); what is missing counts as 0.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.graph import TileGraph

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Coordinates:
    """Where each task stands: stage, row block, column and K split, and how many columns and splits its stage has."""

    stage: Ints
    row: Ints
    column: Ints
    split: Ints
    num_columns: Ints
    num_splits: Ints
    stage_names: tuple[str, ...]


def coordinates(graph: TileGraph) -> Coordinates:
    """Read every task's coordinates off its name, phase and index."""
    stages: dict[tuple[str, str], int] = {}
    stage = np.array([stages.setdefault((t.phase, t.name), len(stages)) for t in graph.tasks], dtype=np.int64)
    padded = np.array([(*t.index, 0, 0, 0)[:3] for t in graph.tasks], dtype=np.int64).reshape(-1, 3)
    most = np.zeros((max(len(stages), 1), 3), dtype=np.int64)
    np.maximum.at(most, stage, padded)
    return Coordinates(
        stage=stage,
        row=padded[:, 0],
        column=padded[:, 1],
        split=padded[:, 2],
        num_columns=most[stage, 1] + 1,
        num_splits=most[stage, 2] + 1,
        stage_names=tuple(phase or name for phase, name in stages),
    )


def sequential(graph: TileGraph) -> Ints:
    """One stage after the other, as the program lists them."""
    return np.arange(len(graph.tasks), dtype=np.int64)


def rows(graph: TileGraph, parameter: int = 1) -> Ints:
    """`parameter` row blocks at a time through all stages."""
    at = coordinates(graph)
    return linear_extension(graph, (at.row // max(parameter, 1), at.stage))


def half_row(graph: TileGraph) -> Ints:
    """Half a row of the first GEMM, then what of the second reads it, then the other half.

    The second GEMM must be cut along K in 2 or more (a chain built with splits=2) for its half to be able to start;
    a task of a later stage belongs to the half that its last input falls in.
    """
    at = coordinates(graph)
    first = at.stage == 0
    half = np.where(
        first, 2 * at.column // at.num_columns, (2 * (at.split + 1) + at.num_splits - 1) // at.num_splits - 1
    )
    return linear_extension(graph, (at.row, half, at.stage))


def accumulate_first_column(graph: TileGraph) -> Ints:
    """As soon as tiles of the first GEMM's row exist, add their product to column 0 of the second; its rest follows.

    Works on a chain whose second GEMM is cut along K; with one cut per column of the first, tile by tile.
    """
    at = coordinates(graph)
    first = at.stage == 0
    late = ~first & (at.column > 0)
    # Where along the first GEMM's row a task belongs, in 1/4096: its own column's end, or its K split's end.
    end = np.where(first, 4096 * (at.column + 1) // at.num_columns, 4096 * (at.split + 1) // at.num_splits)
    return linear_extension(graph, (at.row, late, np.where(late, at.column, end), at.stage, at.split))


def bpt(graph: TileGraph) -> Ints:
    """Order tasks before attention first, then a row block's projection and FFN as soon as its attention ends.

    A graph without a phase "attention" is treated as if all of it came after. Source: Liu & Abbeel 2023,
    arXiv:2305.19370.
    """
    at = coordinates(graph)
    start = next((i for i, name in enumerate(at.stage_names) if "attention" in name), 0)
    after = at.stage >= start
    return linear_extension(graph, (after, np.where(after, at.row, at.stage), at.stage))


def critical_path(graph: TileGraph) -> Ints:
    """The ready task with the longest way to the end first, a task's own length being its FLOPs (at least 1)."""
    begin, later = successors(graph)
    start: list[int] = begin.tolist()
    after: list[int] = later.tolist()
    way = [max(task.flops, 1) for task in graph.tasks]
    for task in range(len(way) - 1, -1, -1):
        way[task] += max((way[after[i]] for i in range(start[task], start[task + 1])), default=0)
    return linear_extension(graph, (-np.array(way, dtype=np.float64),))


def successors(graph: TileGraph) -> tuple[Ints, Ints]:
    """Successors in the graph: task i's are after[start[i]:start[i + 1]], each once. Returns (start, after)."""
    n = len(graph.tasks)
    edges = graph.edges
    pairs = np.unique(edges.producer * n + edges.consumer)
    start = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(np.bincount(pairs // max(n, 1), minlength=n), out=start[1:])
    return start, pairs % max(n, 1)


def linear_extension(graph: TileGraph, keys: tuple[npt.NDArray[np.generic], ...]) -> Ints:
    """Order the tasks by keys (the first counts most, then program order) as far as the dependencies allow.

    Returns int64 task ids, every producer before its consumers. One sort where the wish is already possible.
    """
    n = len(graph.tasks)
    wish = np.lexsort((np.arange(n), *reversed(keys))).astype(np.int64)
    place = np.empty(n, dtype=np.int64)
    place[wish] = np.arange(n)
    edges = graph.edges
    if (place[edges.producer] < place[edges.consumer]).all():
        return wish
    start, after = successors(graph)
    missing: list[int] = np.bincount(after, minlength=n).tolist()
    begin: list[int] = start.tolist()
    later: list[int] = after.tolist()
    rank: list[int] = place.tolist()
    ready = [rank[task] for task in range(n) if not missing[task]]
    heapq.heapify(ready)
    order: list[int] = []
    wished: list[int] = wish.tolist()
    while ready:
        task = wished[heapq.heappop(ready)]
        order.append(task)
        for at in range(begin[task], begin[task + 1]):
            consumer = later[at]
            missing[consumer] -= 1
            if not missing[consumer]:
                heapq.heappush(ready, rank[consumer])
    return np.array(order, dtype=np.int64)


def by_grid(graph: TileGraph, order_of: Callable[[int, int], Ints]) -> Ints:
    """Stage after stage, each stage's (row, column) grid in the order that order_of(rows, cols) gives."""
    at = coordinates(graph)
    place = np.zeros(len(graph.tasks), dtype=np.int64)
    for stage in range(len(at.stage_names)):
        mine = at.stage == stage
        num_rows, num_cols = int(at.row[mine].max()) + 1, int(at.column[mine].max()) + 1
        if num_rows * num_cols > 64 * len(graph.tasks) + 1024:
            raise InvalidArgumentError(
                "order", got="a tile order", allowed="stages whose tasks form a grid", next='Use "sequential".'
            )
        tiles = order_of(num_rows, num_cols)
        rank = np.empty(num_rows * num_cols, dtype=np.int64)
        rank[tiles[:, 0] * num_cols + tiles[:, 1]] = np.arange(num_rows * num_cols)
        place[mine] = rank[at.row[mine] * num_cols + at.column[mine]]
    return linear_extension(graph, (at.stage, place, at.split))
