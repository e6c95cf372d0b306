"""Drawing a token as it is compiled: its PTX run thread by thread, one block beside what two others would show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from ptx_in_numpy import Block, Program, plain
from ptx_memories import Global

from onewave.ops.sampling import RowParameters, sample
from onewave.wave.layout import STEP_WORDS, Word, several_words

BATCH, BLOCKS, ROWS, TOKENS = 2, 3, 16, 4  # as draw_aot compiles it
VOCABULARY, FIRST, LAST = 2000, 512, 1824  # the block's rows are two rounds of 1,024 and not all of the second
ELSEWHERE = 77


@lru_cache(maxsize=1)
def compiled() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "draw_aot.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def drawn_by(logits: np.ndarray, temperature: float, min_p: float, uniform: float) -> int:
    """What the middle one of three blocks says, which has made rows FIRST to LAST of these logits of sequence 1."""
    report, memory = compiled(), Global(1 << 20)
    scaled = logits / np.float32(temperature)
    weights = np.rint(np.exp((scaled - scaled.max()).astype(np.float64)) * 2.0**44)
    weights = np.where(weights < min_p * 2.0**44, 0, weights).astype(np.int64)
    kept = np.full(several_words(TOKENS, BATCH, BLOCKS)[1] * 2, -1, dtype=np.int32)
    sums = kept[BLOCKS * BATCH * 12 :][: BLOCKS * BATCH * 4].reshape(BLOCKS, BATCH, 4)
    for block, span in ((0, slice(0, FIRST)), (2, slice(LAST, VOCABULARY))):
        total = int(weights[span].sum())
        sums[block, 1] = (total & 0x7FFFFFFF, total >> 31, span.start, 0)
    kept[BLOCKS * BATCH * 20 :][4:8] = (ELSEWHERE, 0, 0, 0)
    table = np.full((BATCH, 2 + TOKENS), np.nan)
    table[1, :3] = (temperature, min_p, uniform)
    head = np.zeros(STEP_WORDS, dtype=np.int32)
    head[[Word.FIRST_BLOCK, Word.BLOCKS]] = (FIRST // ROWS, (LAST - FIRST) // ROWS)
    out = np.full((BATCH, VOCABULARY), np.nan, dtype=np.float32)
    out[1, FIRST:LAST] = logits[FIRST:LAST]

    def put(array: np.ndarray, *, written: bool = False) -> int:
        at = memory.put(array, writable=written)
        memory.readable[at : at + array.nbytes] = True
        return at

    found = np.zeros(1, dtype=np.int64)
    result = put(found, written=True)
    best = np.array([logits.max()])
    given = [put(kept, written=True), put(table), put(head), put(out.view(np.int32)), put(best), result, VOCABULARY, 1]
    program = Program(plain(report["ptx"]))
    given += [0] * (len(program.parameters) - len(given))
    arguments = {name: value for (_, name), value in zip(program.parameters, given, strict=True)}
    block = Block(program, memory, arguments, 1, report["shared"])
    block.blocks = BLOCKS
    block.run()
    return int(memory.get(result, found)[0])


@pytest.mark.parametrize(("temperature", "min_p"), [(1.0, 0.0), (0.6, 0.0), (1.7, 0.01)])
def test_compiled_drawing_finds_the_samplers_token_among_its_rows(temperature: float, min_p: float) -> None:
    dice = np.random.default_rng(3)
    logits = (dice.standard_normal(VOCABULARY) * 2).astype(np.float32)
    rows = RowParameters.build(
        temperature=[temperature], top_k=[0], top_p=[1.0], min_p=[min_p], device=torch.device("cpu")
    )
    seen: set[bool] = set()
    for uniform in (0.0, 0.05, *dice.uniform(0.2, 0.95, 8), 1 - 2.0**-53):
        expected = int(sample(torch.from_numpy(logits)[None], torch.tensor([uniform], dtype=torch.float64), rows))
        mine = FIRST <= expected < LAST
        seen.add(mine)
        assert drawn_by(logits, temperature, min_p, float(uniform)) == (expected if mine else ELSEWHERE)
    assert seen == {True, False}
