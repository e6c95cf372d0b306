"""Lower a verified task table to what the kernel reads: step records, lanes, counters and the order of the weights.

The table says which worker runs which task when, and what each task waits for and posts. Operations say what an opcode
computes. A task of a product covers `blocks` row blocks from `first` on, over one slice of K; its index is (first,
blocks, slice). A task of a reduction covers that many pieces of rows; its index is (first, blocks, 0). One row of the
table becomes one typed step record (steps.py), in its worker's order, and in the end STEP_WORDS words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError, UnsupportedError, VerificationError
from onewave.tiles.graph.graph import EdgeKind, Task, TileGraph
from onewave.tiles.order.schedule import Mode
from onewave.tiles.proof.table import TaskTable
from onewave.wave.plan.layout import RECORDS_AHEAD, TileShape
from onewave.wave.plan.lowering import step_of
from onewave.wave.plan.operations import AnyOperation, Operation
from onewave.wave.plan.pace import Pace, pace_of, slack_runs, tiles_before_attention
from onewave.wave.plan.regions import Region, regions_of
from onewave.wave.plan.slices import slice_bounds
from onewave.wave.plan.steps import AttendStep, Flag, Kind, ProductStep, Step, Word, Words, words_of

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WaveProgram:
    """A launch's words, as arrays. Nothing in them depends on a device.

    steps: int32 [steps, STEP_WORDS], the step records (steps.py). lanes: int32 [workers, 4]: tiles, first row,
    first step, steps. waits: int32 [n, 2], counter and value. totals: int32 [counters]. slack: int32 [workers, 2
    n], the first and the last tile of each run that has slack, then 2^31 - 1 four times. key_tasks: int32 [workers,
    2 n], two words for each attention task (_key_tasks; streamed.keys_of_task reads them), then likewise. stream:
    weight -> [tiles, 3] of (row block, column tile, place), where place is a tile's number in the packed stream,
    below stream_tiles. set_words: words of one set of the exchange. max_slices: of K. flight: of the Pace.
    first_scale: weight -> the first of its rows' scales among num_scales, for rounded and compact weights. names:
    each step's task. regions: the exchange's tensors.
    """

    shape: TileShape
    steps: Words
    lanes: Words
    waits: Words
    totals: Words
    slack: Words
    key_tasks: Words
    stream: Mapping[str, Ints]
    widths: Mapping[str, int]
    stream_tiles: int
    set_words: int
    regions: tuple[Region, ...]
    names: tuple[str, ...]
    phases: tuple[str, ...]
    max_slices: int
    flight: int
    first_scale: Mapping[str, int]
    num_scales: int

    @property
    def workers(self) -> int:
        """Thread blocks of the launch."""
        return len(self.lanes)

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constexprs that the program fixes: sizes of tiles and rings, slices of K, whether any step
        gates."""
        gated = Flag.ACTIVATE | Flag.GATED
        return {
            "NB": self.shape.batch,
            "R": self.shape.rows,
            "G": self.shape.group,
            "S": self.shape.ring,
            "XS": self.shape.slots,
            "PC": self.shape.chunk * self.shape.images,
            "IMAGES": self.shape.images,
            "HELD": self.shape.held,
            "FLIGHT": self.flight,
            "SPLITS": 1 << (self.max_slices - 1).bit_length(),
            "MERGE_WORDS": self.merge_words,
            "GATED": int(((self.steps[:, Word.FLAGS] & gated) == gated).any()),
        }

    @property
    def merge_words(self) -> int:
        """Words a thread, of 256, of activations that are merged while they are loaded: 4 or 8 at a time; 0 where no
        product merges."""
        merging = (self.steps[:, Word.SPLITS] > 0) & (self.steps[:, Word.KIND] < Kind.ATTEND)
        words = int(self.steps[merging, Word.COLUMNS].max(initial=0)) * self.shape.batch
        return 0 if words == 0 else 4 if words <= 1024 else 8

    def step_of(self, task_name: str) -> int:
        """Return the number of a task's step record, by the task's name. Raises InvalidArgumentError."""
        if task_name not in self.names:
            raise InvalidArgumentError("task", got=task_name, allowed="names of the program's tasks")
        return self.names.index(task_name)


def build_program(
    graph: TileGraph,
    table: TaskTable,
    operations: Mapping[str, AnyOperation],
    shape: TileShape,
    pace: Pace | None = None,
) -> WaveProgram:
    """Lay a table out for the kernel.

    graph: what the table was planned from. operations: by opcode name. pace: None for pace_of's. Raises
    UnsupportedError for a ticket table, an operation that is missing, or a slice of K that shared memory does not hold,
    VerificationError for a hand-off that the kernel does not have.
    """
    if table.mode is not Mode.STATIC:
        raise UnsupportedError("wave: table mode", got=table.mode.value, allowed="static")
    regions, pace = regions_of(operations, shape), pace or pace_of(shape, operations)
    place = {region.name: region for region in regions}
    first_scale, num_scales = _scales(operations, shape)
    rows = [row for queue in table.queues for row in queue.tolist()]
    tasks = [graph.tasks[int(table.task[row])] for row in rows]
    missing = next((task.name for task in tasks if task.name not in operations), None)
    if missing is not None:
        raise UnsupportedError("wave: opcode", got=missing, allowed=", ".join(operations))
    steps: list[Step] = []
    waits: list[tuple[int, int]] = []
    for row, task in zip(rows, tasks, strict=True):
        operation = operations[task.name]
        entries = slice(int(table.waits.start[row]), int(table.waits.start[row + 1]))
        mine = list(zip(table.waits.first[entries].tolist(), table.waits.second[entries].tolist(), strict=True))
        sync = {"first_wait": len(waits), "waits": len(mine), "post": _post(table, row)}
        waits += mine
        scales = first_scale.get(operation.weight or "", 0) if isinstance(operation, Operation) else 0
        steps.append(step_of(operation, task, place, shape, sync, scales=scales))
    workers = len(table.queues)
    lanes = np.zeros((workers, 4), dtype=np.int32)
    tiles: list[tuple[str, int, int, int, int]] = []  # (weight, row block, column tile, worker, place in its lane)
    slack: list[list[int]] = []
    key_tasks: list[list[int]] = []
    phases, lengths = tuple(task.phase for task in tasks), [len(queue) for queue in table.queues]
    shares = _shares(steps, lengths, phases)
    attended = tiles_before_attention(operations, shares)
    ends = np.cumsum(lengths).tolist()
    for worker, (begin, end) in enumerate(pairwise([0, *ends])):
        lane = [operations[task.name] for task in tasks[begin:end]]
        own = _tiles_of(lane, tasks[begin:end], shape)
        tiles += [(*tile, worker, count) for count, tile in enumerate(own)]
        slack.append(slack_runs(lane, steps[begin:end], attended, shape, pace))
        lanes[worker] = len(own), worker * shape.tile_rows, begin, end - begin
        _place_keys(steps, range(begin, end), shape)
        key_tasks.append(_key_tasks(steps, range(begin, end)))
        _mark_prefetches(steps, range(begin, end))
    _mark_ahead(steps, lanes, phases, shares, shape.ring)
    _check_hand_offs(graph, table, {region.name for region in regions})
    return WaveProgram(
        shape=shape,
        steps=words_of(steps),
        lanes=lanes,
        waits=np.array(waits, dtype=np.int32).reshape(-1, 2),
        totals=table.totals.astype(np.int32),
        slack=_rows_of(slack),
        key_tasks=_rows_of(key_tasks),
        stream=_stream(tiles, workers),
        widths={
            o.weight: o.width for o in operations.values() if isinstance(o, Operation) and o.weight and o.width > 1
        },
        stream_tiles=int(lanes[:, 0].max(initial=0)) * workers,
        set_words=max((-(-(region.first + region.words) // 32) * 32 for region in regions), default=0),
        regions=regions,
        names=tuple(table.name(row) for row in rows),
        phases=phases,
        max_slices=max(
            (o.slices for o in operations.values() if isinstance(o, Operation) and o.weight is None), default=1
        ),
        flight=pace.flight,
        first_scale=first_scale,
        num_scales=num_scales,
    )


def _tiles_of(lane: Sequence[AnyOperation], tasks: Sequence[Task], shape: TileShape) -> list[tuple[str, int, int]]:
    """List the weight tiles that a lane's tasks read, in their order: (weight, row block, column tile). Row blocks that
    are handed off together use a chunk of activations one after the other before the next chunk."""
    found: list[tuple[str, int, int]] = []
    for operation, task in zip(lane, tasks, strict=True):
        if isinstance(operation, Operation) and operation.weight is not None:
            first, blocks, part = task.index
            own = shape.of_width(operation.width)
            bounds = slice_bounds(operation.cols, operation.slices, own)
            columns = range(bounds[part] // own.cols, -(-bounds[part + 1] // own.cols))
            chunks = [columns[at : at + own.chunk] for at in range(0, len(columns), own.chunk)]
            groups = [
                range(at, min(at + shape.group, first + blocks)) for at in range(first, first + blocks, shape.group)
            ]
            found += [
                (operation.weight, block, tile)
                for group in groups
                for chunk in chunks
                for block in group
                for tile in chunk
            ]
    return found


def _shares(steps: Sequence[Step], lengths: Sequence[int], phases: Sequence[str]) -> dict[str, Ints]:
    """Count the weight tiles that each worker streams, by phase. lengths: steps a worker."""
    names, phase = np.unique(phases, return_inverse=True)
    found = np.zeros((len(names), len(lengths)), dtype=np.int64)
    np.add.at(found, (phase, np.repeat(np.arange(len(lengths)), lengths)), _tiles(steps))
    return dict(zip(names.tolist(), found, strict=True))


def _tiles(steps: Sequence[Step]) -> Ints:
    """Weight tiles of each step."""
    return np.array([step.weight_tiles if isinstance(step, ProductStep) else 0 for step in steps], dtype=np.int64)


def _place_keys(steps: list[Step], lane: range, shape: TileShape) -> None:
    """Set `comes` and `further` of a lane's attention steps.

    Keys come before the first tile of the next product, or before its first tile that is not held in registers: held
    tiles make room for keys.
    """
    count = 0
    waiting: list[int] = []
    before: AttendStep | None = None
    for at in lane:
        step = steps[at]
        if isinstance(step, AttendStep):
            further = max(0, step.layer - before.layer) if before is not None and step.keys == before.keys else 0
            before = step
            steps[at] = replace(step, further=further)
            waiting.append(at)
        elif isinstance(step, ProductStep) and step.weight_tiles:
            mine, tiles = step.weight_tiles, step.tiles
            holds = mine >= shape.held and (tiles >= shape.held or (tiles * 2 == shape.held and shape.group > 1))
            _set_comes(steps, waiting, count + (shape.held if holds else 0))
            count += mine
    _set_comes(steps, waiting, count)


def _set_comes(steps: list[Step], waiting: list[int], tile: int) -> None:
    for at in waiting:
        steps[at] = replace(cast("AttendStep", steps[at]), comes=tile)
    waiting.clear()


def _key_tasks(steps: Sequence[Step], lane: range) -> list[int]:
    """Two words for each of a lane's attention steps: the tile before which its keys come, and how many layers it is
    behind the attention step before, if it goes over the same keys, or -1 less its number."""
    found: list[int] = []
    for at in lane:
        step = steps[at]
        if isinstance(step, AttendStep):
            found += [step.comes, step.further or -1 - at]
    return found


def _scales(operations: Mapping[str, AnyOperation], shape: TileShape) -> tuple[dict[str, int], int]:
    """Give each matrix of one-byte or compact weights its first scale, whole row blocks each; and count all scales."""
    found: dict[str, int] = {}
    first = 0
    for operation in operations.values():
        if isinstance(operation, Operation) and operation.weight is not None and shape.weight_bytes < 2:
            found[operation.weight] = first
            first += -(-operation.rows // shape.rows) * shape.rows
    return found, first


def _mark_prefetches(steps: list[Step], lane: range) -> None:
    """Have a lane's last product before each attention step, the one that makes the queries, bring its first keys to
    L2: late enough for them to stay there."""
    product: int | None = None
    for at in lane:
        step = steps[at]
        if isinstance(step, ProductStep):
            product = at
        elif isinstance(step, AttendStep) and product is not None:
            makes = cast("ProductStep", steps[product])
            if not makes.prefetch and at - product <= RECORDS_AHEAD:  # its record is in shared memory by then
                steps[product] = replace(makes, prefetch=at - product)


def _mark_ahead(steps: list[Step], lanes: Words, phases: Sequence[str], shares: Mapping[str, Ints], ring: int) -> None:
    """Where a worker streams more of a product than half of the workers do, have the product before bring as many tiles
    to L2, the first that the ring will not hold yet: all wait for the last worker, and all have the same share of the
    bandwidth."""
    tiles = _tiles(steps)
    usual = {phase: int(np.sort(of_workers)[len(lanes) // 2]) for phase, of_workers in shares.items()}
    for first, count in lanes[:, 2:].tolist():
        mine = tiles[first : first + count]
        begins = np.cumsum(mine) - mine
        products: list[int] = np.flatnonzero(mine).tolist()
        # A product of several tasks, where activations pass, is a run of them.
        runs: list[list[int]] = [list(run) for _, run in groupby(products, key=lambda at: phases[first + at])]
        for before, run in pairwise(runs):
            total = int(mine[run].sum())
            more = min(total - usual[phases[int(first + run[0])]], total - ring)
            if more > 0:
                at = first + before[0]
                step = cast("ProductStep", steps[at])
                steps[at] = replace(step, ahead=int(begins[run[0]]) + ring, ahead_tiles=more)


def _rows_of(lists: Sequence[Sequence[int]]) -> Words:
    """Return lists as rows of one array, each ended by at least four 2^31 - 1."""
    found = np.full((len(lists), max(map(len, lists)) + 4), 2**31 - 1, dtype=np.int32)
    for row, values in zip(found, lists, strict=True):
        row[: len(values)] = values
    return found


def _check_hand_offs(graph: TileGraph, table: TaskTable, exchanged: set[str]) -> None:
    """Refuse a table that needs hand-offs other than data-as-flag.

    The kernel waits for exchanged data itself. So two workers may depend on each other in one way alone: one reads an
    exchanged tensor that the other writes. Any other dependency must stay on one worker.
    """
    worker_of = np.full(len(graph.tasks), -1, dtype=np.int64)
    for worker, queue in enumerate(table.queues):
        worker_of[table.task[queue]] = worker
    edges = graph.edges
    loose = worker_of[edges.producer] != worker_of[edges.consumer]
    names = list(graph.tensors)
    free = np.array([name in exchanged for name in names], dtype=np.bool_)
    covered = (edges.kind == EdgeKind.RAW) & free[graph.tensor_of(edges.tile)]
    wrong = np.flatnonzero(loose & ~covered)
    if len(wrong):
        at = int(wrong[0])
        first, second = (graph.tasks[int(task[at])] for task in (edges.producer, edges.consumer))
        tensor, index = graph.tile_at(int(edges.tile[at]))
        kind, tile = EdgeKind(int(edges.kind[at])).name, f"{tensor}{list(index)}"
        raise VerificationError(
            "hand-off",
            f"{kind} of {tile} from {first.name}#{first.id} to {second.name}#{second.id} on another worker; only reads "
            "of exchanged activations may be",
            {"pair": [f"{first.name}#{first.id}", f"{second.name}#{second.id}"], "hazard": kind, "tile": tile},
        )


def _stream(tiles: Sequence[tuple[str, int, int, int, int]], workers: int) -> dict[str, Ints]:
    found: dict[str, list[tuple[int, int, int]]] = {}
    for weight, block, column, worker, count in tiles:
        found.setdefault(weight, []).append((block, column, count * workers + worker))
    return {weight: np.array(entries, dtype=np.int64) for weight, entries in found.items()}


def _post(table: TaskTable, row: int) -> int:
    first, last = int(table.posts.start[row]), int(table.posts.start[row + 1])
    if last - first > 1 or (last > first and int(table.posts.second[first]) != 1):
        raise UnsupportedError("wave: posts of a task", got=table.name(row), allowed="1 to at most one counter")
    return int(table.posts.first[first]) + 1 if last > first else 0
