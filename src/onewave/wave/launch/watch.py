"""Read what a launch has left: the watch buffer of one that stalled, the times of one that was traced."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onewave.tiles.sim.trace import Trace
from onewave.wave.plan.program import WaveProgram
from onewave.wave.plan.regions import Region

HEADER_WORDS, RECORD_WORDS = 16, 8
_COUNTER, _DATA = 1, 2


def watch_words(workers: int, budget: int, host_address: int) -> npt.NDArray[np.int32]:
    """Lay out the watch buffer before a launch, as kernel/spin.py has it."""
    words = np.zeros(HEADER_WORDS + workers * RECORD_WORDS, dtype=np.int32)
    words[1] = budget
    words[2:4] = np.array([host_address], dtype=np.uint64).view(np.int32)
    return words


class Stall(NamedTuple):
    """A thread block that gave up waiting: its number, its step or task, and what it waited for."""

    worker: int
    step: int
    is_data: bool
    address: int
    expected: int
    got: int


def stall_records(words: npt.NDArray[np.int32]) -> Iterator[Stall]:
    """Yield the records of a watch buffer that thread blocks have written (kernel/spin.py)."""
    for worker, record in enumerate(words[HEADER_WORDS:].reshape(-1, RECORD_WORDS)):
        if int(record[0]) in (_COUNTER, _DATA):
            address = int(record[2:4].view(np.uint64)[0])
            yield Stall(worker, int(record[1]), int(record[0]) == _DATA, address, int(record[4]), int(record[5]))


def stalls(
    program: WaveProgram, words: npt.NDArray[np.int32], exchange_address: int, counters_address: int
) -> list[dict[str, object]]:
    """List the workers that gave up: worker, task, counter, expected, got.

    counter: a counter's number, or the tensor and word of data that never came, and the task that makes it.
    """
    found: list[dict[str, object]] = []
    for stall in stall_records(words):
        entry: dict[str, object] = {"worker": stall.worker, "task": program.names[stall.step]}
        if stall.is_data:
            word = (stall.address - exchange_address) // 4
            entry["counter"] = _tile_name(program.regions, word % program.set_words)
            entry["expected"], entry["got"] = "data", "none"
        else:
            entry["counter"] = f"counter {(stall.address - counters_address) // 4}"
            entry["expected"], entry["got"] = stall.expected, stall.got
        found.append(entry)
    return found


def _tile_name(regions: Sequence[Region], word: int) -> str:
    for region in regions:
        if region.first <= word < region.first + region.words:
            return f"{region.name} word {word - region.first} (of {region.producer})"
    return f"word {word}"


def measured_trace(
    words: npt.NDArray[np.int32],
    steps: npt.NDArray[np.int32],
    task: npt.NDArray[np.integer],
    names: Sequence[str],
    phases: Sequence[str],
) -> Trace:
    """Make a trace of what the tasks have stored, lane by lane: words [tasks, 4], nanoseconds of wait, start and end.

    steps: of each worker. task: each one's number.
    """
    times = words[:, :3].astype(np.int64)
    # The timer's low word wraps every 4.3 s; differences modulo 2^32 stay right.
    times = (times - times[:, 0].min(initial=2**31 - 1) + (1 << 31)) % (1 << 32) - (1 << 31)
    times -= times[:, 0].min(initial=0)
    return Trace(
        source="measured",
        unit="ns",
        workers=len(steps),
        task=task.astype(np.int64),
        worker=np.repeat(np.arange(len(steps)), steps).astype(np.int64),
        wait_start=times[:, 0].astype(np.float64),
        start=times[:, 1].astype(np.float64),
        end=times[:, 2].astype(np.float64),
        name=tuple(names),
        phase=tuple(phases),
    )
