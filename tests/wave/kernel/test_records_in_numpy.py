"""The ring of records, its source run in NumPy: every step finds its own record, and those ahead of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kit.numpy_gpu.gluon_in_numpy import Fault, Matrix, Memory, launch
from kit.numpy_gpu.happens_before import Race
from onewave.wave.kernel import records as records_module
from onewave.wave.kernel.parameters import Records
from onewave.wave.kernel.records import (
    copy_first_records,
    copy_next_records,
    fence_records,
    place_word,
    record_of,
    record_word,
    records_memory,
)
from onewave.wave.plan.layout import POINTERS, RECORDS_AHEAD, STEP_WORDS, TOGETHER


@gluon.jit
def ring(box, first_step, num_steps, out, PLACES: gl.constexpr, AHEAD: gl.constexpr):
    """Each step's first word of its record, that of the one AHEAD of it, and a place, if PLACES."""
    groups, places, full = records_memory(box, PLACES)
    records = Records(box=box, first_step=first_step, num_steps=num_steps, groups=groups, places=places, full=full)
    copy_first_records(records, PLACES)
    for step in range(num_steps):
        fence_records(step)
        at = out + step * 3
        gl.store(at, record_word(record_of(step, records), 0))
        further = gl.minimum(step + AHEAD, num_steps - 1)
        gl.store(at + 1, record_word(record_of(further, records), 0))
        if PLACES:
            gl.store(at + 2, place_word(places, 3).to(gl.int32))
        copy_next_records(records, step)
        gl.thread_barrier()


def read(num_steps: int, ahead: int, *, places: bool, planted: Sequence[Fault] = ()) -> np.ndarray:
    memory, first = Memory(1 << 16), 5
    rows = np.zeros((1 + first + num_steps, STEP_WORDS), dtype=np.int32)
    rows[0] = np.arange(100, 100 + POINTERS, dtype=np.int64).view(np.int32)
    rows[1:, 0] = 1000 + np.arange(len(rows) - 1)
    out = memory.put(np.zeros(max(1, num_steps * 3), dtype=np.int32))
    arguments: dict[str, Any] = {
        "box": Matrix(memory, memory.put(rows), rows.shape, (TOGETHER, STEP_WORDS)),
        "first_step": first,
        "num_steps": num_steps,
        "out": out,
        "PLACES": places,
        "AHEAD": ahead,
    }
    launch(memory, 1, arguments, modules=(records_module, sys.modules[__name__]), name="ring", planted=planted)
    return memory.get(out, (num_steps * 3,)).reshape(num_steps, 3)


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("ahead", [1, RECORDS_AHEAD])
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
        read(11, 1, places=False, planted=[Fault("fence_records", "fence_async_shared()", "pass")])
