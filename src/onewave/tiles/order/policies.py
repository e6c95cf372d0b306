"""Sync policies: which finished tiles share a counter, and from that every wait value and post count.

A policy groups the tiles of each tensor. A task posts 1 to the counter of the group that its first written tile is in;
a task that depends on it waits until the whole group has posted. Both numbers follow from the graph. Coarser groups
need fewer counters and waits, but wait for more.

A wait for a group with members that run after the waiting task could never end. So a group is cut where the order
puts a consumer between its members: each part has a counter of its own. Every wait is then for tasks that stand before
the waiting one in the order, and queues that keep that order can't deadlock, whatever the policy.

Source of the policies: Jangda et al. 2024 (cuSync), arXiv:2305.13450.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onewave.base.errors import InvalidArgumentError, shown
from onewave.tiles.graph.graph import TileGraph, distinct, linked
from onewave.tiles.order.schedule import (
    Csr,
    Ints,
    Mode,
    Program,
    Ring,
    Schedule,
    Syncs,
    assign_round_robin,
    ring_edges,
    ring_places,
    share_buffers,
)


@dataclass(frozen=True)
class StageTiles:
    """One tensor's tiles as a policy sees them.

    index: [tiles, rank] every tile's index, row-major. reader, read: the reading task of a tile, by the tile's place in
    `index`; sorted by reader, then tile, each pair once.
    """

    index: Ints
    reader: Ints
    read: Ints

    @property
    def row(self) -> Ints:
        """For each tile, a number for all of its index but the last."""
        last = int(self.index[:, -1].max()) + 1 if len(self.index) else 1
        return np.arange(len(self.index), dtype=np.int64) // last

    @property
    def column(self) -> Ints:
        """For each tile, the last of its index."""
        return self.index[:, -1]


def stream_order(stage: StageTiles) -> Ints:
    """No tile-level sync: a consumer waits for the tensor's whole kernel, as two launches on one stream do."""
    return np.zeros(len(stage.index), dtype=np.int64)


def by_row(stage: StageTiles) -> Ints:
    """One counter a row of tiles."""
    return stage.row


def by_tile(stage: StageTiles) -> Ints:
    """One counter a tile."""
    return np.arange(len(stage.index), dtype=np.int64)


def strided(stage: StageTiles) -> Ints:
    """Tiles of one row at a fixed distance share a counter, as a head's Q, K and V tiles do.

    The distance is the greatest one that divides all gaps between tiles that one task reads in one row: 1 where tasks
    read neighbours (then this is `row`), none where they read one tile each (then this is `tile`).
    """
    same = (stage.reader[1:] == stage.reader[:-1]) & (stage.row[stage.read[1:]] == stage.row[stage.read[:-1]])
    gaps = np.diff(stage.column[stage.read])[same]
    distance = int(np.gcd.reduce(gaps)) if len(gaps) else 0
    width = int(stage.column.max()) + 1
    return stage.row * width + (stage.column % distance if distance else stage.column)


def conv2d_tile(stage: StageTiles) -> Ints:
    """One counter a channel tile of a line of pixels: all taps of a filter along the line need one wait.

    Of an index (..., pixels, channels) with three or more axes, the pixels' axis is merged; a matrix of (pixels,
    channels) keeps a counter a tile, which all taps that fall into it share.
    """
    if stage.index.shape[1] < 3:
        return by_tile(stage)
    width, across = int(stage.column.max()) + 1, int(stage.index[:, -2].max()) + 1
    return stage.row // across * width + stage.column


def consecutive(stage: StageTiles) -> Ints:
    """Runs of neighbouring tiles share a counter: the longest whose tiles each reader needs all or none."""
    cut = np.zeros(len(stage.index) + 1, dtype=np.int64)
    if len(stage.read):
        joined = (stage.reader[1:] == stage.reader[:-1]) & (stage.read[1:] == stage.read[:-1] + 1)
        begins, ends = np.concatenate(([True], ~joined)), np.concatenate((~joined, [True]))
        cut[stage.read[begins]] = 1
        cut[stage.read[ends] + 1] = 1
    return np.cumsum(cut[:-1])


POLICIES: dict[str, Callable[[StageTiles], Ints]] = {
    "none": stream_order,
    "row": by_row,
    "tile": by_tile,
    "strided": strided,
    "conv2d-tile": conv2d_tile,
    "consecutive": consecutive,
}
"""Each gives the tiles of a tensor a group number: (StageTiles) -> int64 [tiles]."""


def plan(
    graph: TileGraph,
    order: Sequence[int] | Ints,
    policy: str = "tile",
    *,
    workers: int = 132,
    mode: Mode = Mode.STATIC,
    co_resident: int = 132,
    queues: Sequence[Sequence[int] | Ints] | None = None,
    buffers: Mapping[str, str] | None = None,
    rings: Sequence[Ring] = (),
    tokens: int = 1,
) -> Schedule:
    """Turn a graph, an order and a policy into a schedule for `verify`.

    order: task ids, each once. queues: static queues if the order is not to be dealt out round robin; each must keep
    the order. buffers: tensor -> buffer, for tensors that share memory. rings: slots that fills reuse once the task
    named as release has ended. tokens: times that one launch runs the graph, each over the same tiles and, in its own
    turn, in the same order; a task may start before the token before has ended. Nothing is proved here.
    Raises InvalidArgumentError.
    """
    if policy not in POLICIES:
        raise InvalidArgumentError("policy", got=shown(policy), allowed=", ".join(POLICIES))
    tasks = np.asarray(order, dtype=np.int64).reshape(-1)
    if len(tasks) != len(graph.tasks) or not np.array_equal(np.sort(tasks), np.arange(len(tasks))):
        raise InvalidArgumentError("order", got=f"{len(tasks)} tasks", allowed=f"all {len(graph.tasks)}, each once")
    once = Program.from_graph(graph)
    groups = _task_groups(graph, once, POLICIES[policy])
    program = once if tokens == 1 else once.repeated(tokens)
    n, shifts = once.num_tasks, [token * once.num_tasks for token in range(tokens)]
    tasks = np.concatenate([tasks + shift for shift in shifts])
    groups = np.concatenate([groups + token * (n + once.num_tiles) for token in range(tokens)])
    rings = [_repeated(ring, shifts) for ring in rings]
    place, slot_name = share_buffers(graph, buffers or {})
    pairs = np.concatenate((derived_edges(program, place), ring_edges(rings)))
    if mode is Mode.TICKET:
        lines: tuple[Ints, ...] = (tasks,)
    elif queues is None:
        lines = assign_round_robin(tasks, workers)
    else:
        given = [np.asarray(queue, dtype=np.int64) for queue in queues]
        for queue in given:
            unknown = queue[(queue < 0) | (queue >= n)]
            if len(unknown):
                raise InvalidArgumentError("queues", got=f"task {unknown[0]}", allowed=f"ids of the {n} tasks")
        lines = tuple(np.concatenate([queue + shift for shift in shifts]) for queue in given)
    syncs = sync_counters(groups, tasks, lines if mode is Mode.STATIC else (), pairs)
    place, slots = ring_places(program, rings, place)

    def name_of(slot: int) -> object:
        ring = slots.get(slot)
        return slot_name(slot) if ring is None else f"{ring[0]} slot {ring[1]}"

    return Schedule(program, lines, mode, co_resident, syncs, place, name_of)


def _repeated(ring: Ring, shifts: Sequence[int]) -> Ring:
    """The ring when its graph runs several times: its slots go round on."""
    fills, releases = (tuple(task + shift for shift in shifts for task in side) for side in (ring.fills, ring.releases))
    return Ring(ring.name, ring.slots, fills, releases)


def derived_edges(program: Program, place: Ints) -> Ints:
    """Every (earlier, later) pair of tasks that touch one slot, by program order: [n, 2], each once.

    Last writer to reader, reader to next writer, writer to next writer; the other pairs follow. `after` is included.
    """
    slots = place[program.tile]
    by_slot = np.argsort(slots, kind="stable")
    task = program.access_task[by_slot]
    pairs = linked(slots[by_slot], task, program.is_write[by_slot])
    found = [program.after, *(np.stack((task[source], task[target]), axis=1) for source, target in pairs)]
    pairs = np.concatenate(found)
    keys = distinct(pairs[:, 0] * max(1, program.num_tasks) + pairs[:, 1])
    return np.stack(np.divmod(keys, max(1, program.num_tasks)), axis=1).astype(np.int64)


def sync_counters(groups: Ints, order: Ints, queues: Sequence[Ints], pairs: Ints) -> Syncs:
    """Derive every wait and post. groups: a number per task; tasks with one number may share a counter.

    order: all tasks; groups are cut where a consumer stands between their members. queues: if given, a task need not
    wait for one that stands before it in its own queue. pairs: [n, 2] (earlier, later).
    """
    n = len(order)
    at = np.empty(n, dtype=np.int64)
    at[order] = np.arange(n)
    producer, consumer = pairs[:, 0], pairs[:, 1]
    if len(queues):
        worker, position = np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.int64)
        for number, queue in enumerate(queues):
            worker[queue], position[queue] = number, np.arange(len(queue))
        free = (worker[producer] == worker[consumer]) & (position[producer] < position[consumer])
        producer, consumer = producer[~free], consumer[~free]
    numbers = np.unique(groups, return_inverse=True)[1].reshape(-1).astype(np.int64)
    members = np.lexsort((at, numbers))
    keys = (numbers * (n + 1) + at)[members]
    starts = np.concatenate(([True], numbers[members][1:] != numbers[members][:-1])) if n else np.zeros(0, np.bool_)
    cuts = np.searchsorted(keys, numbers[producer] * (n + 1) + at[consumer])
    inside = cuts < n
    starts[cuts[inside]] = True
    part = np.empty(n, dtype=np.int64)
    part[members] = np.cumsum(starts) - 1
    size = np.bincount(part, minlength=1)
    # Counters that no task waits for are left out.
    used, wait_part = np.unique(part[producer], return_inverse=True)
    wait_part = wait_part.reshape(-1)
    waits = distinct(consumer * max(1, len(used)) + wait_part)
    row, counter = np.divmod(waits, max(1, len(used)))
    number_of = np.full(len(size), -1, dtype=np.int64)
    number_of[used] = np.arange(len(used))
    poster = np.flatnonzero(number_of[part] >= 0) if n else part
    return Syncs(
        waits=Csr.build(n, row, counter, size[used][counter] if len(used) else counter),
        posts=Csr.build(n, poster, number_of[part[poster]], np.ones(len(poster), dtype=np.int64)),
        num_counters=len(used),
    )


def _task_groups(graph: TileGraph, program: Program, policy: Callable[[StageTiles], Ints]) -> Ints:
    """Number the group of each task's first written tile; a task that writes nothing is a group of its own."""
    n = program.num_tasks
    written = np.flatnonzero(program.is_write)
    writers, first = np.unique(program.access_task[written], return_index=True)
    tile = program.tile[written[first]]
    groups = np.arange(n, dtype=np.int64) + program.num_tiles
    groups[writers] = tile
    owner = graph.tensor_of(tile)
    read = ~program.is_write
    pairs = distinct(program.access_task[read] * max(1, program.num_tiles) + program.tile[read])
    reader, read_tile = np.divmod(pairs, max(1, program.num_tiles))
    read_owner = graph.tensor_of(read_tile)
    by_owner = np.argsort(read_owner, kind="stable")
    bounds = np.searchsorted(read_owner[by_owner], np.arange(len(graph.tensors) + 1))
    by_writer = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[by_writer], np.arange(len(graph.tensors) + 1))
    for number, (name, tensor) in enumerate(graph.tensors.items()):
        mine = by_writer[ends[number] : ends[number + 1]]
        if not len(mine):
            continue
        offset = graph.tile_offset[name]
        reads = by_owner[bounds[number] : bounds[number + 1]]
        grid = tensor.grid or (1,)  # policies look at the last of an index, which a scalar lacks
        index = np.stack(np.unravel_index(np.arange(tensor.num_tiles), grid), axis=1).astype(np.int64)
        group = policy(StageTiles(index, reader[reads], read_tile[reads] - offset))
        groups[writers[mine]] = offset + np.unique(group, return_inverse=True)[1].reshape(-1)[tile[mine] - offset]
    return groups
