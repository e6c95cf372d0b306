"""Run a task table with real numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onewave.tiles.order.schedule import Mode
from onewave.tiles.proof.table import TaskTable

Array = npt.NDArray[Any]
Operator = Callable[[Sequence[Array]], Sequence[Array]]
"""Given the arrays that a task reads, in order, returns those that it writes, in order."""


def execute(
    table: TaskTable, memory: Mapping[int, Array], operators: Mapping[str, Operator], *, seed: int = 0
) -> dict[int, Array]:
    """Run a table once, workers (one a queue; 4 by ticket) taking turns at random.

    memory: tile number -> array, for the tiles that are there at first. operators: opcode name -> function. A task gets
    its reads as they are at its start, and stores its writes at its end. Returns tile number -> array, one entry a tile
    that was given or written and whose slot still holds it. Fails where workers are stuck.
    """
    queues: list[list[int]] = [queue.tolist() for queue in table.queues]
    lanes = 4 if table.mode is Mode.TICKET else len(queues)
    slots = dict(zip(table.tile.tolist(), table.slot.tolist(), strict=True))
    store: dict[int, Array] = {slots[tile]: array for tile, array in memory.items() if tile in slots}
    holds: dict[int, int] = {slots[tile]: tile for tile in memory if tile in slots}
    rng, counter = np.random.default_rng(seed), np.zeros(table.num_counters, dtype=np.int64)
    taken: list[int | None] = [None] * lanes
    running: list[Sequence[Array] | None] = [None] * lanes
    while True:
        for lane in range(lanes):
            queue = queues[0 if table.mode is Mode.TICKET else lane]
            if taken[lane] is None and queue:
                taken[lane] = queue.pop(0)
        there = [(lane, row) for lane, row in enumerate(taken) if row is not None]
        ready = [lane for lane, row in there if running[lane] is not None or _can_start(table, row, counter)]
        if not ready:
            stuck = [table.name(row) for _, row in there]
            assert not stuck, f"workers stuck at {stuck}"
            return {tile: store[slot] for slot, tile in holds.items()}
        lane = ready[int(rng.integers(len(ready)))]
        row, written = taken[lane], running[lane]
        low, high = int(table.start[row]), int(table.start[row + 1])
        middle = low + int(table.num_reads[row])
        if written is None:
            operator = operators[table.opcode_names[int(table.opcode[row])]]
            running[lane] = operator([store[slot] for slot in table.slot[low:middle].tolist()])
            continue
        ends = zip(table.slot[middle:high].tolist(), table.tile[middle:high].tolist(), written, strict=True)
        for slot, tile, array in ends:
            store[slot], holds[slot] = array, tile
        part = slice(int(table.posts.start[row]), int(table.posts.start[row + 1]))
        np.add.at(counter, table.posts.first[part], table.posts.second[part])
        running[lane] = taken[lane] = None


def _can_start(table: TaskTable, row: int, counter: npt.NDArray[np.int64]) -> bool:
    part = slice(int(table.waits.start[row]), int(table.waits.start[row + 1]))
    return bool((counter[table.waits.first[part]] >= table.waits.second[part]).all())
