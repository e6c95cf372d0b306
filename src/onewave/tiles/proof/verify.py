"""Prove that a schedule can neither deadlock, race, nor lose a task; or name what shows that it can.

Checked in this order: once (each task in exactly one place), residency (planned workers fit the machine at once), count
(each wait is for what the counter's posts add up to), deadlock (queues, waits and resources have no cycle; a ticket
order needs nothing later than itself, so it is live for any number of workers), race (every read-after-write,
write-after-read and write-after-write pair on every physical slot is ordered by happens-before).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any, cast

import numpy as np

from onewave.base.errors import InvalidArgumentError, VerificationError
from onewave.tiles.graph.graph import distinct
from onewave.tiles.order.schedule import Csr, Ints, Mode, Program, Schedule, Syncs
from onewave.tiles.proof.happens_before import Places, Step, find_cycle, topological_order, unordered_pairs

HAZARDS = ("RAW", "WAR", "WAW", "after")
RAW, WAR, WAW, AFTER = range(4)
_PROOF = object()


@dataclass(frozen=True)
class VerifiedSchedule:
    """A schedule that `verify` has proved; nothing else makes one. Its arrays can't be written to.

    order: the tasks in one order that happens-before allows. num_pairs: conflicting pairs that were found ordered.
    """

    schedule: Schedule
    order: Ints
    num_pairs: int
    proof: InitVar[object]

    def __post_init__(self, proof: object) -> None:
        if proof is not _PROOF:
            raise InvalidArgumentError(
                "VerifiedSchedule", got="one that was put together by hand", next="Call verify(schedule)."
            )


def verify(schedule: Schedule) -> VerifiedSchedule:
    """Prove a schedule, in nearly linear time.

    Raises VerificationError with its kind and witness, InvalidArgumentError when the arrays do not belong together.
    """
    _check_shapes(schedule)
    schedule = replace(_frozen(schedule), queues=tuple(map(_frozen, schedule.queues)))
    places = _check_once(schedule)
    _check_residency(schedule)
    _check_counts(schedule)
    _check_after(schedule)
    order = topological_order(schedule, places)
    if order is None:
        raise _deadlock(schedule)
    num_pairs = _check_races(schedule, places, order)
    order.flags.writeable = False
    return VerifiedSchedule(schedule, order, num_pairs, _PROOF)


def _check_shapes(schedule: Schedule) -> None:
    program, syncs = schedule.program, schedule.syncs
    n = program.num_tasks
    fits = (
        len(program.start) == n + 1
        and len(syncs.waits.start) == n + 1
        and len(syncs.posts.start) == n + 1
        and len(schedule.place) == program.num_tiles
        and len(program.tile) == len(program.is_write) == int(program.start[-1])
    )
    if not fits:
        raise InvalidArgumentError("schedule", got="arrays of other sizes than its program", next="Rebuild it.")
    for what, values, limit in (
        ("tile number", program.tile, program.num_tiles),
        ("counter", syncs.waits.first, syncs.num_counters),
        ("counter", syncs.posts.first, syncs.num_counters),
        ("task in after", program.after.reshape(-1), n),
    ):
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < limit):
            raise InvalidArgumentError(f"schedule: {what}", got="out of range", allowed=f"0 to {limit - 1}")
    if schedule.mode is Mode.TICKET and schedule.num_workers != 1:
        raise InvalidArgumentError("schedule: queues", got=str(schedule.num_workers), allowed="1 in ticket mode")


def _frozen(part: Any) -> Any:
    """A copy of a schedule, or a part, whose arrays can't be written to: what is proved stays what was proved."""
    if isinstance(part, (Schedule, Program, Syncs, Csr)):
        return replace(part, **{field.name: _frozen(getattr(part, field.name)) for field in fields(part)})
    if isinstance(part, np.ndarray):
        copy = cast("Ints", part).copy()
        copy.flags.writeable = False
        return copy
    return part


def _check_once(schedule: Schedule) -> Places:
    n = schedule.program.num_tasks
    lengths = [len(queue) for queue in schedule.queues]
    planned = np.concatenate([*schedule.queues, np.zeros(0, dtype=np.int64)]).astype(np.int64)
    if len(planned) and not (int(planned.min()) >= 0 and int(planned.max()) < n):
        raise InvalidArgumentError("schedule: task in a queue", got="out of range", allowed=f"0 to {n - 1}")
    times = np.bincount(planned, minlength=n)
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        task, found = schedule.program.ids[int(wrong[0])], int(times[wrong[0]])
        more = f" (and {len(wrong) - 1} more tasks)" if len(wrong) > 1 else ""
        raise VerificationError(
            "once",
            f"task {task} is planned {found} times, not once{more}",
            {"task": task, "expected": 1, "got": found},
        )
    worker, position = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    worker[planned] = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    position[planned] = np.concatenate([*(np.arange(k, dtype=np.int64) for k in lengths), np.zeros(0, np.int64)])
    return Places(worker, position)


def _check_residency(schedule: Schedule) -> None:
    planned = schedule.num_workers if schedule.program.num_tasks or schedule.mode is Mode.STATIC else 0
    if planned > schedule.co_resident:
        raise VerificationError(
            "residency",
            f"{planned} workers are planned, but only {schedule.co_resident} run at once: one that waits may keep the "
            "one it waits for from starting",
            {"planned": planned, "co_resident": schedule.co_resident},
            next="Plan fewer workers, or let them take tickets.",
        )


def _check_counts(schedule: Schedule) -> None:
    syncs = schedule.syncs
    counters, amounts = syncs.posts.first, syncs.posts.second
    totals = np.zeros(syncs.num_counters, dtype=np.int64)
    np.add.at(totals, counters, amounts)
    bad_posts = np.flatnonzero(amounts < 1)
    if len(bad_posts):
        at = int(bad_posts[0])
        raise _miscount(schedule, int(syncs.posts.row[at]), int(counters[at]), "posts", 1, int(amounts[at]))
    wrong = np.flatnonzero(syncs.waits.second != totals[syncs.waits.first])
    if len(wrong):
        at = int(wrong[0])
        counter = int(syncs.waits.first[at])
        task, got = int(syncs.waits.row[at]), int(syncs.waits.second[at])
        raise _miscount(schedule, task, counter, "waits for", int(totals[counter]), got)


def _miscount(schedule: Schedule, task: int, counter: int, does: str, expected: int, got: int) -> VerificationError:
    name = schedule.counter_name(counter) if schedule.counter_name else counter
    name_of_task = schedule.program.ids[task]
    meaning = "its posts add up to" if does == "waits for" else "a post adds at least"
    return VerificationError(
        "count",
        f"task {name_of_task} {does} {got} on counter {name}, but {meaning} {expected}",
        {"counter": name, "task": name_of_task, "expected": expected, "got": got},
    )


def _check_after(schedule: Schedule) -> None:
    """A task that must run after itself never can, whatever its counters say."""
    own = np.flatnonzero(schedule.program.after[:, 0] == schedule.program.after[:, 1])
    if len(own):
        task = schedule.program.ids[int(schedule.program.after[own[0], 0])]
        reason = f"{task} must run after itself"
        raise VerificationError("deadlock", reason, {"cycle": [task], "because": [reason]})


def _deadlock(schedule: Schedule) -> VerificationError:
    ids = schedule.program.ids
    steps = find_cycle(schedule, schedule.program.num_tasks)
    cycle = [ids[step.task] for step in steps]

    def why(step: Step, before: object) -> str:
        if step.counter is not None:
            return f"{ids[step.task]} waits for {before}"
        queue = "in the order of the tickets" if schedule.mode is Mode.TICKET else "in its worker's queue"
        return f"{ids[step.task]} stands after {before} {queue}"

    reasons = [why(step, cycle[at - 1]) for at, step in enumerate(steps)]
    names = [str(name) for name in cycle]
    ring = names if len(names) <= 12 else [*names[:11], "...", names[-1]]
    shown = reasons if len(reasons) <= 12 else [*reasons[:11], f"... {len(reasons) - 12} more ...", reasons[-1]]
    return VerificationError(
        "deadlock",
        f"{' -> '.join([*ring, names[0]])}: {'; '.join(shown)}",
        {"cycle": cycle, "because": reasons},
    )


@dataclass(frozen=True)
class Pairs:
    """Tasks that must be ordered, why, and on which tile; tile -1 for `after`."""

    earlier: Ints
    later: Ints
    hazard: Ints
    tile: Ints

    def where(self, keep: Ints) -> Pairs:
        return Pairs(self.earlier[keep], self.later[keep], self.hazard[keep], self.tile[keep])


def _check_races(schedule: Schedule, places: Places, order: Ints) -> int:
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    pairs = _conflicts(schedule, rank)
    loose = unordered_pairs(schedule, places, order, pairs.earlier, pairs.later)
    if len(loose):
        left = pairs.where(loose)
        # The first to show: the earliest task that comes too soon, and of what it disturbs a reader, the last one.
        at = int(np.lexsort((-left.earlier, left.hazard, left.later))[0])
        raise _race(schedule, left, at)
    return len(pairs.earlier)


def _race(schedule: Schedule, pairs: Pairs, at: int) -> VerificationError:
    program = schedule.program
    first, second = (program.ids[int(task[at])] for task in (pairs.earlier, pairs.later))
    hazard, number = int(pairs.hazard[at]), int(pairs.tile[at])
    witness: dict[str, object] = {"pair": [first, second], "hazard": HAZARDS[hazard]}
    if number < 0:
        text = f"nothing makes {second} wait for {first}, after which it must run"
        return VerificationError("race", text, witness)
    tile = program.tile_name(number)
    slot = int(schedule.place[number])
    shared = int(np.count_nonzero(schedule.place == slot)) > 1
    name: object = tile
    if shared and schedule.slot_name is not None:
        name = schedule.slot_name(slot)
        witness["slot"] = name
    witness["tile"] = tile
    told: dict[int, Callable[[], str]] = {
        RAW: lambda: f"{second} reads {name}, but nothing makes it wait for {first}, which writes it",
        WAR: lambda: f"{second} overwrites {name}, but nothing makes it wait for {first}, which still reads it",
        WAW: lambda: f"{second} overwrites {name}, but nothing makes it wait for {first}, which wrote it before",
    }
    return VerificationError("race", told[hazard](), witness)


def _conflicts(schedule: Schedule, rank: Ints) -> Pairs:
    """Every pair that must be ordered, at most two an access; all others follow from these.

    A version is what one write left in a tile, or what the tile held at first. Versions in one slot must live one after
    the other: all tasks of one have ended before the next is written. Which comes first is what the schedule says
    (rank), but versions of one and the same tile keep program order.
    """
    program = schedule.program
    by_tile = np.argsort(program.tile, kind="stable")
    tile, task, write = program.tile[by_tile], program.access_task[by_tile], program.is_write[by_tile]
    index = np.arange(len(tile), dtype=np.int64)
    first_of_tile = np.searchsorted(tile, tile, side="left").astype(np.int64)
    last_write = np.maximum.accumulate(np.where(write, index, -1)) if len(tile) else index
    inherited = ~write & (last_write < first_of_tile)
    # A write's version is numbered 2 i + 1, what a tile held at first 2 f: distinct, and in program order per tile.
    version = np.where(inherited, 2 * first_of_tile, 2 * last_write + 1)
    made = index[write]
    held = distinct(first_of_tile[inherited])
    ids = np.concatenate((2 * made + 1, 2 * held))
    writer = np.concatenate((task[made], np.full(len(held), -1, dtype=np.int64)))
    of_tile = np.concatenate((tile[made], tile[held]))
    when = np.where(writer >= 0, rank[writer] if len(rank) else writer, -1)
    slot = schedule.place[of_tile]
    lives = np.lexsort((ids, when, slot))
    ids, writer, of_tile, slot = ids[lives], writer[lives], of_tile[lives], slot[lives]
    follows = slot[1:] == slot[:-1]
    _check_preloads(schedule, of_tile, writer, follows)
    _check_own_writes(schedule, of_tile, writer, follows)
    next_writer = np.full(len(ids), -1, dtype=np.int64)
    next_tile = np.full(len(ids), -1, dtype=np.int64)
    next_writer[:-1][follows], next_tile[:-1][follows] = writer[1:][follows], of_tile[1:][follows]
    by_id = np.argsort(ids, kind="stable")
    read = index[~write]
    mine = by_id[np.searchsorted(ids[by_id], version[read])] if len(read) else read
    raw = (writer[mine], task[read], tile[read])
    war = (task[read], next_writer[mine], next_tile[mine])
    waw = (writer, next_writer, next_tile)
    # The same tile written twice, the later first: only program order knows that this is wrong.
    again = made[1:][tile[made[1:]] == tile[made[:-1]]] if len(made) else made
    before = made[:-1][tile[made[1:]] == tile[made[:-1]]] if len(made) else made
    late = rank[task[before]] > rank[task[again]] if len(again) else np.zeros(0, dtype=np.bool_)
    swapped = (task[before[late]], task[again[late]], tile[again[late]])
    after = (program.after[:, 0], program.after[:, 1], np.full(len(program.after), -1, dtype=np.int64))
    groups = ((RAW, raw), (WAR, war), (WAW, waw), (WAW, swapped), (AFTER, after))
    parts = [
        (part[0][keep], part[1][keep], np.full(int(keep.sum()), hazard, dtype=np.int64), part[2][keep])
        for hazard, part in groups
        for keep in [(part[0] >= 0) & (part[1] >= 0) & (part[0] != part[1])]
    ]
    earlier, later, hazard, tiles = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Pairs(earlier, later, hazard, tiles)


def _check_own_writes(
    schedule: Schedule, tile: Ints, writer: Ints, follows: np.ndarray[tuple[int], np.dtype[np.bool_]]
):
    """Nothing orders the writes of one task, so that no two of them may go to different tiles of one slot."""
    twice = np.flatnonzero(follows & (writer[1:] >= 0) & (writer[1:] == writer[:-1]) & (tile[1:] != tile[:-1]))
    if len(twice):
        program, at = schedule.program, int(twice[0])
        task = program.ids[int(writer[at])]
        names = [program.tile_name(int(number)) for number in tile[at : at + 2]]
        raise VerificationError(
            "race",
            f"{task} writes {names[0]} and {names[1]}, which share a slot, and only one of them can be left there",
            {"pair": [task, task], "hazard": "WAW", "tile": names[1]},
        )


def _check_preloads(schedule: Schedule, tile: Ints, writer: Ints, follows: np.ndarray[tuple[int], np.dtype[np.bool_]]):
    """Two tiles of one slot that both hold something before the first task can't both be right."""
    both = np.flatnonzero(follows & (writer[1:] < 0))
    if len(both):
        program = schedule.program
        names = [program.tile_name(int(tile[at])) for at in (both[0], both[0] + 1)]
        reader = [
            program.ids[int(program.access_task[np.flatnonzero((program.tile == int(t)) & ~program.is_write)[0]])]
            for t in (tile[both[0]], tile[both[0] + 1])
        ]
        raise VerificationError(
            "race",
            f"{names[0]} and {names[1]} share a slot, and {reader[0]} and {reader[1]} read what both held at first",
            {"pair": reader, "hazard": "RAW", "tile": names[1]},
        )
