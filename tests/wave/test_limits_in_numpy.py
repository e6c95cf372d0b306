"""top_k and top_p inside a launch: the kernel's own source in NumPy, on logits of every kind, against the sampler."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from onewave.ops.sampling import RowParameters, sample
from onewave.wave.kernel.sample import narrow
from onewave.wave.plan.layout import STEP_WORDS, Word, draw_words, several_words

sys.path.insert(0, str(Path(__file__).parent))
import draw_aot
from gluon_in_numpy import WAVE, Memory, function, launch
from numpy_memory import wrapped

ROWS, TOKENS = 16, 3
# What draw_aot's kernel calls by its module's name.
MODULES = (*WAVE, draw_aot)


def drawn(logits: np.ndarray, draws: list[list[float]], uniform: list[float], workers: int) -> list[int]:
    """The tokens that as many workers come to by their own rows of logits, float32 [batch, vocabulary]."""
    return tokens_and_rounds(logits, draws, uniform, workers)[0]


def rounds_of(logits: np.ndarray, words: list[float], number: float) -> int:
    """How many rounds one sequence's search takes."""
    return tokens_and_rounds(logits, [words], [number], 2)[1][0]


def tokens_and_rounds(
    logits: np.ndarray, draws: list[list[float]], uniform: list[float], workers: int
) -> tuple[list[int], list[int]]:
    batch, vocabulary = logits.shape
    padded = 1 << (batch - 1).bit_length()
    blocks = -(-vocabulary // ROWS)
    cuts = np.linspace(0, blocks, workers + 1).astype(int)
    heads = np.zeros((workers, STEP_WORDS), dtype=np.int32)
    heads[:, Word.FIRST_BLOCK], heads[:, Word.BLOCKS] = cuts[:-1], np.diff(cuts)
    memory = Memory(1 << 22)
    several = memory.put(np.full(several_words(TOKENS, padded, workers)[1], -1, dtype=np.int64))
    behind = memory.put(np.full(64, 77, dtype=np.int64))
    found = memory.put(np.zeros((2, workers, padded), dtype=np.int64))
    numbers = [[*row, number, 0.5, 0.5] for row, number in zip(draws, uniform, strict=True)]
    arguments = {
        "several": several,
        "draws": memory.put(np.array(numbers)),
        "heads": memory.put(heads),
        "out": memory.put(logits.view(np.int32)),
        "best": memory.put(logits.max(axis=1)),
        "drawn": found,
        "out_stride": vocabulary,
        "begin": 0,
        "batch": batch,
        "NB": padded,
        "R": ROWS,
        "TOKENS": TOKENS,
    }
    launch(memory, workers, arguments, modules=MODULES, name="draw_alone")
    assert (memory.get(behind, (64,)) == 77).all()
    rows, rounds = memory.get(found, (2, workers, padded))[:, :, :batch].tolist()
    assert all(row == rows[0] for row in rows), "workers that come to different tokens"
    assert all(row == rounds[0] for row in rounds)
    return rows[0], rounds[0]


def expected(logits: np.ndarray, draws: list[list[float]], uniform: list[float]) -> list[int]:
    temperature, min_p, top_k, top_p = zip(*draws, strict=True)
    rows = RowParameters.build(
        temperature=temperature, top_k=[int(k) for k in top_k], top_p=top_p, min_p=min_p, device=torch.device("cpu")
    )
    return sample(torch.from_numpy(logits), torch.tensor(uniform, dtype=torch.float64), rows).tolist()


VOCABULARY = 1500
LAST = 1 - 2.0**-53
UNIFORM = (0.6, LAST)


def normal(scale: float, *, steps: int = 0) -> np.ndarray:
    """One row of logits, [1, vocabulary]; with steps, rounded to so many a unit, so that many are equal."""
    values = np.random.default_rng(int(scale * 10)).standard_normal((1, VOCABULARY)) * scale
    return (np.round(values * steps) / steps if steps else values).astype(np.float32)


def rows_of_every_kind() -> dict[str, np.ndarray]:
    dice = np.random.default_rng(0)
    near_zero = dice.choice([-1.0, 0.0, 1.0], (1, VOCABULARY)) * 2.0 ** -dice.integers(0, 149, (1, VOCABULARY))
    masked = normal(3)
    masked[:, dice.integers(1, VOCABULARY, 1200)] = -np.inf
    return {
        "flat": normal(0.3),
        "peaked": normal(8),
        "ties": normal(2, steps=4),
        "all equal": np.full((1, VOCABULARY), 1.25, dtype=np.float32),
        "of both signs down to the smallest numbers": near_zero.astype(np.float32),
        "float16": normal(2).astype(np.float16).astype(np.float32),
        "bfloat16": (normal(2).view(np.uint32) & 0xFFFF0000).view(np.float32),
        "far from zero": normal(0.5) + np.float32(1e4),
        "mostly masked": masked,
    }


LOGITS = rows_of_every_kind()
LIMITS = {
    "the best alone": draw_words(1.0, top_k=1),
    "a few": draw_words(0.7, top_k=7),
    "all but one": draw_words(2.0, top_k=VOCABULARY - 1),
    "the whole vocabulary": draw_words(1.0, top_k=VOCABULARY),
    "more than there are": draw_words(1.0, top_k=10**6),
    "a tiny share": draw_words(1.0, top_p=1e-300),
    "half": draw_words(1.3, top_p=0.5),
    "nearly everything": draw_words(1.0, top_p=LAST),
    "both": draw_words(0.9, top_k=40, top_p=0.9),
    "all three": draw_words(0.8, 0.02, 200, 0.95),
    "only what is as likely as the best": draw_words(1.0, 1.0, 0, 0.9),
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("workers", [1, 3])
def test_tokens_are_those_of_the_sampler(kind: str, workers: int) -> None:
    """All limits and numbers side by side, one sequence each, of the same logits."""
    draws = [words for words in LIMITS.values() for _ in UNIFORM]
    uniform = list(UNIFORM) * len(LIMITS)
    logits = LOGITS[kind].repeat(len(draws), axis=0)
    assert drawn(logits, draws, uniform, workers) == expected(logits, draws, uniform)


def test_sequences_with_and_without_limits_do_not_disturb_each_other() -> None:
    dice = np.random.default_rng(1)
    logits = np.concatenate([normal(scale) for scale in (0.5, 1, 2, 4, 5)])
    draws = [draw_words(1.0), LIMITS["both"], draw_words(0.6, 0.05), LIMITS["half"], draw_words(1.5)]
    for number in range(3):
        uniform = dice.uniform(size=5).tolist()
        together = drawn(logits, draws, uniform, 3)
        assert together == expected(logits, draws, uniform)
        alone = [drawn(logits[i : i + 1], draws[i : i + 1], uniform[i : i + 1], 2 + number)[0] for i in range(5)]
        assert together == alone


def test_equals_at_the_limit_are_kept_in_the_order_of_their_ids() -> None:
    logits = np.zeros((1, VOCABULARY), dtype=np.float32)
    logits[0, 700] = 1.0
    seen: list[set[int]] = []
    for limits in (draw_words(1.0, top_k=4), draw_words(1.0, top_p=(np.e + 2.5) / (np.e + VOCABULARY - 1))):
        draws, uniform = [limits] * 64, [i / 64 for i in range(64)]
        seen.append(set(drawn(logits.repeat(64, axis=0), draws, uniform, 3)))
    assert seen == [{700, 0, 1, 2}] * 2


def test_logits_that_are_no_numbers_end_the_search() -> None:
    logits = np.full((1, VOCABULARY), np.nan, dtype=np.float32)
    assert 0 <= drawn(logits, [LIMITS["all three"]], [0.5], 3)[0] < VOCABULARY


def test_a_search_takes_few_rounds() -> None:
    """A round is a hop, so that their number is what limits cost."""
    most = {"peaked": 6, "flat": 14, "ties": 8, "all equal": 1}
    for kind, rounds in most.items():
        for words in LIMITS.values():
            assert rounds_of(LOGITS[kind], words, 0.6) <= rounds, kind


def test_a_logit_over_the_temperature_is_rounded_as_a_division_rounds_it() -> None:
    """Where rounding turns between two float32, above all: quotients next to numbers of 25 bits."""
    dice = np.random.default_rng(5)
    over = function(narrow.over.fn, {"gl": SimpleNamespace(float32=np.float32, float64=np.float64)}, ())
    temperatures = dice.integers(1 << 23, 1 << 24, 400_000).astype(np.float32)
    halfway = dice.integers(1 << 24, 1 << 25, 400_000) | 1
    near = (halfway * temperatures.astype(np.float64)).astype(np.float32)
    near = np.nextafter(near, dice.choice([-np.inf, 0, np.inf], 400_000).astype(np.float32) + near * 0)
    bits = dice.integers(0, 1 << 32, 400_000, dtype=np.uint32).view(np.float32)
    for logits in (near, -near * np.float32(2.0**-40), bits):
        with np.errstate(all="ignore"):
            expected = logits / temperatures
            found = over(wrapped(logits), 1.0 / temperatures.astype(np.float64))
        assert np.array_equal(found, expected, equal_nan=True)
