"""The search as it is compiled: its PTX run thread by thread, several blocks or one beside what others show."""

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
from ptx_in_numpy import Block, Program, plain
from ptx_memories import Global

from onewave.ops.sampling import RowParameters, sample
from onewave.ops.sampling.op import draw_words
from onewave.ops.sampling.search_impl import words_of_sets

BLOCKS, SHARE, VOCABULARY = 3, 672, 2000  # the last block has fewer rows than the others


@lru_cache(maxsize=1)
def compiled() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "search_aot.py"), "there"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


class Search:
    """A row's buffers, kept from launch to launch."""

    def __init__(self) -> None:
        self.memory = Global(1 << 20)
        self.sets = self.put(np.full(words_of_sets(BLOCKS), -1, dtype=np.int64), written=True)
        self.epochs = self.put(np.zeros(BLOCKS, dtype=np.int32), written=True)

    def put(self, array: np.ndarray, *, written: bool = False) -> int:
        at = self.memory.put(array, writable=written)
        self.memory.readable[at : at + array.nbytes] = True
        return at

    def draw(self, logits: np.ndarray, words: list[float], uniform: float) -> int:
        report, memory = compiled(), self.memory
        result = np.full(1, -1, dtype=np.int64)
        tokens = self.put(result, written=True)
        best = np.array([logits.max()], dtype=np.float32)
        given = [self.sets, self.epochs, self.put(np.array(words)), self.put(np.array([uniform])), self.put(logits)]
        given += [self.put(best), tokens, self.sets, VOCABULARY, VOCABULARY, SHARE, words_of_sets(BLOCKS), 1]
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
            block.blocks, block.await_words = BLOCKS, await_words
            block.run()

        with ThreadPoolExecutor(BLOCKS) as threads:
            list(threads.map(run_block, range(BLOCKS)))
        return int(memory.get(tokens, result)[0])


LIMITS = [draw_words(0.9, 0.0, 30, 1.0), draw_words(1.2, 0.0, 0, 0.8), draw_words(0.7, 0.001, 200, 0.95)]


@pytest.mark.parametrize("steps", [0, 8])
@pytest.mark.parametrize("words", LIMITS)
def test_compiled_limits_keep_what_the_samplers_keep(words: list[float], steps: int) -> None:
    """Launch after launch. With steps, logits are whole numbers of such parts of 1, so that many are equal."""
    dice = np.random.default_rng(4)
    search = Search()
    temperature, min_p, top_k, top_p = words
    rows = RowParameters.build(
        temperature=[temperature], top_k=[int(top_k)], top_p=[top_p], min_p=[min_p], device=torch.device("cpu")
    )
    for uniform in (float(dice.uniform()), 1 - 2.0**-53, 0.0):
        logits = (dice.standard_normal(VOCABULARY) * 2).astype(np.float32)
        logits = np.round(logits * steps) / np.float32(steps) if steps else logits
        expected = sample(torch.from_numpy(logits)[None], torch.tensor([uniform], dtype=torch.float64), rows)
        assert search.draw(logits, words, uniform) == int(expected)
