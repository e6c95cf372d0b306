"""Prove a task table that came from elsewhere: read from a file, or changed since it was lowered."""

from dataclasses import replace

import numpy as np

from onewave.base.errors import InvalidArgumentError, VerificationError
from onewave.tiles.order.schedule import Csr, Ints, Program, Schedule, Syncs
from onewave.tiles.proof.table import TaskTable
from onewave.tiles.proof.verify import VerifiedSchedule, verify


def verify_table(table: TaskTable, program: Program | None = None) -> VerifiedSchedule:
    """Prove a table as `verify` proves a schedule; its rows, one after the other, say what must be computed.

    program: what the table must compute, if known: then every row is also held against its task.
    Raises VerificationError, InvalidArgumentError.
    """
    schedule = _by_rows(table) if program is None else _by_program(table, program)
    verified = verify(schedule)
    posted = np.zeros(table.num_counters, dtype=np.int64)
    np.add.at(posted, table.posts.first, table.posts.second)
    wrong = np.flatnonzero(posted != table.totals)
    if len(wrong):
        counter = int(wrong[0])
        expected, got = int(posted[counter]), int(table.totals[counter])
        raise VerificationError(
            "count",
            f"counter {counter} is said to rise by {got} an epoch, but its posts add up to {expected}",
            {"counter": counter, "expected": expected, "got": got},
        )
    return verified


def _by_rows(table: TaskTable) -> Schedule:
    numbers, first, tile = np.unique(table.tile, return_index=True, return_inverse=True)
    place = table.slot[first]
    if not np.array_equal(place[tile.reshape(-1)], table.slot):
        raise InvalidArgumentError("task table", got="one tile in two slots", next="Lower again.")
    program = Program(
        ids=tuple(table.name(row) for row in range(table.num_tasks)),
        start=table.start,
        tile=tile.reshape(-1).astype(np.int64),
        is_write=table.is_write,
        num_tiles=len(numbers),
        tile_name=lambda number: f"tile {numbers[number]}",
        opcodes=table.opcode,
        opcode_names=table.opcode_names,
        phases=table.phase,
        phase_names=table.phase_names,
    )
    syncs = Syncs(table.waits, table.posts, table.num_counters)
    return Schedule(
        program, table.queues, table.mode, table.co_resident, syncs, place, slot_name=lambda slot: f"slot {slot}"
    )


def _by_program(table: TaskTable, program: Program) -> Schedule:
    n = program.num_tasks
    if table.num_tasks != n or not np.array_equal(np.sort(table.task), np.arange(n)):
        raise InvalidArgumentError("task table", got="other tasks than the program's", allowed="a row a task")
    place = _places(table, program)
    by_task = np.argsort(table.task, kind="stable")

    def moved(side: Csr) -> Csr:
        return Csr.build(n, table.task[side.row], side.first, side.second)

    if len(program.opcodes) and not np.array_equal(table.opcode[by_task], program.opcodes):
        raise InvalidArgumentError("task table", got="other opcodes than the program's", allowed="its own")
    return Schedule(
        program=replace(program),
        queues=tuple(table.task[queue] for queue in table.queues),
        mode=table.mode,
        co_resident=table.co_resident,
        syncs=Syncs(moved(table.waits), moved(table.posts), table.num_counters),
        place=place,
    )


def _places(table: TaskTable, program: Program) -> Ints:
    """Where the table puts each tile, after checking that every row touches its task's tiles."""
    owner = table.task[np.repeat(np.arange(table.num_tasks, dtype=np.int64), np.diff(table.start))]
    ours = np.lexsort((program.tile, program.is_write, program.access_task))
    theirs = np.lexsort((table.tile, table.is_write, owner))
    same = (
        len(ours) == len(theirs)
        and np.array_equal(program.access_task[ours], owner[theirs])
        and np.array_equal(program.tile[ours], table.tile[theirs])
        and np.array_equal(program.is_write[ours], table.is_write[theirs])
    )
    if not same:
        raise InvalidArgumentError(
            "task table", got="rows that touch other tiles than their tasks", next="Lower again."
        )
    # Tiles that no task touches live where nothing else does.
    place = table.num_slots + np.arange(program.num_tiles, dtype=np.int64)
    place[table.tile] = table.slot
    if not np.array_equal(place[table.tile], table.slot):
        raise InvalidArgumentError("task table", got="one tile in two slots", next="Lower again.")
    return place
