"""The feed-forward block as a task graph for the wave: which worker streams which rows when, in five orders.

Everything that decides about rounding (tile shape, slices of K) depends on the sizes alone, never on the number of
workers, so any number of workers gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.tiles.builders import Builder, cuts
from onewave.tiles.graph import TileGraph
from onewave.tiles.policies import POLICIES, plan
from onewave.tiles.table import TaskTable, lower
from onewave.tiles.verify import verify
from onewave.wave.layout import TileShape, tile_shape
from onewave.wave.program import INPUT, OUTPUT, Operation, WaveProgram, build_program, slice_bounds

__all__ = ["DATA", "ORDERS", "FFNPlan", "FFNSizes", "plan_ffn"]

DATA = "data"
"""The policy by which every word of a hidden activation is its own flag."""
ORDERS = ("row", "half_row", "sm_local", "sequential")
"""row: all of the hidden row, then the down projection. half_row: half the hidden row, the down projection of that
half, then the other half. sm_local: a worker that made a slice of the hidden row multiplies it with its slice of
W_down. sequential: two launches."""

# Partial sums of SM-local slices are exchanged whole: what that may cost in words.
_MOST_PARTIAL_WORDS = 1 << 26


@dataclass(frozen=True)
class FFNSizes:
    """x [batch, hidden] -> [batch, intermediate] -> [batch, out]; batch padded to a power of two."""

    batch: int
    hidden: int
    intermediate: int
    out: int
    gated: bool


@dataclass(frozen=True)
class FFNPlan:
    """One launch (two for `sequential`): its graph, its proved table, and what the kernel reads."""

    graphs: tuple[TileGraph, ...]
    tables: tuple[TaskTable, ...]
    programs: tuple[WaveProgram, ...]

    splits: tuple[int, int]
    """Slices of K of the two products."""


@lru_cache(maxsize=64)
def plan_ffn(sizes: FFNSizes, *, workers: int, order: str = "row", policy: str = DATA) -> FFNPlan:
    """Plan, prove and lower. Raises InvalidArgumentError, ShapeError, UnsupportedError."""
    if order not in ORDERS:
        raise InvalidArgumentError("ffn: order", got=repr(order), allowed=", ".join(ORDERS))
    if policy != DATA and policy not in POLICIES:
        raise InvalidArgumentError("ffn: policy", got=repr(policy), allowed=", ".join([DATA, *POLICIES]))
    if workers < 1:
        raise InvalidArgumentError("ffn: workers", got=str(workers), allowed="1 or more")
    for name in ("hidden", "intermediate", "out"):
        size = getattr(sizes, name)
        if size < 64 or size % 64:
            raise ShapeError(f"ffn: {name} size", got=str(size), allowed="multiples of 64")
    # A worker keeps slices of 128 columns to itself: tiles as narrow as that.
    shape = tile_shape(sizes.batch, rows=64) if order == "sm_local" else tile_shape(sizes.batch)
    names = (("up",), ("down",)) if order == "sequential" else (("up", "down"),)
    operations = [_operations(sizes, shape, order, stages) for stages in names]
    made = [
        _one_launch(each, shape, workers, order, policy, stages, sizes.batch)
        for each, stages in zip(operations, names, strict=True)
    ]
    graphs, tables, programs = zip(*made, strict=True)
    slices = {name: operation.slices for each in operations for name, operation in each.items()}
    return FFNPlan(graphs, tables, programs, (slices["up"], slices["down"]))


def _one_launch(
    operations: dict[str, Operation],
    shape: TileShape,
    workers: int,
    order: str,
    policy: str,
    stages: tuple[str, ...],
    batch: int,
) -> tuple[TileGraph, TaskTable, WaveProgram]:
    deal = _Deal(operations, shape, workers, batch)
    for part in _parts(operations, order, stages):
        deal.add(part)
    graph = deal.build.graph()
    schedule = plan(
        graph,
        np.arange(len(graph.tasks)),
        "tile" if policy == DATA else policy,
        workers=workers,
        co_resident=workers,
        queues=deal.queues,
    )
    table = lower(verify(schedule))
    return graph, table, build_program(graph, table, operations, shape)


def _operations(sizes: FFNSizes, shape: TileShape, order: str, stages: tuple[str, ...]) -> dict[str, Operation]:
    up_rows = sizes.intermediate * (2 if sizes.gated else 1)
    up_slices = _slices(sizes.hidden, shape)
    down_slices = _slices(sizes.intermediate, shape)
    if order == "half_row":
        down_slices += down_slices % 2
        _check_tiles(order, sizes.intermediate, shape, 2)
        down_slices = max(2, down_slices)
    elif order == "sm_local":
        if up_slices > 1:
            raise UnsupportedError("ffn: order sm_local", got=f"{sizes.batch} rows of {sizes.hidden}", next="Use row.")
        down_slices = -(-sizes.intermediate // shape.cols)
        if down_slices * sizes.out * shape.batch > _MOST_PARTIAL_WORDS:
            raise UnsupportedError("ffn: order sm_local", got=f"batch {sizes.batch}", allowed="smaller batches")
    found: dict[str, Operation] = {}
    if "up" in stages:
        target = OUTPUT if "down" not in stages else "h"
        _stage(found, "up", up_rows, sizes.hidden, up_slices, INPUT, target, activation=True, gated=sizes.gated)
    if "down" in stages:
        source = INPUT if "up" not in stages else "h"
        _stage(found, "down", sizes.out, sizes.intermediate, down_slices, source, OUTPUT)
    return found


def _check_tiles(order: str, cols: int, shape: TileShape, least: int) -> None:
    if -(-cols // shape.cols) < least:
        allowed = f"more than {shape.cols} columns"
        raise UnsupportedError(f"ffn: order {order}", got=f"intermediate size {cols}", allowed=allowed, next="Use row.")


def _slices(cols: int, shape: TileShape) -> int:
    """Fewest slices of K whose activations fit shared memory."""
    return cuts(cuts(cols, shape.cols), shape.most_tiles)


def _stage(
    found: dict[str, Operation],
    name: str,
    rows: int,
    cols: int,
    slices: int,
    source: str,
    target: str,
    *,
    activation: bool = False,
    gated: bool = False,
) -> None:
    if slices == 1:
        found[name] = Operation(name, rows, cols, 1, source, target, False, activation, gated)
        return
    sums = f"{name}_parts"
    found[name] = Operation(name, rows, cols, slices, source, sums, partial=True)
    found[f"{name}_sum"] = Operation(None, rows, cols, slices, sums, target, False, activation, gated)


@dataclass(frozen=True)
class _Part:
    """Work that is dealt out together: row blocks [first, last) of an operation, over slices [low, high) of K."""

    operation: str
    first: int
    last: int
    low: int = 0
    high: int = 1


@dataclass(frozen=True)
class _Local:
    """Slices of the hidden row, each with its rows of the first product and its slice of the second."""

    slices: int


def _parts(operations: dict[str, Operation], order: str, stages: tuple[str, ...]) -> list[_Part | _Local]:
    if order == "sm_local":
        return [_Local(operations["down"].slices), _Part("down_sum", 0, -1)]
    halves = 2 if order == "half_row" else 1
    found: list[_Part | _Local] = []
    for half in range(halves):
        for stage in stages:
            operation = operations[stage]
            if stage == "up" or halves == 1:
                found.append(_Part(stage, half, halves, 0, operation.slices))
                if operation.partial and (stage == "up" or halves == 1):
                    found.append(_Part(f"{stage}_sum", half, halves))
            else:
                middle = operation.slices // 2
                low, high = (0, middle) if half == 0 else (middle, operation.slices)
                found.append(_Part(stage, 0, 1, low, high))
    if halves == 2:
        found.append(_Part("down_sum", 0, 1))
    return found


@dataclass
class _Deal:
    """Deals work out to workers as it comes, evenly in each part, the rest to who has least so far."""

    operations: dict[str, Operation]
    shape: TileShape
    workers: int
    batch: int
    build: Builder = field(default_factory=lambda: Builder("bf16"))
    queues: list[list[int]] = field(default_factory=list[list[int]])
    load: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.queues = [[] for _ in range(self.workers)]
        self.load = [0] * self.workers
        rows, batch = self.shape.rows, self.shape.batch
        for name, operation in self.operations.items():
            bounds = slice_bounds(operation.cols, operation.slices, self.shape)
            if operation.source == INPUT:
                self.build.tensor(INPUT, (batch, operation.cols), (batch, 64))
            if operation.weight is not None:
                width = max(b - a for a, b in pairwise(bounds))
                self.build.tensor(f"W_{name}", (operation.rows, width * operation.slices), (rows, width))
            if operation.partial:
                grid = (operation.slices, operation.rows)
                self.build.tensor(operation.target, grid, (1, rows), 4 * batch)
            else:
                height = self.shape.piece if operation.weight is None else rows
                width = height // 2 if operation.gated else height
                self.build.tensor(operation.target, (batch, operation.outputs), (batch, width))

    def add(self, part: _Part | _Local) -> None:
        """Deal one part out."""
        if isinstance(part, _Local):
            self._add_local(part)
            return
        operation = self.operations[part.operation]
        height = self.shape.piece if operation.weight is None else self.shape.rows
        blocks = operation.rows // height
        if part.last > 0:
            first, last = blocks * part.first // part.last, blocks * (part.first + 1) // part.last
        else:
            first, last = 0, blocks
        count = last - first
        units = count * (part.high - part.low)
        shares = [units // self.workers] * self.workers
        for worker in sorted(range(self.workers), key=lambda w: (self.load[w], w * 37 % self.workers))[
            : units % self.workers
        ]:
            shares[worker] += 1
        at = 0
        for worker, share in enumerate(shares):
            end = at + share
            while at < end:  # a share may run over several slices of K
                slice_of, block = divmod(at, count)
                run = min(end - at, count - block)
                self._task(worker, part.operation, first + block, run, part.low + slice_of)
                at += run

    def _add_local(self, part: _Local) -> None:
        up, down = self.operations["up"], self.operations["down"]
        bounds = slice_bounds(down.cols, down.slices, self.shape)
        per_value = 2 if up.gated else 1
        for number in range(part.slices):
            worker = number * self.workers // part.slices
            first, last = (bound * per_value // self.shape.rows for bound in bounds[number : number + 2])
            self._task(worker, "up", first, last - first, 0)
            self._task(worker, "down", 0, down.rows // self.shape.rows, number)

    def _task(self, worker: int, name: str, first: int, blocks: int, part: int) -> None:
        operation = self.operations[name]
        tensors = self.build.tensors
        bounds = slice_bounds(operation.cols, operation.slices, self.shape)
        if operation.weight is None:
            a, b = first * self.shape.piece // self.shape.rows, (first + blocks) * self.shape.piece - 1
            span = range(a, b // self.shape.rows + 1)
            reads = tuple((operation.source, (k, row)) for k in range(operation.slices) for row in span)
            flops = blocks * self.shape.piece * operation.slices * self.batch
        else:
            source = tensors[operation.source]
            width = source.tile[1]
            columns = range(bounds[part] // width, -(-bounds[part + 1] // width))
            reads = tuple((operation.source, (0, column)) for column in columns)
            reads += tuple((f"W_{name}", (first + i, part)) for i in range(blocks))
            span_columns = bounds[part + 1] - bounds[part]
            flops = 2 * blocks * self.shape.rows * span_columns * self.batch
            self.load[worker] += blocks * -(-span_columns // self.shape.cols)
        if operation.partial:
            writes: Sequence[tuple[str, tuple[int, ...]]] = [
                (operation.target, (part, first + i)) for i in range(blocks)
            ]
        else:
            writes = [(operation.target, (0, first + i)) for i in range(blocks)]
        phase = name.removesuffix("_sum")
        task = self.build.task(name, reads, tuple(writes), flops, phase=phase, index=(first, blocks, part))
        self.queues[worker].append(task.id)
