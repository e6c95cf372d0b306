"""Read the watch buffer of a stalled launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def stalls(
    program: WaveProgram, words: npt.NDArray[np.int32], exchange_address: int, counters_address: int
) -> list[dict[str, object]]:
    """List the workers that gave up: worker, task, counter, expected, got.

    counter: a counter's number, or the tensor and word of data that never came, and the task that makes it.
    """
    found: list[dict[str, object]] = []
    records = words[HEADER_WORDS:].reshape(-1, RECORD_WORDS)
    for worker, record in enumerate(records):
        if int(record[0]) not in (_COUNTER, _DATA):
            continue
        address = int(record[2:4].view(np.uint64)[0])
        entry: dict[str, object] = {"worker": worker, "task": program.names[int(record[1])]}
        if int(record[0]) == _COUNTER:
            entry["counter"] = f"counter {(address - counters_address) // 4}"
            entry["expected"], entry["got"] = int(record[4]), int(record[5])
        else:
            word = (address - exchange_address) // 4
            entry["counter"] = _tile_name(program.regions, word % program.set_words)
            entry["expected"], entry["got"] = "data", "none"
        found.append(entry)
    return found


def _tile_name(regions: Sequence[Region], word: int) -> str:
    for region in regions:
        if region.first <= word < region.first + region.words:
            return f"{region.name} word {word - region.first} (of {region.producer})"
    return f"word {word}"
