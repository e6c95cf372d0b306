"""The feed-forward block for many rows as a task table: tiles, their order, their workers, and what waits for what.

The graph has a task a tile of the hidden tensor ("up") and a task a tile and K slice of the result ("down"). An order
of `tiles` (or one of BANDS) says in which sequence they are taken; they are dealt to the workers as workers come free;
a policy of `tiles` makes counters of it; `verify` proves the result; only then is it written down for the kernel.

A record is 16 int32 words: kind (0 up, 1 down), row block, column block, first step of 64 along K, steps, flags (1 adds
all slices before it, 2 leaves its sum to the last), first wait and number of waits of the load warp, the same of the
warpgroups (for the slices before), counter to post or -1, the graph's task, K slice, 0, 0, 0.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.ops.ffn.sizes import FFNSizes
from onewave.tiles.graph.builders import Builder, cuts
from onewave.tiles.graph.graph import Tile, TileGraph
from onewave.tiles.order.chain import coordinates, half_row, linear_extension
from onewave.tiles.order.orders import grid_order, task_order
from onewave.tiles.order.policies import plan
from onewave.tiles.order.schedule import Mode
from onewave.tiles.proof.table import TaskTable, lower
from onewave.tiles.proof.verify import verify

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]

RECORD_WORDS = 16
_STEP = 64
# Cost of a task beyond its steps along K, in steps: filling the ring, epilogue, store.
_TASK_STEPS = 6
_MAX_TASKS = 1 << 18
# Rates that bound a step along K, for all SMs of an H200 together, and the cost of adding one slice's sums to
# another's: assumptions that choose tiles, no measurements.
_FLOPS_A_NS, _L2_BYTES_A_NS, _MEMORY_BYTES_A_NS, _ADD_NS = 700_000.0, 7_000.0, 4_500.0, 3_000.0
# From here on every worker has several of the widest tiles.
_MANY_ROWS = 4096
_ADDS, _LEAVES = 1, 2


@dataclass(frozen=True)
class ChainTile:
    """Tiles of warpgroups x 64 rows and `columns` columns (half as many of the hidden tensor where there is a gate).

    stages: of the ring. buffers: for pieces of a finished tile, a warpgroup. splits: slices of K of the second product.
    """

    warpgroups: int
    columns: int
    stages: int
    buffers: int
    splits: int = 1

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2) or self.columns not in (128, 256) or self.splits < 1:
            got = f"{self.warpgroups} x 64 rows, {self.columns} columns, {self.splits} slices"
            raise InvalidArgumentError(
                "ffn: tile", got=got, allowed="1 or 2 x 64 rows, 128 or 256 columns, slices >= 1"
            )
        if self.shared_bytes > 227 << 10 or min(self.stages, self.buffers) < 1:
            got = f"{self.stages} stages and {self.buffers} buffers, {self.shared_bytes} bytes"
            raise InvalidArgumentError("ffn: tile", got=got, allowed=f"1 or more, up to {227 << 10} bytes")

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: ring, pieces, barriers."""
        ring = self.stages * (self.rows + self.columns) * _STEP * 2
        return ring + self.warpgroups * self.buffers * 64 * self.columns + 1024


_WIDEST = ChainTile(2, 256, 4, 1)
_TILES = (_WIDEST, ChainTile(2, 128, 6, 2), ChainTile(1, 256, 4, 1), ChainTile(1, 128, 8, 2))


@dataclass(frozen=True)
class ChainPlan:
    """The kernel's inputs, and what they were made from.

    records: int32 [tasks, 16], queue after queue. lanes: for each launch, int32 [workers, 2]: a worker's first record
    and how many it has. waits: int32 [n, 2], (counter, value). totals: int32, what one run posts to each counter.
    table: the proved table; predicted: nanoseconds that the dealing expects, in units of a step's cost.
    queues_a_block: 2 where blocks have a queue of norms beside that of tiles; those lie behind all of these.
    """

    sizes: FFNSizes
    tile: ChainTile
    order: str
    policy: str
    graph: TileGraph
    table: TaskTable
    records: Words
    lanes: tuple[Words, ...]
    waits: Words
    totals: Words
    predicted: float
    queues_a_block: int = 1

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each launch."""
        return tuple(len(lanes) // self.queues_a_block for lanes in self.lanes)

    @property
    def workers(self) -> int:
        """Queues, of both launches if there are two."""
        return sum(len(lanes) for lanes in self.lanes)

    def name(self, record: int) -> str:
        """Return a record's readable name: its task's name and index."""
        task = self.graph.tasks[int(self.records[record, 11])]
        return f"{task.name}{list(task.index)}"


@lru_cache(maxsize=256)
def default_tile(sizes: FFNSizes, workers: int, splits: int | None = None) -> ChainTile:
    """The tile that the dealing expects to end first, with as many slices of K or with `splits`.

    With many rows that is the widest, uncut.
    """
    if sizes.rows >= _MANY_ROWS:
        return replace(_WIDEST, splits=splits or 1)
    tiles = [tile for tile in _TILES if tile.warpgroups == (1 if sizes.rows <= 64 else 2)]
    most = min(8, cuts(sizes.intermediate, 1024))
    counts = [count for count in (1, 2, 4, 8) if count <= most] if splits is None else [splits]
    tried = [replace(tile, splits=count) for count in counts for tile in tiles]
    return min(tried, key=lambda tile: _expected_ns(sizes, tile, workers))


def _expected_ns(sizes: FFNSizes, tile: ChainTile, workers: int) -> float:
    """Time of the plan in the order "skewed", by the dealing and what bounds a step: arithmetic, L2 or memory."""
    wide = tile.columns // 2 if sizes.gated else tile.columns
    rows, columns, outs = cuts(sizes.rows, tile.rows), cuts(sizes.intermediate, wide), cuts(sizes.out, tile.columns)
    slices = np.linspace(0, sizes.intermediate // _STEP, tile.splits + 1).astype(np.int64)
    ups, downs = np.arange(rows * columns), np.arange(rows * outs * tile.splits)
    kind = np.repeat([0, 1], [len(ups), len(downs)])
    row = np.concatenate((ups // columns, downs // (outs * tile.splits)))
    place = np.concatenate((ups % columns, downs % (outs * tile.splits)))
    steps = np.where(kind == 0, sizes.hidden // _STEP, np.diff(slices)[place % tile.splits])
    band = BANDS["skewed"]
    ids = np.lexsort((row, place, kind, row // band + kind))
    end = deal(ids, row, kind, steps, (workers,))[1]
    flops, bytes_a_step = 2 * tile.rows * tile.columns * _STEP, 2 * (tile.rows + tile.columns) * _STEP
    # Row blocks of a band share a read of the weights.
    weights = 2 * tile.columns * _STEP / min(rows, band)
    step = max(flops / _FLOPS_A_NS, bytes_a_step / _L2_BYTES_A_NS, weights / _MEMORY_BYTES_A_NS) * workers
    return end * step + (_ADD_NS if tile.splits > 1 else 0.0)


def chain_graph(sizes: FFNSizes, tile: ChainTile) -> TileGraph:
    """The two products as tiles; a task reads whole panels along K. Task.index: (row block, column, K slice)."""
    wide = tile.columns // 2 if sizes.gated else tile.columns
    rows, columns, outs = cuts(sizes.rows, tile.rows), cuts(sizes.intermediate, wide), cuts(sizes.out, tile.columns)
    splits = min(tile.splits, columns)
    a_slice = cuts(columns, splits)
    splits = cuts(columns, a_slice)
    tasks = rows * (columns + outs * splits)
    if tasks > _MAX_TASKS:
        raise UnsupportedError("ffn: tasks", got=f"{tasks:,}", allowed=f"up to {_MAX_TASKS:,}")
    build = Builder("bf16")
    build.tensor("X", (sizes.rows, sizes.hidden), (tile.rows, sizes.hidden))
    matrices = ("W_gate", "W_up") if sizes.gated else ("W_up",)
    for name in matrices:
        build.tensor(name, (sizes.hidden, sizes.intermediate), (sizes.hidden, wide))
    build.tensor("H", (sizes.rows, sizes.intermediate), (tile.rows, wide))
    build.tensor("W_down", (sizes.intermediate, sizes.out), (a_slice * wide, tile.columns))
    build.tensor("Y", (sizes.rows, sizes.out), (tile.rows, tile.columns))
    if splits > 1:
        # A tile's slices side by side, so that the policies find them in one row.
        build.tensor("P", (rows, outs, splits - 1), (1, 1, 1), 4 * tile.rows * tile.columns)
    for row in range(rows):
        height = min(tile.rows, sizes.rows - row * tile.rows)
        hidden: tuple[Tile, ...] = tuple(("H", (row, column)) for column in range(columns))
        for column in range(columns):
            reads: tuple[Tile, ...] = (("X", (row, 0)), *((name, (0, column)) for name in matrices))
            flops = 2 * len(matrices) * height * min(wide, sizes.intermediate - column * wide) * sizes.hidden
            build.task("up", reads, (hidden[column],), flops, index=(row, column, 0))
        for column in range(outs):
            parts: tuple[Tile, ...] = tuple(("P", (row, column, split)) for split in range(splits - 1))
            width = min(tile.columns, sizes.out - column * tile.columns)
            for split in range(splits):
                part = hidden[split * a_slice : (split + 1) * a_slice]
                depth = min(sizes.intermediate, (split + 1) * a_slice * wide) - split * a_slice * wide
                last = split == splits - 1
                reads = (*part, ("W_down", (split, column)), *(parts if last else ()))
                target: Tile = ("Y", (row, column)) if last else parts[split]
                build.task("down", reads, (target,), 2 * height * width * depth, index=(row, column, split))
    return build.graph()


def clicked(graph: TileGraph, order: str) -> Ints:
    """The hidden tensor's tiles as an explicit order has them; a row of the result follows the row's last tile."""
    at = coordinates(graph)
    rows, columns = graph.tensors["H"].grid
    tiles = grid_order(order, rows, columns).tiles
    rank = np.empty((rows, columns), dtype=np.int64)
    rank[tiles[:, 0], tiles[:, 1]] = np.arange(len(tiles))
    first = at.stage == 0
    when = np.where(first, rank[at.row, np.where(first, at.column, 0)], rank.max(axis=1)[at.row])
    return linear_extension(graph, (when, at.stage, at.split, at.column))


BANDS = {"row": 1, "rows": 8, "skewed": 8, "sequential": 8}
"""Orders by bands of row blocks, column by column inside a band, and the rows of a band unless a number follows a colon
("rows:16"). row, rows: a band at a time through both products. skewed: likewise, but a band's second product comes
after the next band's first, so that no block waits in between. sequential: one product after the other."""


def in_bands(graph: TileGraph, name: str, rows: int) -> Ints:
    """The graph's tasks in an order of BANDS."""
    at = coordinates(graph)
    band = at.row // rows
    first = (at.stage, band) if name == "sequential" else (band + at.stage * (name == "skewed"), at.stage)
    return linear_extension(graph, (*first, at.split, at.column, at.row))


def band_rows(order: str) -> int | None:
    """Row blocks of a band, of an order of BANDS; None of another. Raises InvalidArgumentError."""
    name, colon, number = order.partition(":")
    if name not in BANDS:
        return None
    if not colon:
        return BANDS[name]
    if name == "row" or not (number.isascii() and number.isdigit() and len(number) < 8 and 1 <= int(number) < 1 << 20):
        allowed = "row" if name == "row" else f"{name}, or {name}:ROWS with 1 or more row blocks"
        raise InvalidArgumentError("ffn: order", got=repr(order[:80]), allowed=allowed)
    return int(number)


def chain_order(graph: TileGraph, order: str, workers: int) -> Ints:
    """The graph's tasks in an order. Raises InvalidArgumentError.

    order: BANDS, "half_row", "explicit:..." with the hidden tensor's tiles, or any other of tiles.ORDERS.
    """
    name = order.partition(":")[0]
    rows = band_rows(order)
    if rows is not None:
        return in_bands(graph, name, rows)
    if order == "half_row":
        return half_row(graph)
    return clicked(graph, order) if name == "explicit" else task_order(graph, order, workers=workers)


@lru_cache(maxsize=16)
def plan_chain(
    sizes: FFNSizes,
    *,
    workers: int,
    order: str = "auto",
    policy: str = "auto",
    tile: ChainTile | None = None,
    streams: bool = False,
) -> ChainPlan:
    """Plan, prove and lower, for sizes and choices that call.py has checked. Raises InvalidArgumentError,
    UnsupportedError.

    order: "auto" or as in chain_order. policy: of tiles.policies, "auto" for "row". workers: blocks of a launch.
    streams: two launches that run side by side, each product one. The first takes workers - 1 blocks, so that the
    watcher that holds the second back always finds a place; the second begins once all of those are resident, and waits
    for nothing but them: so residency holds although both together have more blocks than the device.
    """
    if workers < 1 + streams:
        raise InvalidArgumentError("ffn: workers", got=str(workers), allowed=f"{1 + streams} or more")
    if tile is None:
        tile = default_tile(sizes, workers, 1 if streams else 2 if order == "half_row" else None)
    if streams and tile.splits > 1:
        raise UnsupportedError("ffn (backend=streams): slices of K", got=str(tile.splits), allowed="1")
    order = "skewed" if order == "auto" else order
    policy = "row" if policy == "auto" else policy
    graph = chain_graph(sizes, tile)
    ids = chain_order(graph, order, workers)
    at = coordinates(graph)
    steps = _steps(graph, sizes, tile)
    teams = (workers - 1, workers) if streams else (workers,)
    queues, predicted = deal(ids, at.row, at.stage, steps[:, 1], teams)
    table = proved(graph, ids, policy, queues)
    # The load warp waits for rows of the hidden tensor; the warpgroups, before they add, for the other slices.
    records, waits = records_of(graph, table, at.stage, steps, by_warpgroups=at.stage)
    lanes = lanes_of(queues)
    launches = (lanes[: teams[0]], lanes[teams[0] :]) if streams else (lanes,)
    return ChainPlan(
        sizes, tile, order, policy, graph, table, records, launches, waits, table.totals.astype(np.int32), predicted
    )


def proved(graph: TileGraph, ids: Ints, policy: str, queues: Sequence[Ints]) -> TaskTable:
    """Prove tasks that are dealt in an order, and lower them. Raises InvalidArgumentError, UnsupportedError."""
    # Planned as a ticket order, in which every dependency has its wait: a block's load warp runs ahead of its own
    # stores, so that standing before a task in one queue is no excuse for not waiting.
    schedule = plan(graph, ids, policy, mode=Mode.TICKET, co_resident=len(queues))
    return lower(verify(replace(schedule, queues=tuple(queues), mode=Mode.STATIC)))


def _steps(graph: TileGraph, sizes: FFNSizes, tile: ChainTile) -> Ints:
    """[tasks, 2]: first step along K, and how many."""
    wide = tile.columns // 2 if sizes.gated else tile.columns
    depth = graph.tensors["W_down"].tile[0]
    at = coordinates(graph)
    first = np.where(at.stage == 0, 0, at.split * depth)
    last = np.where(at.stage == 0, sizes.hidden, np.minimum(sizes.intermediate, first + depth))
    assert wide % _STEP == 0
    return np.stack((first // _STEP, (last - first) // _STEP), axis=1)


def deal(
    ids: Ints, row: Ints, stage: Ints, steps: Ints, teams: tuple[int, ...], of_stage: tuple[int, ...] = (0, 1)
) -> tuple[list[Ints], float]:
    """Give each task in turn to the worker of its team that is free first; returns queues and the time of the end.

    of_stage: the team of each stage, the last one if there are fewer. A task begins when the last one of its row of the
    stage before has ended.
    """
    free: list[list[tuple[float, int]]] = [[(0.0, worker) for worker in range(size)] for size in teams]
    queues: list[list[list[int]]] = [[[] for _ in range(size)] for size in teams]
    ready: dict[tuple[int, int], float] = {}
    end = 0.0
    stages: list[int] = stage.tolist()
    rows: list[int] = row.tolist()
    costs: list[int] = steps.tolist()
    order: list[int] = ids.tolist()
    for task in order:
        team, place = min(of_stage[stages[task]], len(teams) - 1), (stages[task], rows[task])
        begin, worker = heapq.heappop(free[team])
        begin = max(begin, ready.get((place[0] - 1, place[1]), 0.0))
        done = begin + costs[task] + _TASK_STEPS
        ready[place] = max(done, ready.get(place, 0.0))
        queues[team][worker].append(task)
        heapq.heappush(free[team], (done, worker))
        end = max(end, done)
    return [np.array(queue, dtype=np.int64) for team in queues for queue in team], end


def lanes_of(queues: list[Ints]) -> Words:
    """Each queue's first record, and how many it has."""
    starts = np.concatenate(([0], np.cumsum([len(queue) for queue in queues])))
    return np.stack((starts[:-1], np.diff(starts)), axis=1).astype(np.int32)


def records_of(graph: TileGraph, table: TaskTable, kind: Ints, steps: Ints, by_warpgroups: Ints) -> tuple[Words, Words]:
    """The kernel's records, in the order of the queues, and the waits that they point into.

    Of each task of the graph: kind; steps: the first and how many; by_warpgroups: 1 where not the load warp but the
    warpgroups wait for it.
    """
    at = coordinates(graph)
    queue = table.queue
    task = table.task[queue]
    place = np.empty(len(queue), dtype=np.int64)
    place[queue] = np.arange(len(queue))
    poster = np.zeros(table.num_counters, dtype=np.int64)
    poster[table.posts.first] = by_warpgroups[table.task[table.posts.row]]
    late = poster[table.waits.first]
    owner = place[table.waits.row]
    by = np.lexsort((table.waits.first, late, owner))
    waits = np.stack((table.waits.first[by], table.waits.second[by]), axis=1)
    counts = np.zeros((len(queue), 2), dtype=np.int64)
    np.add.at(counts, (owner, late), 1)
    begins = np.concatenate(([0], np.cumsum(counts.reshape(-1))))[:-1].reshape(-1, 2)
    posts = np.full(len(queue), -1, dtype=np.int64)
    assert len(np.unique(table.posts.row)) == len(table.posts.row), "a task posts to one counter"
    posts[place[table.posts.row]] = table.posts.first
    split, last = at.split[task], at.num_splits[task] - 1
    cut = last > 0
    flags = np.where(cut & (split == last), _ADDS, 0) + np.where(cut & (split < last), _LEAVES, 0)
    columns: list[Any] = [kind[task], at.row[task], at.column[task], steps[task, 0], steps[task, 1], flags]
    columns += [begins[:, 0], counts[:, 0], begins[:, 1], counts[:, 1], posts, task, split]
    words = np.zeros((len(queue), RECORD_WORDS), dtype=np.int32)
    words[:, : len(columns)] = np.stack(columns, axis=1)
    return words, waits.astype(np.int32).reshape(-1, 2)
