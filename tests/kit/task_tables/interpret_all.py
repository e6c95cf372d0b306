"""Run a small table in every interleaving there is: the proof by exhaustion that tests hold `verify` against."""

from dataclasses import dataclass

import numpy as np

from onewave.base.errors import CapacityError
from onewave.tiles.order.schedule import Mode
from onewave.tiles.proof.interpret import BEING_WRITTEN, FIRST, expected_versions
from onewave.tiles.proof.table import TaskTable


@dataclass(frozen=True)
class Harm:
    """A fault of some interleaving. kind: once, deadlock (no worker can go on) or race (a wrong read or result)."""

    kind: str
    text: str


State = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Tickets taken; per worker 2 x its queue place (static) or row + 1 (ticket), plus 1 while running; counters; slots."""


class _World:
    """The table as plain lists, and the steps between states."""

    def __init__(self, table: TaskTable, workers: int):
        self.ticket = table.mode is Mode.TICKET
        self.queues: list[list[int]] = [queue.tolist() for queue in table.queues]
        self.lanes = workers if self.ticket else len(self.queues)
        self.name = table.name
        expected = expected_versions(table)
        self.last: tuple[int, ...] = tuple(expected.last.tolist())
        self.reads: list[list[tuple[int, int]]] = []
        self.writes: list[list[tuple[int, int]]] = []
        self.waits: list[list[tuple[int, int]]] = []
        self.posts: list[list[tuple[int, int]]] = []
        slots: list[int] = table.slot.tolist()
        versions: list[int] = expected.versions.tolist()
        for row in range(table.num_tasks):
            low, high = int(table.start[row]), int(table.start[row + 1])
            middle = low + int(table.num_reads[row])
            self.reads.append(list(zip(slots[low:middle], versions[low:middle], strict=True)))
            self.writes.append(list(zip(slots[middle:high], versions[middle:high], strict=True)))
            for side, found in ((table.waits, self.waits), (table.posts, self.posts)):
                part = slice(int(side.start[row]), int(side.start[row + 1]))
                found.append(list(zip(side.first[part].tolist(), side.second[part].tolist(), strict=True)))

    def row_of(self, lane: int, code: int) -> int | None:
        """The row that a worker stands at, None if it has none."""
        if self.ticket:
            return code // 2 - 1 if code > 1 else None
        queue = self.queues[lane]
        return queue[code // 2] if code // 2 < len(queue) else None

    def steps(self, state: State) -> list[State | Harm]:
        """Every state that one turn leads to, or the harm it does."""
        tickets, lanes, counters, slots = state
        found: list[State | Harm] = []
        for lane, code in enumerate(lanes):
            row = self.row_of(lane, code)
            if row is None:
                if self.ticket and tickets < len(self.queues[0]):
                    taken = 2 * (self.queues[0][tickets] + 1)
                    found.append((tickets + 1, self.with_lane(lanes, lane, taken), counters, slots))
            elif code % 2:
                found.append(self.end(state, lane, row))
            elif all(counters[k] >= value for k, value in self.waits[row]):
                found.append(self.start(state, lane, row))
        return found

    def with_lane(self, lanes: tuple[int, ...], lane: int, code: int) -> tuple[int, ...]:
        changed = (*lanes[:lane], code, *lanes[lane + 1 :])
        # By ticket all workers are alike: which is which makes no difference.
        return tuple(sorted(changed)) if self.ticket else changed

    def start(self, state: State, lane: int, row: int) -> State | Harm:
        tickets, lanes, counters, slots = state
        for slot, version in self.reads[row]:
            if slots[slot] != version:
                return Harm("race", f"{self.name(row)} reads version {slots[slot]} of slot {slot}, not {version}")
        changed = list(slots)
        for slot, version in self.writes[row]:
            changed[slot] = BEING_WRITTEN - version
        return tickets, self.with_lane(lanes, lane, lanes[lane] + 1), counters, tuple(changed)

    def end(self, state: State, lane: int, row: int) -> State | Harm:
        tickets, lanes, counters, slots = state
        changed = list(slots)
        own = {slot for slot, _ in self.writes[row]}
        for slot, version in self.reads[row]:
            if slot not in own and slots[slot] != version:
                return Harm("race", f"slot {slot} was overwritten while {self.name(row)} read it")
        for slot, version in self.writes[row]:
            if slots[slot] != BEING_WRITTEN - version:
                return Harm("race", f"slot {slot} was overwritten while {self.name(row)} wrote it")
            changed[slot] = version
        counts = list(counters)
        for counter, amount in self.posts[row]:
            counts[counter] += amount
        code = 0 if self.ticket else lanes[lane] + 1
        return tickets, self.with_lane(lanes, lane, code), tuple(counts), tuple(changed)

    def end_of(self, state: State) -> Harm | None:
        """The harm of a state that nothing leads out of."""
        tickets, lanes, _, slots = state
        rows = [self.row_of(lane, code) for lane, code in enumerate(lanes)]
        waiting = [self.name(row) for row in rows if row is not None]
        if waiting or (self.ticket and tickets < len(self.queues[0])):
            return Harm("deadlock", f"no worker can go on; {', '.join(waiting)} wait")
        if slots != self.last:
            return Harm("race", "a slot ends with another result than the last one")
        return None


def explore(table: TaskTable, workers: int = 2, *, max_states: int = 1_000_000) -> Harm | None:
    """Look for an interleaving that goes wrong; None proves that there is none.

    workers: in ticket mode; a static table has one a queue. Every reachable state is reached once.
    Raises CapacityError when there are more than max_states.
    """
    times = np.bincount(table.queue, minlength=table.num_tasks)
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        return Harm("once", f"{table.name(int(wrong[0]))} is planned {int(times[wrong[0]])} times")
    world = _World(table, workers)
    first: State = (0, (0,) * world.lanes, (0,) * table.num_counters, (FIRST,) * table.num_slots)
    seen: set[State] = {first}
    waiting: list[State] = [first]
    while waiting:
        state = waiting.pop()
        following = world.steps(state)
        if not following:
            harm = world.end_of(state)
            if harm is not None:
                return harm
        for new in following:
            if isinstance(new, Harm):
                return new
            if new not in seen:
                if len(seen) >= max_states:
                    raise CapacityError("explore", got=f"over {max_states:,} states", next="Use a smaller table.")
                seen.add(new)
                waiting.append(new)
    return None
