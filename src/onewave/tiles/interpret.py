"""Run a task table in NumPy with several workers whose turns come in random order.

Many runs go side by side, each with an interleaving of its own. A task takes two turns: at its start it reads and
begins to write, at its end it has written and posts; other workers' turns fall between. Without data, every slot holds
the row that wrote it last, and each read is compared with what the rows one after the other would have left there, at
both turns, so that a slot overwritten under a reader is noticed too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.schedule import Ints, Mode
from onewave.tiles.table import TaskTable

__all__ = ["Interpretation", "Operator", "execute", "expected_versions", "interpret"]

Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
Operator = Callable[[Sequence[Array]], Sequence[Array]]
"""Given the arrays that a task reads, in order, returns those that it writes, in order."""

IDLE, WAITING, RUNNING = range(3)
FIRST = -1
BEING_WRITTEN = -2  # less the row that writes


@dataclass(frozen=True)
class Interpretation:
    """What became of the runs. All arrays are [runs].

    finished: every task ran and no worker is left waiting. stuck: no worker could take a turn, yet tasks are left.
    Neither: max_turns ran out. wrong: a task read, or found in what it wrote, something else than it should have.
    complaint: the first wrong read as one line, None if there was none. turns: of the longest run.
    """

    finished: Bools
    stuck: Bools
    wrong: Bools
    complaint: str | None
    turns: int

    @property
    def ok(self) -> bool:
        """Every run finished with every read right."""
        return bool(self.finished.all() and not self.wrong.any())


@dataclass(frozen=True)
class Expected:
    """What rows one after the other leave: for each operand the row that wrote its slot before, and at the end."""

    before: Ints
    last: Ints


def expected_versions(table: TaskTable) -> Expected:
    """The row that last wrote each operand's slot before its own row (-1: none has), and each slot's last writer."""
    last = np.full(table.num_slots, FIRST, dtype=np.int64)
    before = np.empty(len(table.slot), dtype=np.int64)
    slots: list[int] = table.slot.tolist()
    bounds: list[int] = table.start.tolist()
    reads: list[int] = table.num_reads.tolist()
    for row in range(table.num_tasks):
        low, high = bounds[row], bounds[row + 1]
        before[low:high] = last[slots[low:high]]
        last[slots[low + reads[row] : high]] = row
    return Expected(before, last)


def interpret(
    table: TaskTable,
    workers: int | None = None,
    *,
    runs: int = 1,
    seed: int = 0,
    epochs: int = 1,
    max_turns: int | None = None,
) -> Interpretation:
    """Run a table `runs` times under random interleavings, following who wrote what.

    workers: that run at once. Ticket mode: any number, 4 by default. Static: with fewer than there are queues, a queue
    starts when another has ended, as thread blocks do; all by default. epochs: times the table is run, one after
    the other, on counters that are not reset. max_turns: turns of one epoch, by default enough for any table to end, so
    none can hang it. Raises InvalidArgumentError.
    """
    queues = len(table.queues)
    workers = (4 if table.mode is Mode.TICKET else queues) if workers is None else workers
    for what, value in (("workers", workers), ("runs", runs), ("epochs", epochs)):
        if value < (0 if what == "workers" and not queues else 1):
            raise InvalidArgumentError(what, got=str(value), allowed="1 or more")
    # Two turns a queue entry and one to take its ticket; every turn moves each unfinished run.
    budget = 3 * len(table.queue) + 2 if max_turns is None else max_turns
    batch = _Batch(table, workers, runs, np.random.default_rng(seed))
    turns = 0
    for epoch in range(epochs):
        turns = max(turns, batch.run(epoch, budget))
    return Interpretation(batch.finished, batch.stuck, batch.wrong, batch.complaint, turns)


def _padded(start: Ints, values: Ints, filler: int) -> Ints:
    """Rows of a ragged list as one matrix, short rows filled up."""
    counts = np.diff(start)
    out = np.full((len(counts) + 1, max(1, int(counts.max()) if len(counts) else 1)), filler, dtype=np.int64)
    row = np.repeat(np.arange(len(counts)), counts)
    out[row, np.arange(len(values)) - np.repeat(start[:-1], counts)] = values
    return out


class _Batch:
    """Runs side by side: every array has a row a run."""

    def __init__(self, table: TaskTable, workers: int, runs: int, rng: np.random.Generator):
        self.table, self.rng, self.runs, self.resident = table, rng, runs, workers
        self.ticket = table.mode is Mode.TICKET
        self.lanes = workers if self.ticket else len(table.queues)
        expected = expected_versions(table)
        self.last = expected.last
        write = table.is_write
        owner = np.repeat(np.arange(table.num_tasks, dtype=np.int64), np.diff(table.start))
        # Slots beyond the real ones take what padding reads and writes.
        spare_read, spare_write = table.num_slots, table.num_slots + 1

        def operands(mask: Bools, values: Ints, filler: int) -> Ints:
            start = np.concatenate(
                (np.zeros(1, np.int64), np.cumsum(np.bincount(owner[mask], minlength=len(table.task))))
            )
            return _padded(start, values[mask], filler)

        self.read_slot = operands(~write, table.slot, spare_read)
        self.read_value = operands(~write, expected.before, FIRST)
        keys = owner * (table.num_slots + 2) + table.slot
        own = ~write & np.isin(keys, keys[write])
        self.late_slot = operands(~write & ~own, table.slot, spare_read)
        self.late_value = operands(~write & ~own, expected.before, FIRST)
        self.write_slot = operands(write, table.slot, spare_write)
        self.post = _padded(table.posts.start, table.posts.first, table.num_counters)
        self.amount = _padded(table.posts.start, table.posts.second, 0)
        by_counter = np.argsort(table.waits.first, kind="stable")
        bounds = np.searchsorted(table.waits.first[by_counter], np.arange(table.num_counters + 1))
        self.waiter = _padded(bounds.astype(np.int64), table.waits.row[by_counter], table.num_tasks)
        # Padding waits for a value that is never reached.
        self.threshold = _padded(bounds.astype(np.int64), table.waits.second[by_counter], np.iinfo(np.int64).max // 2)
        self.counter = np.zeros((runs, table.num_counters + 1), dtype=np.int64)
        self.finished = np.ones(runs, dtype=np.bool_)
        self.stuck = np.zeros(runs, dtype=np.bool_)
        self.wrong = np.zeros(runs, dtype=np.bool_)
        self.complaint: str | None = None

    def run(self, epoch: int, budget: int) -> int:
        """One epoch; returns the turns taken."""
        table, runs, lanes = self.table, self.runs, self.lanes
        lengths = np.diff(table.queue_start) if not self.ticket else np.zeros(lanes, dtype=np.int64)
        self.totals = np.append(table.totals, 0) * epoch
        self.version = np.full((runs, table.num_slots + 2), FIRST, dtype=np.int64)
        self.ended = np.zeros((runs, table.num_tasks + 1), dtype=np.int64)
        self.missing = np.zeros((runs, table.num_tasks + 1), dtype=np.int64)
        above = self.counter[:, table.waits.first] - self.totals[table.waits.first] < table.waits.second
        np.add.at(self.missing.T, table.waits.row, above.T)
        self.place = np.zeros((runs, lanes), dtype=np.int64)
        self.state = np.full((runs, lanes), IDLE, dtype=np.int64)
        self.task = np.full((runs, lanes), table.num_tasks, dtype=np.int64)
        self.tickets = np.zeros(runs, dtype=np.int64)
        alive = np.flatnonzero(self.finished)
        turns = 0
        while len(alive) and turns < budget:
            enabled = self._enabled(alive, lengths)
            can = enabled.any(axis=1)
            alive, enabled = alive[can], enabled[can]
            if not len(alive):
                break
            chance = self.rng.random(enabled.shape)
            chance[~enabled] = -1
            self._turn(alive, chance.argmax(axis=1))
            turns += 1
        idle = (self.state == IDLE).all(axis=1)
        over = (self.tickets >= len(table.queue)) if self.ticket else (self.place >= lengths).all(axis=1)
        complete = idle & over
        blocked = np.zeros(self.runs, dtype=np.bool_)
        everyone = np.arange(self.runs)
        blocked[everyone] = ~self._enabled(everyone, lengths).any(axis=1)
        self.stuck |= ~complete & blocked & self.finished
        once = (self.ended[:, :-1] == 1).all(axis=1) & (self.version[:, : table.num_slots] == self.last).all(axis=1)
        self._blame(
            self.finished & complete & ~once, "tasks that did not run once, or slots that hold another's result"
        )
        self.finished &= complete
        return turns

    def _enabled(self, alive: Ints, lengths: Ints) -> Bools:
        """Which workers of each run could take a turn."""
        state, task = self.state[alive], self.task[alive]
        ready = (state == RUNNING) | ((state == WAITING) & (self.missing[alive[:, None], task] <= 0))
        if self.ticket:
            return ready | ((state == IDLE) & (self.tickets[alive] < len(self.table.queue))[:, None])
        left = (state == IDLE) & (self.place[alive] < lengths)
        over = (state == IDLE) & (self.place[alive] >= lengths)
        admitted = np.arange(self.lanes) < (self.resident + over.sum(axis=1))[:, None]
        # A queue's next task needs no turn to be taken: it is there as soon as the one before has ended.
        first = (
            self.table.queue[
                np.minimum(self.table.queue_start[:-1] + self.place[alive], max(0, len(self.table.queue) - 1))
            ]
            if len(self.table.queue)
            else np.zeros_like(state)
        )
        return (ready | (left & (self.missing[alive[:, None], first] <= 0))) & admitted

    def _turn(self, run: Ints, lane: Ints) -> None:
        state = self.state[run, lane]
        ending = state == RUNNING
        self._end(run[ending], lane[ending])
        starting = state == WAITING
        idle = state == IDLE
        if self.ticket:
            self._take(run[idle], lane[idle])
        else:
            self.task[run[idle], lane[idle]] = self.table.queue[
                self.table.queue_start[lane[idle]] + self.place[run[idle], lane[idle]]
            ]
            starting |= idle
        self._start(run[starting], lane[starting])

    def _take(self, run: Ints, lane: Ints) -> None:
        self.task[run, lane] = self.table.queue[self.tickets[run]]
        self.tickets[run] += 1
        self.state[run, lane] = WAITING

    def _start(self, run: Ints, lane: Ints) -> None:
        task = self.task[run, lane]
        self.state[run, lane] = RUNNING
        self._compare(run, task, self.read_slot[task], self.read_value[task], "reads")
        self.version[run[:, None], self.write_slot[task]] = (BEING_WRITTEN - task)[:, None]

    def _end(self, run: Ints, lane: Ints) -> None:
        task = self.task[run, lane]
        self.state[run, lane] = IDLE
        self.place[run, lane] += 1
        self._compare(run, task, self.late_slot[task], self.late_value[task], "is still reading")
        written = self.write_slot[task]
        mine = np.broadcast_to((BEING_WRITTEN - task)[:, None], written.shape)
        self._compare(run, task, written, mine, "is writing")
        self.version[run[:, None], written] = task[:, None]
        self.ended[run, task] += 1
        for column in range(self.post.shape[1]):
            self._post(run, self.post[task, column], self.amount[task, column])

    def _post(self, run: Ints, counter: Ints, amount: Ints) -> None:
        real = counter < self.table.num_counters
        run, counter, amount = run[real], counter[real], amount[real]
        old = self.counter[run, counter] - self.totals[counter]
        self.counter[run, counter] += amount
        threshold = self.threshold[counter]
        passed = (old[:, None] < threshold).astype(np.int64) - ((old + amount)[:, None] < threshold)
        # One waiter may stand twice in a counter's list.
        np.subtract.at(self.missing, (run[:, None], self.waiter[counter]), passed)

    def _compare(self, run: Ints, task: Ints, slot: Ints, value: Ints, does: str) -> None:
        found = self.version[run[:, None], slot]
        wrong = (found != value) & (slot < self.table.num_slots)
        if not wrong.any():
            return
        at, column = (int(i[0]) for i in np.nonzero(wrong))
        names = [self._writer(int(value[at, column])), self._writer(int(found[at, column]))]
        self._blame(
            np.isin(np.arange(self.runs), run[wrong.any(axis=1)]),
            f"{self.table.name(int(task[at]))} {does} slot {slot[at, column]} of {names[0]}, but finds {names[1]}",
        )

    def _writer(self, version: int) -> str:
        if version == FIRST:
            return "what it held at first"
        if version <= BEING_WRITTEN:
            return f"half a result of {self.table.name(BEING_WRITTEN - version)}"
        return f"the result of {self.table.name(version)}"

    def _blame(self, runs: Bools, complaint: str) -> None:
        self.wrong |= runs
        if self.complaint is None and runs.any():
            self.complaint = complaint


def execute(
    table: TaskTable,
    memory: Mapping[int, Array],
    operators: Mapping[str, Operator],
    workers: int | None = None,
    *,
    seed: int = 0,
    max_turns: int | None = None,
) -> dict[int, Array]:
    """Run a table once with real numbers, workers taking turns at random.

    memory: tile number -> array, for the tiles that are there at first. operators: opcode name -> function. A task gets
    its reads as they are at its start, and stores its writes at its end. Returns tile number -> array, one entry a tile
    that was given or written and whose slot still holds it. Raises InvalidArgumentError for an operator that is missing
    or returns another number of arrays than its task writes, a read of memory that nobody filled, or workers that are
    stuck (no table that verify passed does that).
    """
    lanes = (4 if workers is None else workers) if table.mode is Mode.TICKET else len(table.queues)
    queues: list[list[int]] = [queue.tolist() for queue in table.queues]
    slots = dict(zip(table.tile.tolist(), table.slot.tolist(), strict=True))
    store: dict[int, Array] = {slots[tile]: array for tile, array in memory.items() if tile in slots}
    holds: dict[int, int] = {slots[tile]: tile for tile in memory if tile in slots}
    rng = np.random.default_rng(seed)
    counter = np.zeros(table.num_counters, dtype=np.int64)
    at = [0] * lanes
    running: list[tuple[int, Sequence[Array]] | None] = [None] * lanes
    taken: list[int | None] = [None] * lanes
    ready: list[int] = []
    budget = 4 * len(table.queue) + 2 if max_turns is None else max_turns
    for _ in range(budget):
        for lane in range(lanes):
            queue = 0 if table.mode is Mode.TICKET else lane
            if taken[lane] is None and at[queue] < len(queues[queue]):
                taken[lane] = queues[queue][at[queue]]
                at[queue] += 1
        ready = [lane for lane in range(lanes) if running[lane] or _can_start(table, taken[lane], counter)]
        if not ready:
            break
        lane = ready[int(rng.integers(len(ready)))]
        now = running[lane]
        if now is None:
            row = taken[lane]
            assert row is not None
            running[lane] = (row, _apply(table, row, store, operators))
        else:
            _finish(table, now, store, holds, counter)
            running[lane] = taken[lane] = None
    if ready or any(row is not None for row in taken):
        stuck = next((table.name(row) for row in taken if row is not None), "nothing")
        raise InvalidArgumentError("execute", got=f"workers stuck at {stuck}", next="Verify the table.")
    return {tile: store[slot] for slot, tile in holds.items()}


def _can_start(table: TaskTable, row: int | None, counter: Ints) -> bool:
    if row is None:
        return False
    part = slice(int(table.waits.start[row]), int(table.waits.start[row + 1]))
    return bool((counter[table.waits.first[part]] >= table.waits.second[part]).all())


def _apply(
    table: TaskTable, row: int, store: Mapping[int, Array], operators: Mapping[str, Operator]
) -> Sequence[Array]:
    name = table.opcode_names[int(table.opcode[row])]
    operator = operators.get(name)
    if operator is None:
        raise InvalidArgumentError("operators", got=f"none for {name!r}", allowed=", ".join(table.opcode_names))
    low, high = int(table.start[row]), int(table.start[row + 1])
    middle = low + int(table.num_reads[row])
    missing = [slot for slot in table.slot[low:middle].tolist() if slot not in store]
    if missing:
        raise InvalidArgumentError("memory", got=f"{table.name(row)} reads slot {missing[0]}, which nobody filled")
    written = operator([store[slot] for slot in table.slot[low:middle].tolist()])
    if len(written) != high - middle:
        raise InvalidArgumentError(f"operator {name!r}", got=f"{len(written)} arrays", allowed=str(high - middle))
    return written


def _finish(
    table: TaskTable, done: tuple[int, Sequence[Array]], store: dict[int, Array], holds: dict[int, int], counter: Ints
) -> None:
    row, written = done
    middle, high = int(table.start[row] + table.num_reads[row]), int(table.start[row + 1])
    for slot, tile, array in zip(
        table.slot[middle:high].tolist(), table.tile[middle:high].tolist(), written, strict=True
    ):
        store[slot], holds[slot] = array, tile
    part = slice(int(table.posts.start[row]), int(table.posts.start[row + 1]))
    np.add.at(counter, table.posts.first[part], table.posts.second[part])
