"""Run a task table in NumPy with several workers whose turns come in random order.

Many runs go side by side, each with an interleaving of its own. A task takes two turns: at its start it reads and
begins to write, at its end it has written and posts; other workers' turns fall between. Without data, every slot holds
a version: which row wrote it last, and as which tile. Each read is compared with the version that the rows one after
the other would have left of its tile, at both turns, so that a slot overwritten under a reader is noticed too.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.graph import distinct, entries_of
from onewave.tiles.order.schedule import Csr, Ints, Mode
from onewave.tiles.proof.table import TaskTable
from onewave.tiles.sim.machine import MAX_WORKERS

Bools = npt.NDArray[np.bool_]

IDLE, WAITING, RUNNING = range(3)
# Numbers held at once, all runs together.
MAX_CELLS = 1 << 27
FIRST = -1
BEING_WRITTEN = -2  # less the version that is written


@dataclass(frozen=True)
class Interpretation:
    """The outcomes of the runs. All arrays are [runs].

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
    """The versions that rows leave when they run one after the other.

    A version is row * tiles + tile, or -1 for what was there at first.
    versions: [operands], of its tile: what a read must find, what a write leaves. last: [slots], at the end.
    """

    versions: Ints
    last: Ints


def expected_versions(table: TaskTable) -> Expected:
    """The version of every operand and each slot's last."""
    last = np.full(table.num_slots, FIRST, dtype=np.int64)
    versions: list[int] = []
    newest: dict[int, int] = {}
    tiles: list[int] = table.tile.tolist()
    bounds: list[int] = table.start.tolist()
    reads: list[int] = table.num_reads.tolist()
    for row in range(table.num_tasks):
        low, high = bounds[row], bounds[row + 1]
        middle = low + reads[row]
        versions += [newest.get(tile, FIRST) for tile in tiles[low:middle]]
        written = [row * table.num_tiles + tile for tile in tiles[middle:high]]
        newest.update(zip(tiles[middle:high], written, strict=True))
        versions += written
        last[table.slot[middle:high]] = written
    return Expected(np.array(versions, dtype=np.int64), last)


def interpret(
    table: TaskTable,
    workers: int | None = None,
    *,
    runs: int = 1,
    seed: int = 0,
    epochs: int = 1,
    max_turns: int | None = None,
) -> Interpretation:
    """Run a table `runs` times under random interleavings, following which task wrote what.

    workers: that run at once. Ticket mode: any number, 4 by default. Static: with fewer than there are queues, a queue
    starts when another has ended, as thread blocks do; all by default. epochs: times the table is run, one after
    the other, on counters that are not reset. max_turns: turns of one epoch, by default enough for any table to end, so
    none can hang it. Raises InvalidArgumentError, also for more runs than some GiB hold.
    """
    for what, value in (("runs", runs), ("epochs", epochs)):
        if value < 1:
            raise InvalidArgumentError(what, got=str(value), allowed="1 or more")
    workers = _checked_workers(table, workers, runs, seed)
    # Two turns a queue entry and one to take its ticket; every turn moves each unfinished run.
    budget = 3 * len(table.queue) + 2 if max_turns is None else max_turns
    batch = _Batch(table, workers, runs, np.random.default_rng(seed))
    turns = 0
    for epoch in range(epochs):
        turns = max(turns, batch.run(epoch, budget))
    return Interpretation(batch.finished, batch.stuck, batch.wrong, batch.complaint, turns)


def _checked_workers(table: TaskTable, workers: int | None, runs: int, seed: int) -> int:
    """How many run at once. Refuses what no run can have, or more than memory holds."""
    queues = len(table.queues)
    most = max(MAX_WORKERS, queues)
    if workers is None:
        workers = 4 if table.mode is Mode.TICKET else queues
    if not min(1, queues) <= workers <= most:
        raise InvalidArgumentError("workers", got=str(workers), allowed=f"1 to {most:,}")
    if seed < 0:
        raise InvalidArgumentError("seed", got=str(seed), allowed="0 or more")
    _check_cells(table, runs, workers if table.mode is Mode.TICKET else queues)
    return workers


def _check_cells(table: TaskTable, runs: int, lanes: int) -> None:
    longest = max((int(np.diff(start).max(initial=0)) for start in (table.start, table.posts.start)), default=0)
    cells = 2 * table.num_tasks + table.num_slots + table.num_counters + len(table.waits.first) + longest + 4 * lanes
    if runs * cells > MAX_CELLS:
        most = MAX_CELLS // cells
        raise InvalidArgumentError(
            "runs",
            got=f"{runs} of {lanes:,} workers and {table.num_tasks:,} tasks with {len(table.waits.first):,} waits",
            allowed=f"up to {most}" if most else "smaller tables",
        )


class _Batch:
    """Runs side by side: every array has a row a run."""

    def __init__(self, table: TaskTable, workers: int, runs: int, rng: np.random.Generator):
        self.table, self.rng, self.runs, self.resident = table, rng, runs, workers
        self.ticket = table.mode is Mode.TICKET
        self.lanes = workers if self.ticket else len(table.queues)
        expected = expected_versions(table)
        self.last = expected.last
        owner = np.repeat(np.arange(table.num_tasks, dtype=np.int64), np.diff(table.start))
        write, keys = table.is_write, owner * max(1, table.num_slots) + table.slot
        own = ~write & np.isin(keys, keys[write])

        def operands(mask: Bools) -> Csr:
            return Csr.build(table.num_tasks, owner[mask], table.slot[mask], expected.versions[mask])

        # Slots and versions by row. At its end a task does not look again at what it overwrites itself.
        self.reads, self.late, self.writes = operands(~write), operands(~write & ~own), operands(write)
        self.begun = Csr(self.writes.start, self.writes.first, BEING_WRITTEN - self.writes.second)
        waits = table.waits
        self.waiters = Csr.build(table.num_counters, waits.first, waits.row, waits.second)
        self.counter = np.zeros((runs, table.num_counters), dtype=np.int64)
        self.finished = np.ones(runs, dtype=np.bool_)
        self.stuck = np.zeros(runs, dtype=np.bool_)
        self.wrong = np.zeros(runs, dtype=np.bool_)
        self.complaint: str | None = None

    def run(self, epoch: int, budget: int) -> int:
        """One epoch; returns the turns taken."""
        table, runs, lanes = self.table, self.runs, self.lanes
        lengths = np.diff(table.queue_start) if not self.ticket else np.zeros(lanes, dtype=np.int64)
        self.totals = table.totals * epoch
        self.version = np.full((runs, table.num_slots), FIRST, dtype=np.int64)
        self.ended = np.zeros((runs, table.num_tasks), dtype=np.int64)
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
        blocked = ~self._enabled(np.arange(runs), lengths).any(axis=1)
        self.stuck |= ~complete & blocked & self.finished
        once = (self.ended == 1).all(axis=1) & (self.version == self.last).all(axis=1)
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
        self._compare(run, task, self.reads, "reads")
        of, at = entries_of(self.begun.start, task)
        self.version[run[of], self.begun.first[at]] = self.begun.second[at]

    def _end(self, run: Ints, lane: Ints) -> None:
        task = self.task[run, lane]
        self.state[run, lane] = IDLE
        self.place[run, lane] += 1
        self._compare(run, task, self.late, "is still reading")
        self._compare(run, task, self.begun, "is writing")
        of, at = entries_of(self.writes.start, task)
        self.version[run[of], self.writes.first[at]] = self.writes.second[at]
        self.ended[run, task] += 1
        of, at = entries_of(self.table.posts.start, task)
        self._post(run[of], self.table.posts.first[at], self.table.posts.second[at])

    def _post(self, run: Ints, counter: Ints, amount: Ints) -> None:
        width = max(1, self.table.num_counters)
        run_at, at = np.divmod(distinct(run * width + counter), width)
        old = self.counter[run_at, at] - self.totals[at]
        np.add.at(self.counter, (run, counter), amount)
        new = self.counter[run_at, at] - self.totals[at]
        of, entry = entries_of(self.waiters.start, at)
        threshold = self.waiters.second[entry]
        passed = (old[of] < threshold).astype(np.int64) - (new[of] < threshold)
        # One waiter may stand twice in a counter's list.
        np.subtract.at(self.missing, (run_at[of], self.waiters.first[entry]), passed)

    def _compare(self, run: Ints, task: Ints, side: Csr, does: str) -> None:
        of, at = entries_of(side.start, task)
        slot, value = side.first[at], side.second[at]
        found = self.version[run[of], slot]
        wrong = np.flatnonzero(found != value)
        if not len(wrong):
            return
        first = wrong[0]
        names = [self._writer(int(versions[first])) for versions in (value, found)]
        self._blame(
            np.isin(np.arange(self.runs), run[of[wrong]]),
            f"{self.table.name(int(task[of[first]]))} {does} slot {slot[first]} of {names[0]}, but finds {names[1]}",
        )

    def _writer(self, version: int) -> str:
        if version == FIRST:
            return "what it held at first"
        half = version <= BEING_WRITTEN
        row, tile = divmod(BEING_WRITTEN - version if half else version, self.table.num_tiles)
        return f"{'half ' if half else ''}tile {tile} of {self.table.name(row)}"

    def _blame(self, runs: Bools, complaint: str) -> None:
        self.wrong |= runs
        if self.complaint is None and runs.any():
            self.complaint = complaint
