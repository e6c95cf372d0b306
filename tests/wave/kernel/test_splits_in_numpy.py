"""How many splits a sequence uses: what the kernel's source says, run in NumPy, is what the host reckons with."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kit.numpy_gpu.gluon_in_numpy import Matrix, Memory, launch
from onewave.wave.kernel import records as records_module
from onewave.wave.kernel.attend import combine
from onewave.wave.kernel.attend.combine import split_of_keys
from onewave.wave.kernel.parameters import Records
from onewave.wave.kernel.records import copy_first_records, record_of, record_word, records_memory
from onewave.wave.kernel.words import WORD
from onewave.wave.plan.layout import STEP_WORDS, TOGETHER, splits_of
from onewave.wave.plan.steps import Word

LENGTHS = [
    *range(1, 40),
    *(near + at for near in (128, 256, 384, 1024, 8192) for at in (-1, 0, 1)),
    *(2048, 2049, 5000, 32769),
]


@gluon.jit
def used(box, lengths, count, out, MERGE_WORDS: gl.constexpr):
    """Splits that the first record's sequence has for each length, as split_of_keys has it."""
    groups, places, full = records_memory(box, False)
    records = Records(box=box, first_step=0, num_steps=1, groups=groups, places=places, full=full)
    copy_first_records(records, False)
    record = record_of(0, records)
    for at in range(count):
        length = gl.load(lengths + at)
        _, _, splits = split_of_keys(
            record_word(record, WORD.WINDOW), record_word(record, WORD.SPLITS), length, MERGE_WORDS
        )
        gl.store(out + at, splits)


@pytest.mark.parametrize("splits", [1, 2, 8, 16])
@pytest.mark.parametrize("window", [0, 100, 300, 4096])
@pytest.mark.parametrize("few", [0, 4])
def test_the_host_counts_as_the_kernel_does(splits: int, window: int, few: int) -> None:
    memory = Memory(1 << 16)
    rows = np.zeros((1 + TOGETHER, STEP_WORDS), dtype=np.int32)
    rows[1, [Word.SPLITS, Word.WINDOW]] = splits, window
    out = memory.put(np.zeros(len(LENGTHS), dtype=np.int32))
    arguments = {
        "box": Matrix(memory, memory.put(rows), rows.shape, (TOGETHER, STEP_WORDS)),
        "lengths": memory.put(np.array(LENGTHS, dtype=np.int32)),
        "count": len(LENGTHS),
        "out": out,
        "MERGE_WORDS": few,
    }
    launch(memory, 1, arguments, modules=(records_module, combine, sys.modules[__name__]), name="used")
    expected = [splits_of(min(length, window or length), splits, reader_merges=few > 0) for length in LENGTHS]
    assert memory.get(out, (len(LENGTHS),)).tolist() == expected
