"""Drawing a token as it is compiled: its PTX run thread by thread, several blocks or one beside what others show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
from onewave.wave.plan.layout import DRAW_WORDS, STEP_WORDS, Word, draw_words, several_words

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


def run(kept: np.ndarray, draws: np.ndarray, heads: list[np.ndarray], out: np.ndarray) -> np.ndarray:
    """What blocks say, each of the rows of its head, of the sequences from the first that draws on, int64 [2, blocks,
    BATCH]: rows, rounds. Heads of nothing are of blocks that do not run: what they would show stands in `kept`."""
    report, memory = compiled(), Global(1 << 20)
    begin = int(np.isnan(draws[:, 0]).sum())

    def put(array: np.ndarray, *, written: bool = False) -> int:
        at = memory.put(array, writable=written)
        memory.readable[at : at + array.nbytes] = True
        return at

    found = np.zeros((2, len(heads), BATCH), dtype=np.int64)
    result = put(found, written=True)
    best = np.where(np.isnan(out), -np.inf, out).max(axis=1)
    given = [put(kept, written=True), put(draws), put(np.array(heads)), put(out.view(np.int32)), put(best), result]
    given += [out.shape[1], begin, BATCH]
    program = Program(plain(report["ptx"]))
    given += [0] * (len(program.parameters) - len(given))
    arguments = {name: value for (_, name), value in zip(program.parameters, given, strict=True)}
    until = time.monotonic() + 60

    def await_words(spans: np.ndarray) -> None:
        while (memory.bytes[spans].view(np.int32) == -1).any():
            assert time.monotonic() < until, "words that never come"
            time.sleep(0.001)

    def run_block(number: int) -> None:
        block = Block(program, memory, arguments, number, report["shared"])
        block.blocks, block.await_words = len(heads), await_words
        block.run()

    with ThreadPoolExecutor(len(heads)) as threads:
        list(threads.map(run_block, [number for number, head in enumerate(heads) if head.any()]))
    return memory.get(result, found)


def head_of(first: int, end: int) -> np.ndarray:
    head = np.zeros(STEP_WORDS, dtype=np.int32)
    head[[Word.FIRST_BLOCK, Word.BLOCKS]] = (first // ROWS, (end - first) // ROWS)
    return head


def drawn_by(logits: np.ndarray, temperature: float, min_p: float, uniform: float) -> int:
    """What the middle one of three blocks says, which has made rows FIRST to LAST of these logits of sequence 1."""
    scaled = logits / np.float32(temperature)
    weights = np.rint(np.exp((scaled - scaled.max()).astype(np.float64)) * 2.0**44)
    weights = np.where(weights < min_p * 2.0**44, 0, weights).astype(np.int64)
    kept = np.full(several_words(TOKENS, BATCH, BLOCKS)[1] * 2, -1, dtype=np.int32)
    sums = kept[BLOCKS * BATCH * 12 :][: BLOCKS * BATCH * 4].reshape(BLOCKS, BATCH, 4)
    for block, span in ((0, slice(0, FIRST)), (2, slice(LAST, VOCABULARY))):
        total = int(weights[span].sum())
        sums[block, 1] = (total & 0x7FFFFFFF, total >> 31, span.start, 0)
    kept[BLOCKS * BATCH * 20 :][4:8] = (ELSEWHERE, 0, 0, 0)
    table = np.full((BATCH, DRAW_WORDS + TOKENS), np.nan)
    table[1, : DRAW_WORDS + 1] = (*draw_words(temperature, min_p), uniform)
    out = np.full((BATCH, VOCABULARY), np.nan, dtype=np.float32)
    out[1] = logits
    nothing = np.zeros(STEP_WORDS, dtype=np.int32)
    return int(run(kept, table, [nothing, head_of(FIRST, LAST), nothing], out)[0, 1, 1])


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


LIMITS = [draw_words(0.9, 0.0, 30, 1.0), draw_words(1.2, 0.0, 0, 0.8), draw_words(0.7, 0.001, 200, 0.95)]


@pytest.mark.parametrize("steps", [0, 8])
@pytest.mark.parametrize("second", LIMITS[1:])
def test_compiled_limits_keep_what_the_samplers_keep(second: list[float], steps: int) -> None:
    """Three blocks, one with more rows than a round of threads; with steps, logits are whole numbers of such parts of
    1, so that many are equal."""
    dice = np.random.default_rng(4)
    logits = (dice.standard_normal((BATCH, VOCABULARY)) * 2).astype(np.float32)
    logits = np.round(logits * steps) / np.float32(steps) if steps else logits
    kept = np.full(several_words(TOKENS, BATCH, BLOCKS)[1] * 2, -1, dtype=np.int32)
    for uniform in (float(dice.uniform()), 1 - 2.0**-53):
        table = np.zeros((BATCH, DRAW_WORDS + TOKENS))
        table[:, : DRAW_WORDS + 1] = [(*LIMITS[0], uniform), (*second, uniform)]
        temperature, min_p, top_k, top_p = table[:, :DRAW_WORDS].T.tolist()
        rows = RowParameters.build(
            temperature=temperature,
            top_k=[int(k) for k in top_k],
            top_p=top_p,
            min_p=min_p,
            device=torch.device("cpu"),
        )
        expected = sample(torch.from_numpy(logits), torch.full((BATCH,), uniform, dtype=torch.float64), rows)
        heads = [head_of(*span) for span in ((0, FIRST), (FIRST, LAST), (LAST, VOCABULARY))]
        found, rounds = run(kept, table, heads, logits)
        assert (found == expected.numpy()).all()
        assert (rounds[0] == rounds).all()
        assert 0 < rounds[0, 0] < rounds[0, 1] < 30
