"""Tensors cut into tiles, tasks that read and write them, and the dependencies that follow from that alone.

A `TileGraph` lists its tasks in program order: what each task reads is what the last writer before it wrote. Edges
are never typed in; `TileGraph.edges` derives all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError

Tile = tuple[str, tuple[int, ...]]
"""A tensor's name and the tile's index in the tensor's grid."""

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.int8]

MAX_TASKS = 4_000_000
"""Most tasks of a graph: beyond it a graph does not fit a workstation's memory as Python objects."""
MAX_ACCESSES = 40_000_000
"""Most tile accesses of a graph, for the same reason."""


def distinct(numbers: Ints) -> Ints:
    """The different numbers of an int64 array of any length, in order: np.unique, which NumPy 2.3 does by hashing, in
    five times the time of sorting."""
    ordered = np.sort(numbers)
    return ordered[np.concatenate((np.ones(min(1, len(ordered)), np.bool_), ordered[1:] != ordered[:-1]))]


def entries_of(start: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """The entries of some rows of a CSR, in the rows' order: which of the rows each belongs to, and its place."""
    counts = start[rows + 1] - start[rows]
    of = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
    return of, np.arange(len(of), dtype=np.int64) + np.repeat(start[rows] - np.cumsum(counts) + counts, counts)


@dataclass(frozen=True)
class Tensor:
    """A tensor cut into tiles; the last tile of a dimension holds what is left.

    shape, tile: elements a dimension, all at least 1. itemsize: bytes an element (0.5 for 4-bit weights).
    Raises InvalidArgumentError.
    """

    name: str
    shape: tuple[int, ...]
    tile: tuple[int, ...]
    itemsize: float

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.tile):
            raise InvalidArgumentError(
                f"tensor {self.name!r}: tile rank", got=str(len(self.tile)), allowed=f"{len(self.shape)}, the shape's"
            )
        for what, sizes in (("shape", self.shape), ("tile", self.tile)):
            if any(size < 1 for size in sizes):
                raise InvalidArgumentError(
                    f"tensor {self.name!r}: {what}", got=str(sizes), allowed="sizes of 1 or more"
                )
        if not (self.itemsize > 0 and math.isfinite(self.itemsize)):
            raise InvalidArgumentError(f"tensor {self.name!r}: itemsize", got=str(self.itemsize), allowed="above 0")

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Tiles along each dimension."""
        return tuple(-(-size // tile) for size, tile in zip(self.shape, self.tile, strict=True))

    @cached_property
    def num_tiles(self) -> int:
        """Tiles in all."""
        return math.prod(self.grid)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, rounded up."""
        return math.ceil(math.prod(self.shape) * self.itemsize)

    def tile_shape(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Elements of one tile along each dimension. Raises InvalidArgumentError for an index outside the grid."""
        if len(index) != len(self.grid) or not all(0 <= i < n for i, n in zip(index, self.grid, strict=True)):
            raise InvalidArgumentError(
                f"tile of {self.name!r}", got=str(index), allowed=f"an index inside the grid {self.grid}"
            )
        return tuple(min(t, s - i * t) for i, t, s in zip(index, self.tile, self.shape, strict=True))

    def tile_bytes(self, index: tuple[int, ...]) -> int:
        """Bytes of one tile, exact for the smaller ones at the edges (rounded up to whole bytes)."""
        return math.ceil(math.prod(self.tile_shape(index)) * self.itemsize)


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work of one worker.

    id: its place in program order. name: the kind of work ("gemm", "qkv"). reads, writes: tiles, reads in the order in
    which the task walks them. flops: multiplications plus additions. phase: the part of the model. index: which one of
    its kind, in the builder's own coordinates. A task that accumulates lists the tile in both reads and writes.
    """

    id: int
    name: str
    reads: tuple[Tile, ...]
    writes: tuple[Tile, ...]
    flops: int
    phase: str = ""
    index: tuple[int, ...] = ()


class EdgeKind(IntEnum):
    """Why one task must wait for another."""

    RAW = 0
    WAR = 1
    WAW = 2


class Edges(NamedTuple):
    """Dependencies, one entry each in all four arrays; a pair of tasks may occur under several tiles and kinds.

    producer, consumer: task ids, producer < consumer. kind: EdgeKind values. tile: the tile's number.
    """

    producer: Ints
    consumer: Ints
    kind: Bytes
    tile: Ints


class Accesses(NamedTuple):
    """Every access of a graph in program order, a task's reads before its writes, as given.

    task i owns entries start[i] to start[i + 1]. tile: numbers. is_write: bool.
    """

    start: Ints
    tile: Ints
    is_write: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TileGraph:
    """Tasks in program order over tiled tensors. Treat both fields as read-only.

    Raises InvalidArgumentError for ids that are not 0..n-1 in order, a tile of no tensor, or one outside its grid.
    """

    tensors: dict[str, Tensor]
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if name != tensor.name:
                raise InvalidArgumentError("tensor", got=f"{tensor.name!r} listed as {name!r}", allowed="its own name")
        for place, task in enumerate(self.tasks):
            if task.id != place:
                raise InvalidArgumentError(
                    f"task at place {place}", got=f"id {task.id}", allowed="ids 0..n-1 in program order"
                )
        _ = self.accesses  # numbering the accesses checks every tile

    @cached_property
    def tile_offset(self) -> dict[str, int]:
        """The number of each tensor's first tile; tiles are numbered tensor by tensor, row-major inside one."""
        offsets: dict[str, int] = {}
        total = 0
        for name, tensor in self.tensors.items():
            offsets[name] = total
            total += tensor.num_tiles
        return offsets

    @property
    def num_tiles(self) -> int:
        """Tiles of all tensors, touched or not."""
        return sum(tensor.num_tiles for tensor in self.tensors.values())

    def tile_number(self, tile: Tile) -> int:
        """A tile's number. Raises InvalidArgumentError for a tile that does not exist."""
        name, index = tile
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InvalidArgumentError("tile", got=f"{name}{list(index)}", allowed="tiles of the graph's tensors")
        tensor.tile_shape(index)
        number = 0
        for i, n in zip(index, tensor.grid, strict=True):
            number = number * n + i
        return self.tile_offset[name] + number

    def tile_at(self, number: int) -> Tile:
        """The tile with that number, the inverse of tile_number. Raises InvalidArgumentError."""
        for name, tensor in self.tensors.items():
            rest = number - self.tile_offset[name]
            if 0 <= rest < tensor.num_tiles:
                index: list[int] = []
                for n in reversed(tensor.grid):
                    rest, i = divmod(rest, n)
                    index.append(i)
                return name, tuple(reversed(index))
        raise InvalidArgumentError("tile number", got=str(number), allowed=f"0 to {self.num_tiles - 1}")

    @cached_property
    def accesses(self) -> Accesses:
        """Every access as arrays, computed once."""
        total = sum(len(task.reads) + len(task.writes) for task in self.tasks)
        if total > MAX_ACCESSES:
            raise InvalidArgumentError("tile accesses", got=f"{total:,}", allowed=f"up to {MAX_ACCESSES:,}")
        start = np.zeros(len(self.tasks) + 1, dtype=np.int64)
        tile = np.empty(total, dtype=np.int64)
        is_write = np.zeros(total, dtype=np.bool_)
        number = cache(self.tile_number)
        at = 0
        for task in self.tasks:
            first_write = at + len(task.reads)
            end = first_write + len(task.writes)
            tile[at:first_write] = list(map(number, task.reads))
            tile[first_write:end] = list(map(number, task.writes))
            is_write[first_write:end] = True
            start[task.id + 1] = at = end
        return Accesses(start, tile, is_write)

    @cached_property
    def access_tasks(self) -> Ints:
        """The task of each entry of `accesses`."""
        return np.repeat(np.arange(len(self.tasks), dtype=np.int64), np.diff(self.accesses.start))

    def tensor_of(self, numbers: Ints) -> Ints:
        """Which tensor each tile number belongs to, as its place in `tensors`."""
        ends = np.cumsum([tensor.num_tiles for tensor in self.tensors.values()], dtype=np.int64)
        return np.searchsorted(ends, numbers, side="right").astype(np.int64)

    def bytes_of_numbers(self, numbers: Ints) -> Ints:
        """Bytes of each numbered tile, exact at the edges. numbers: int64 of any length; returns int64 alike."""
        distinct, inverse = np.unique(numbers, return_inverse=True)
        ends = np.searchsorted(distinct, [self.tile_offset[name] for name in self.tensors] + [self.num_tiles]).tolist()
        found = np.zeros(len(distinct), dtype=np.int64)
        for place, (name, tensor) in enumerate(self.tensors.items()):
            mine = slice(ends[place], ends[place + 1])
            rest = distinct[mine] - self.tile_offset[name]
            elements = np.ones(len(rest), dtype=np.float64)
            for size, tile, n in zip(reversed(tensor.shape), reversed(tensor.tile), reversed(tensor.grid), strict=True):
                rest, i = np.divmod(rest, n)
                elements *= np.minimum(tile, size - i * tile)
            found[mine] = np.ceil(elements * tensor.itemsize).astype(np.int64)
        return found[inverse.reshape(-1)]

    @cached_property
    def edges(self) -> Edges:
        """Every dependency, derived from the reads and writes in program order.

        RAW: from a tile's last writer to each reader. WAW: from its last writer to the next. WAR: from each reader to
        the next writer. A task never depends on itself. Ordered by consumer. Beside one sort of the accesses by tile,
        time is linear in their number, and there are at most two edges an access.
        """
        order = np.argsort(self.accesses.tile, kind="stable")
        tile, task = self.accesses.tile[order], self.access_tasks[order]
        write = self.accesses.is_write[order]
        if len(tile):  # a tile listed twice by one task counts once
            same = (tile[1:] == tile[:-1]) & (task[1:] == task[:-1]) & (write[1:] == write[:-1])
            fresh = np.concatenate(([True], ~same))
            tile, task, write = tile[fresh], task[fresh], write[fresh]
        parts = linked(tile, task, write)
        producer, consumer = (np.concatenate([part[end] for part in parts]) for end in (0, 1))
        by_consumer = np.argsort(task[consumer], kind="stable")
        producer, consumer = producer[by_consumer], consumer[by_consumer]
        kinds = np.repeat(np.array(list(EdgeKind), dtype=np.int8), [len(part[0]) for part in parts])[by_consumer]
        return Edges(task[producer], task[consumer], kinds, tile[consumer])


def linked(place: Ints, task: Ints, write: npt.NDArray[np.bool_]) -> tuple[tuple[Ints, Ints], ...]:
    """Pairs (earlier, later) of accesses to one place by different tasks: RAW, WAR, WAW.

    place, task, write: of each access, sorted by place and in program order inside one. RAW and WAW: from the last
    write before; WAR: to the next write. The other pairs that must be ordered follow from these.
    """
    index = np.arange(len(place), dtype=np.int64)
    last = np.maximum.accumulate(np.where(write, index, -1))
    before = np.concatenate((np.full(min(1, len(place)), -1, dtype=np.int64), last[:-1]))
    after = np.minimum.accumulate(np.where(write, index, len(place))[::-1])[::-1]
    reads, writes = index[~write], index[write]

    def kept(source: Ints, target: Ints) -> tuple[Ints, Ints]:
        there = (source >= 0) & (target < len(place))
        source, target = source[there], target[there]
        there = (place[source] == place[target]) & (task[source] != task[target])
        return source[there], target[there]

    return kept(before[reads], reads), kept(reads, after[reads]), kept(before[writes], writes)
