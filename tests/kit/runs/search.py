"""The search for a token as it is compiled: its PTX run thread by thread, several blocks beside each other."""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kit.build import Built
from kit.calls.call import Call, empty
from kit.ptx.ptx_in_numpy import Block, Program, plain
from kit.ptx.ptx_memories import Global
from kit.recorder import Recorded
from kit.source_digest import called_by, forget
from onewave.ops.sampling import RowParameters, draw_impl, rounds_impl, sample
from onewave.ops.sampling.op import draw_words
from onewave.ops.sampling.search_impl import draw_limited_kernel, words_of_sets
from onewave.wave.kernel.spin import load_words

_BLOCKS, _SHARE, _VOCABULARY = 3, 672, 2000  # the last block has fewer rows than the others


@gluon.jit
def there(pointers, watch, block, step, WORDS: gl.constexpr):
    """poll_words of words that are there already."""
    return load_words(pointers, WORDS)


@contextmanager
def _without_polls() -> Generator[None]:
    """Meanwhile polls are loads of words that are there already: the run waits for them itself."""
    functions = called_by(draw_limited_kernel)
    with patch.object(draw_impl, "poll_words", there), patch.object(rounds_impl, "poll_words", there):
        for function in functions:
            forget(function)
        yield
    for function in functions:
        forget(function)


class _Search:
    """A row's buffers, kept from launch to launch."""

    def __init__(self, built: Built) -> None:
        self.built, self.memory = built, Global(1 << 20)
        self.program = Program(plain(built.ptx))
        self.sets = self.put(np.full(words_of_sets(_BLOCKS), -1, dtype=np.int64), written=True)
        self.epochs = self.put(np.zeros(_BLOCKS, dtype=np.int32), written=True)

    def put(self, array: np.ndarray, *, written: bool = False) -> int:
        at = self.memory.put(array, writable=written)
        self.memory.readable[at : at + array.nbytes] = True
        return at

    def draw(self, logits: np.ndarray, words: list[float], uniform: float) -> int:
        memory = self.memory
        result = np.full(1, -1, dtype=np.int64)
        tokens = self.put(result, written=True)
        best = np.array([logits.max()], dtype=np.float32)
        given = [self.sets, self.epochs, self.put(np.array(words)), self.put(np.array([uniform])), self.put(logits)]
        given += [self.put(best), tokens, self.sets, _VOCABULARY, _VOCABULARY, _SHARE, words_of_sets(_BLOCKS), 1]
        given += [0] * (len(self.program.parameters) - len(given))
        arguments = {name: value for (_, name), value in zip(self.program.parameters, given, strict=True)}
        until = time.monotonic() + 600

        def await_words(spans: np.ndarray) -> None:
            while (memory.bytes[spans].view(np.int32) == -1).any():
                assert time.monotonic() < until, "words that never come"
                time.sleep(0.001)

        def run_block(number: int) -> None:
            block = Block(self.program, memory, arguments, number, self.built.shared)
            block.blocks, block.await_words = _BLOCKS, await_words
            block.run()

        with ThreadPoolExecutor(_BLOCKS) as threads:
            list(threads.map(run_block, range(_BLOCKS)))
        return int(memory.get(tokens, result)[0])


_LIMITS = [draw_words(0.9, 0.0, 30, 1.0), draw_words(1.2, 0.0, 0, 0.8), draw_words(0.7, 0.001, 200, 0.95)]


def _checked(_: Recorded, built: Built) -> dict[str, Any]:
    """Report which tokens are others than the sampler's, launch after launch; with whole logits, many are equal."""
    wrong: list[str] = []
    for words in _LIMITS:
        temperature, min_p, top_k, top_p = words
        rows = RowParameters.build(
            temperature=[temperature], top_k=[int(top_k)], top_p=[top_p], min_p=[min_p], device=torch.device("cpu")
        )
        for steps in (0, 8):
            dice, search = np.random.default_rng(4), _Search(built)
            for uniform in (float(dice.uniform()), 1 - 2.0**-53, 0.0):
                logits = (dice.standard_normal(_VOCABULARY) * 2).astype(np.float32)
                logits = np.round(logits * steps) / np.float32(steps) if steps else logits
                expected = sample(torch.from_numpy(logits)[None], torch.tensor([uniform], dtype=torch.float64), rows)
                if (found := search.draw(logits, words, uniform)) != int(expected):
                    wrong.append(f"{words}, steps {steps}, uniform {uniform}: {found} and not {int(expected)}")
    return {"agrees": not wrong, "wrong": wrong}


def _draw() -> None:
    rows = RowParameters.build(temperature=[0.8], top_k=[50], top_p=[0.9], min_p=[0.0], device=torch.device("cuda"))
    sample(empty(1, _VOCABULARY, dtype=torch.float32), empty(1, dtype=torch.float64), rows)


SEARCH_RUNS = {
    "run of search": Call(_draw, kernels=("draw_limited_kernel",), inside=_without_polls, check=_checked),
}
