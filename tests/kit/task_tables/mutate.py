"""Break a table in one place, as tests do to see that `verify_table` notices."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from onewave.tiles.order.schedule import Csr, Ints
from onewave.tiles.proof.table import TaskTable

Rng = np.random.Generator


def _swap_tasks(table: TaskTable, rng: Rng) -> TaskTable | None:
    if len(table.queue) < 2:
        return None
    queue = table.queue.copy()
    pair: list[int] = rng.choice(len(queue), 2, replace=False).tolist()
    queue[pair] = queue[pair[::-1]]
    return replace(table, queue=queue)


def _move_task(table: TaskTable, rng: Rng) -> TaskTable | None:
    if not len(table.queue):
        return None
    at = int(rng.integers(len(table.queue)))
    shorter = _without(table, at)
    return _with_entry(shorter, int(table.queue[at]), int(rng.integers(len(table.queues))), rng)


def _without(table: TaskTable, at: int) -> TaskTable:
    starts = table.queue_start - (table.queue_start > at)
    kept = np.arange(len(table.queue)) != at
    return replace(table, queue=table.queue[kept], queue_start=starts)


def _with_entry(table: TaskTable, row: int, worker: int, rng: Rng) -> TaskTable:
    at = int(rng.integers(int(table.queue_start[worker]), int(table.queue_start[worker + 1]) + 1))
    starts = table.queue_start.copy()
    starts[worker + 1 :] += 1
    queue = np.concatenate((table.queue[:at], np.array([row], dtype=np.int64), table.queue[at:]))
    return replace(table, queue=queue, queue_start=starts)


def _drop_task(table: TaskTable, rng: Rng) -> TaskTable | None:
    return _without(table, int(rng.integers(len(table.queue)))) if len(table.queue) else None


def _repeat_task(table: TaskTable, rng: Rng) -> TaskTable | None:
    if not table.num_tasks:
        return None
    return _with_entry(table, int(rng.integers(table.num_tasks)), int(rng.integers(len(table.queues))), rng)


def _changed(side: Csr, at: int, first: int | None = None, second: int | None = None) -> Csr:
    firsts, seconds = side.first.copy(), side.second.copy()
    if first is not None:
        firsts[at] = first
    if second is not None:
        seconds[at] = second
    return Csr(side.start, firsts, seconds)


def _dropped(side: Csr, at: int) -> Csr:
    kept = np.arange(len(side.first)) != at
    return Csr(side.start - (side.start > at), side.first[kept], side.second[kept])


def _step(value: Ints, at: int, rng: Rng) -> int:
    return int(value[at]) + int(rng.choice([-2, -1, 1, 2]))


def _on_waits(change: Callable[[TaskTable, int, Rng], Csr]) -> Callable[[TaskTable, Rng], TaskTable | None]:
    def mutation(table: TaskTable, rng: Rng) -> TaskTable | None:
        if not len(table.waits.first):
            return None
        return replace(table, waits=change(table, int(rng.integers(len(table.waits.first))), rng))

    return mutation


def _on_posts(change: Callable[[TaskTable, int, Rng], Csr]) -> Callable[[TaskTable, Rng], TaskTable | None]:
    def mutation(table: TaskTable, rng: Rng) -> TaskTable | None:
        if not len(table.posts.first):
            return None
        return replace(table, posts=change(table, int(rng.integers(len(table.posts.first))), rng))

    return mutation


def _change_total(table: TaskTable, rng: Rng) -> TaskTable | None:
    if not table.num_counters:
        return None
    totals = table.totals.copy()
    at = int(rng.integers(table.num_counters))
    totals[at] = _step(totals, at, rng)
    return replace(table, totals=totals)


MUTATIONS: dict[str, Callable[[TaskTable, Rng], TaskTable | None]] = {
    "swap two tasks": _swap_tasks,
    "move a task": _move_task,
    "drop a task": _drop_task,
    "repeat a task": _repeat_task,
    "change a wait's value": _on_waits(lambda t, at, rng: _changed(t.waits, at, second=_step(t.waits.second, at, rng))),
    "wait for another counter": _on_waits(lambda t, at, rng: _changed(t.waits, at, int(rng.integers(t.num_counters)))),
    "drop a wait": _on_waits(lambda t, at, rng: _dropped(t.waits, at)),
    "change a post's amount": _on_posts(
        lambda t, at, rng: _changed(t.posts, at, second=_step(t.posts.second, at, rng))
    ),
    "post to another counter": _on_posts(lambda t, at, rng: _changed(t.posts, at, int(rng.integers(t.num_counters)))),
    "drop a post": _on_posts(lambda t, at, rng: _dropped(t.posts, at)),
    "change a total": _change_total,
}
"""Each changes one thing: (table, rng) -> the changed table, or None where there is nothing of that sort to change."""


def mutate(table: TaskTable, rng: Rng) -> tuple[str, TaskTable]:
    """Change one thing at random: what, and the changed table. An empty table comes back as it is."""
    names = list(MUTATIONS)
    shuffled: list[int] = rng.permutation(len(names)).tolist()
    for name in (names[at] for at in shuffled):
        changed = MUTATIONS[name](table, rng)
        if changed is not None:
            return name, changed
    return "nothing", table
