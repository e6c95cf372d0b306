"""The ring of records, its source run in NumPy: every step finds its own record, and those ahead of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.kernel import records as notes
from onewave.wave.kernel.records import (
    bring_first,
    bring_next,
    let_go,
    noted,
    notes_memory,
    place_word,
    record_of,
)
from onewave.wave.plan.layout import NOTES, POINTERS, STEP_WORDS, TOGETHER

sys.path.insert(0, str(Path(__file__).parent))
from gluon_in_numpy import Fault, Matrix, Memory, launch
from happens_before import Race


@gluon.jit
def ring(records, first_step, num_steps, out, PLACES: gl.constexpr, AHEAD: gl.constexpr):
    """Of each step, its record's first word, that of the one AHEAD of it, and a place, if PLACES."""
    found, table, nfull = notes_memory(records, PLACES)
    bring_first(records, first_step, num_steps, found, table, nfull, PLACES)
    for step in range(num_steps):
        let_go(step)
        at = out + step * 3
        gl.store(at, noted(record_of(step, found, nfull), 0))
        further = gl.minimum(step + AHEAD, num_steps - 1)
        gl.store(at + 1, noted(record_of(further, found, nfull), 0))
        if PLACES:
            gl.store(at + 2, place_word(table, 3).to(gl.int32))
        bring_next(records, first_step, num_steps, step, found, nfull)
        gl.thread_barrier()


def read(num_steps: int, ahead: int, *, places: bool, planted: Sequence[Fault] = ()) -> np.ndarray:
    memory, first = Memory(1 << 16), 5
    rows = np.zeros((1 + first + num_steps, STEP_WORDS), dtype=np.int32)
    rows[0] = np.arange(100, 100 + POINTERS, dtype=np.int64).view(np.int32)
    rows[1:, 0] = 1000 + np.arange(len(rows) - 1)
    out = memory.put(np.zeros(max(1, num_steps * 3), dtype=np.int32))
    arguments: dict[str, Any] = {
        "records": Matrix(memory, memory.put(rows), rows.shape, (TOGETHER, STEP_WORDS)),
        "first_step": first,
        "num_steps": num_steps,
        "out": out,
        "PLACES": places,
        "AHEAD": ahead,
    }
    launch(memory, 1, arguments, modules=(notes, sys.modules[__name__]), name="ring", planted=planted)
    return memory.get(out, (num_steps * 3,)).reshape(num_steps, 3)


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("ahead", [1, NOTES])
def test_every_step_finds_its_record_and_those_ahead(num_steps: int, ahead: int) -> None:
    steps = np.arange(num_steps)
    for places in (True, False):
        found = read(num_steps, ahead, places=places)
        expected = np.stack(
            (1005 + steps, 1005 + np.minimum(steps + ahead, num_steps - 1), np.full(num_steps, 103 * places)), axis=1
        )
        assert (found == expected).all()


def test_records_that_are_replaced_before_anything_orders_that_and_their_loads_are_found() -> None:
    with pytest.raises(Race, match="a copy by TMA writes what the kernel's start read"):
        read(11, 1, places=False, planted=[Fault("let_go", "fence_async_shared()", "pass")])
