"""Happens-before: the order that queues and counters really enforce, and cycles in it.

A task happens before another when a chain of steps leads there, each step either "later in the same queue" or "waits
for a counter to which the former posts". Waits are for a counter's whole total (`verify` has checked that first), so a
wait means that every task which posts to the counter has ended. Dependencies without a wait are no steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from onewave.tiles.graph.graph import entries_of
from onewave.tiles.order.schedule import Csr, Ints, Mode, Schedule, Syncs

# Words held at once while happens-before is followed; more tasks are asked about in several passes.
MAX_CELLS = 1 << 25
Words = npt.NDArray[np.uint64]
BITS = 64
# Waits or posts looked through at once.
MAX_ENTRIES = 1 << 20
# Up to so many counters of one task, a loop is faster than fancy indexing.
MAX_LOOPED = 6


@dataclass(frozen=True)
class Places:
    """Where each task stands: its queue and its position there."""

    worker: Ints
    position: Ints

    @property
    def num_tasks(self) -> int:
        return len(self.worker)


@dataclass(frozen=True)
class Step:
    """One step of a cycle: `task` can't start before the task of the step before it has ended.

    counter: the counter through which it waits, or None when it only stands later in that task's queue.
    """

    task: int
    counter: int | None


def topological_order(schedule: Schedule, places: Places) -> Ints | None:
    """The tasks in an order that happens-before allows, or None when there is a cycle.

    A ticket order must itself be such an order: a task that waits for a later ticket may hold the last free worker.
    """
    rank = places.position * max(1, schedule.num_workers) + places.worker
    if _ascending(schedule.syncs, rank):
        return np.argsort(rank, kind="stable").astype(np.int64)
    if schedule.mode is Mode.TICKET:
        return None
    return _sorted_by_hand(schedule, places.num_tasks)


def _ascending(syncs: Syncs, rank: Ints) -> bool:
    """Whether everything that a task waits for stands before it."""
    latest = np.full(syncs.num_counters, -1, dtype=np.int64)
    np.maximum.at(latest, syncs.posts.first, rank[syncs.posts.row])
    return bool((latest[syncs.waits.first] < rank[syncs.waits.row]).all())


def _successors(schedule: Schedule, num_tasks: int) -> list[list[int]]:
    """Tasks 0..n-1, then the counters: post edges, wait edges, and the queues' edges."""
    syncs = schedule.syncs
    after: list[list[int]] = [[] for _ in range(num_tasks + syncs.num_counters)]
    for task, counter in _entries(syncs.posts):
        after[task].append(num_tasks + counter)
    for task, counter in _entries(syncs.waits):
        after[num_tasks + counter].append(task)
    for queue in schedule.queues:
        tasks: list[int] = queue.tolist()
        for here, later in pairwise(tasks):
            after[here].append(later)
    return after


def _entries(side: Csr) -> list[tuple[int, int]]:
    rows: list[int] = side.row.tolist()
    counters: list[int] = side.first.tolist()
    return list(zip(rows, counters, strict=True))


def _sorted_by_hand(schedule: Schedule, num_tasks: int) -> Ints | None:
    after = _successors(schedule, num_tasks)
    blockers = _count_blockers(after)
    ready = deque(node for node, count in enumerate(blockers) if not count)
    done: list[int] = []
    while ready:
        node = ready.popleft()
        if node < num_tasks:
            done.append(node)
        for later in after[node]:
            blockers[later] -= 1
            if not blockers[later]:
                ready.append(later)
    return np.array(done, dtype=np.int64) if len(done) == num_tasks else None


def _count_blockers(after: list[list[int]]) -> list[int]:
    blockers = [0] * len(after)
    for targets in after:
        for target in targets:
            blockers[target] += 1
    return blockers


def find_cycle(schedule: Schedule, num_tasks: int) -> list[Step]:
    """Name a cycle of waits and queue neighbours. Call it only when topological_order found none.

    Queue neighbours between two tasks that take part in waits are left out: what matters is that one stands later.
    """
    after = _successors(schedule, num_tasks)
    blockers = _count_blockers(after)
    ready = [node for node, count in enumerate(blockers) if not count]
    while ready:
        for later in after[ready.pop()]:
            blockers[later] -= 1
            if not blockers[later]:
                ready.append(later)
    # Every node left is blocked by another that is left: walking backwards must come round.
    left = {node for node, count in enumerate(blockers) if count}
    before: dict[int, list[int]] = {node: [] for node in left}
    for node in left:
        for later in after[node]:
            if later in left:
                before[later].append(node)
    start = next(iter(left))
    seen: set[int] = set()
    while start not in seen:
        seen.add(start)
        start = before[start][0]
    return _named(_shortest_round(start, after, left), num_tasks)


def _shortest_round(start: int, after: list[list[int]], left: set[int]) -> list[int]:
    """The shortest way from a node back to itself, by breadth-first search."""
    came_from: dict[int, int] = {}
    waiting = deque([start])
    while waiting:
        node = waiting.popleft()
        for later in after[node]:
            if later == start:
                way = [node]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if later in left and later not in came_from:
                came_from[later] = node
                waiting.append(later)
    raise AssertionError("a node of a cycle leads back to itself")


def _named(nodes: list[int], num_tasks: int) -> list[Step]:
    """Turn nodes into steps: counters fold into the task after them, long stretches of one queue into one step."""
    first = next(at for at, node in enumerate(nodes) if node < num_tasks)
    nodes = nodes[first:] + nodes[:first]
    steps: list[Step] = []
    for at, node in enumerate(nodes):
        if node < num_tasks:
            previous = nodes[at - 1]
            steps.append(Step(node, previous - num_tasks if previous >= num_tasks else None))
    kept = [
        step
        for at, step in enumerate(steps)
        if step.counter is not None or steps[(at + 1) % len(steps)].counter is not None
    ]
    return kept or steps


def unordered_pairs(schedule: Schedule, places: Places, order: Ints, earlier: Ints, later: Ints) -> Ints:
    """Find the pairs (earlier, later) that happens-before does not order that way, by their places.

    order: a topological order. Neighbourly cases are decided at once: same queue, or a direct wait. The rest follow
    happens-before through the schedule, one bit per task asked about.
    """
    rest = np.arange(len(earlier), dtype=np.int64)
    if schedule.mode is Mode.STATIC:
        same = places.worker[earlier] == places.worker[later]
        rest = rest[~(same & (places.position[earlier] < places.position[later]))]
    rest = rest[~_waits_directly(schedule.syncs, earlier[rest], later[rest])]
    if not len(rest):
        return rest
    rank = np.empty(places.num_tasks, dtype=np.int64)
    rank[order] = np.arange(places.num_tasks)
    # A pair that stands the other way round in some allowed order can't be ordered this way in every one.
    backward = rank[earlier[rest]] >= rank[later[rest]]
    bad, rest = rest[backward], rest[~backward]
    # One question for each distinct pair.
    _, ask, answers = np.unique(earlier[rest] * places.num_tasks + later[rest], return_index=True, return_inverse=True)
    pairs = (earlier[rest][ask], later[rest][ask])
    missing = _ask(schedule, places, order, rank, *pairs)
    return np.sort(np.concatenate((bad, rest[missing[answers.reshape(-1)]])))


def _waits_directly(syncs: Syncs, earlier: Ints, later: Ints) -> npt.NDArray[np.bool_]:
    """Whether the later task of each pair waits for a counter to which the earlier one posts."""
    found = np.zeros(len(earlier), dtype=np.bool_)
    posts, waits = (np.diff(side.start)[task] for side, task in ((syncs.posts, earlier), (syncs.waits, later)))
    # Look through the shorter list of each pair: a barrier may have 50,000 posts and one wait.
    fewer = posts < waits
    _find(found, np.flatnonzero(fewer), (syncs.posts, earlier), (syncs.waits, later), syncs.num_counters)
    _find(found, np.flatnonzero(~fewer), (syncs.waits, later), (syncs.posts, earlier), syncs.num_counters)
    return found


def _find(found: npt.NDArray[np.bool_], pairs: Ints, walked: tuple[Csr, Ints], other: tuple[Csr, Ints], counters: int):
    """Set found for each of the pairs whose tasks' rows have a counter in common."""
    rows, task = walked
    keys = np.unique(other[0].row * max(1, counters) + other[0].first)
    counts = np.diff(rows.start)[task[pairs]]
    pairs, counts = pairs[counts > 0], counts[counts > 0]
    ends = np.cumsum(counts)
    low = 0
    while low < len(pairs) and len(keys):
        done = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, done + MAX_ENTRIES, side="right")))
        some = pairs[low:high]
        of, entry = entries_of(rows.start, task[some])
        pair = some[of]
        key = other[1][pair] * max(1, counters) + rows.first[entry]
        at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        found[pair[keys[at] == key]] = True
        low = high


def _ask(
    schedule: Schedule, places: Places, order: Ints, rank: Ints, earlier: Ints, later: Ints
) -> npt.NDArray[np.bool_]:
    """Follow a block of sources at a time, one bit each, through the stretch of the order that their pairs span."""
    missing = np.zeros(len(earlier), dtype=np.bool_)
    sources = np.unique(rank[earlier])
    width = BITS * max(1, min(64, MAX_CELLS // max(1, schedule.syncs.num_counters), -(-len(sources) // BITS)))
    waits, posts = _lists(schedule.syncs)
    ranked: list[int] = order.tolist()
    ticket = schedule.mode is Mode.TICKET
    at_worker: list[int] = [0] * len(order) if ticket else places.worker.tolist()
    for low in range(0, len(sources), width):
        block = sources[low : low + width]
        bit = np.full(len(order), -1, dtype=np.int64)
        bit[order[block]] = np.arange(len(block))
        mine = np.flatnonzero(bit[earlier] >= 0)
        questions = _by_task(later[mine], mine)
        words = -(-len(block) // BITS)
        posted = np.zeros((schedule.syncs.num_counters, words), dtype=np.uint64)
        known = np.zeros((schedule.num_workers, words), dtype=np.uint64)
        bits: list[int] = bit.tolist()
        for task in ranked[int(block[0]) : int(rank[later[mine]].max()) + 1]:
            row = known[at_worker[task]]
            if ticket:
                row[:] = 0
            _hear(row, posted, waits[task])
            asked = questions.get(task)
            if asked is not None:
                which = bit[earlier[asked]]
                missing[asked] = (row[which // BITS] >> (which % BITS).astype(np.uint64)) & np.uint64(1) == 0
            if bits[task] >= 0:
                row[bits[task] // BITS] |= np.uint64(1 << (bits[task] % BITS))
            _tell(row, posted, posts[task])
    return missing


def _hear(row: Words, posted: Words, counters: list[int]) -> None:
    """Merge what was posted to the counters into a worker's knowledge."""
    if len(counters) > MAX_LOOPED:
        row |= np.bitwise_or.reduce(posted[counters], axis=0)
        return
    for counter in counters:
        row |= posted[counter]


def _tell(row: Words, posted: Words, counters: list[int]) -> None:
    """Merge a worker's knowledge into the counters that it posts to."""
    if len(counters) > MAX_LOOPED:
        posted[counters] |= row
        return
    for counter in counters:
        posted[counter] |= row


def _by_task(task: Ints, entry: Ints) -> dict[int, Ints]:
    """Entries grouped by task."""
    by_task = np.argsort(task, kind="stable")
    tasks, starts = np.unique(task[by_task], return_index=True)
    return dict(zip(tasks.tolist(), np.split(entry[by_task], starts[1:]), strict=True))


def _lists(syncs: Syncs) -> tuple[list[list[int]], list[list[int]]]:
    """Counters that each task waits for, and posts to."""

    def rows(side: Csr) -> list[list[int]]:
        flat: list[int] = side.first.tolist()
        start: list[int] = side.start.tolist()
        return [flat[low:high] for low, high in pairwise(start)]

    return rows(syncs.waits), rows(syncs.posts)
