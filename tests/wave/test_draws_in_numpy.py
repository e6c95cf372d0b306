"""Tokens drawn inside a launch: the wave kernel's own source in NumPy against the host's sampler, step by step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onewave.ops.sampling import RowParameters, sample, uniforms
from onewave.wave.plan.layout import draw_words, limit_words

sys.path.insert(0, str(Path(__file__).parent))
from test_decode_in_numpy import LONG, Simulated
from tiny_decoders import random_model

MODEL = random_model(replace(LONG, qkv_bias=True, vocab_size=1100))
COUNT, SLOTS, FIRST = 4, [2, 0, 1], [0, 4, 2]
TEMPERATURE, MIN_P = [0.7, 0.0, 1.9], [0.0, 0.0, 0.02]
# Of the three sequences: none; one of each; all three.
TOP_K, TOP_P = ([0, 0, 0], [0, 3, 20], [40, 0, 900]), ([1.0, 1.0, 1.0], [0.9, 0.5, 1.0], [0.95, 1.0, 0.8])


def simulated(workers: int) -> Simulated:
    wave = Simulated(MODEL, 3, workers, 3)
    wave.fill(SLOTS, FIRST)
    return wave


def table(numbers: np.ndarray, limits: int = 0) -> np.ndarray:
    fixed = map(draw_words, TEMPERATURE, MIN_P, TOP_K[limits], TOP_P[limits])
    return np.concatenate((list(fixed), numbers), axis=1)


@pytest.mark.parametrize(("workers", "limits"), [(5, 0), (3, 1), (1, 2)])
def test_tokens_are_those_of_the_hosts_sampler(workers: int, limits: int) -> None:
    one, many = (simulated(workers) for _ in range(2))
    numbers = uniforms([11, 12, 13], [0, 0, 0], 2 * COUNT)
    rows = RowParameters.build(
        temperature=TEMPERATURE, top_k=TOP_K[limits], top_p=TOP_P[limits], min_p=MIN_P, device=torch.device("cpu")
    )
    tokens, expected = [5, 6, 7], list[list[int]]()
    for step in range(2 * COUNT):
        logits = one.step(tokens, [first + step for first in FIRST], SLOTS)
        tokens = sample(logits, torch.from_numpy(numbers[:, step].copy()), rows).tolist()
        expected.append(tokens)
    assert len({tuple(row) for row in expected}) == len(expected)
    tokens, found = [5, 6, 7], list[list[int]]()
    for begin in range(0, 2 * COUNT, COUNT):
        positions = [first + begin for first in FIRST]
        # A launch comes between that takes the likeliest, from where it makes nothing.
        many.several(tokens, positions, SLOTS, COUNT, [limit_words(0)] * 3)
        made = many.several(tokens, positions, SLOTS, COUNT, draws=table(numbers[:, begin : begin + COUNT], limits))
        tokens = [row[-1] for row in made]
        found += [list(step) for step in zip(*made, strict=True)]
    assert found == expected
    for ours, theirs in zip(many.caches(), one.caches(), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_a_sequence_that_draws_stops_where_it_should() -> None:
    wave = simulated(5)
    numbers = uniforms([11, 12, 13], [0, 0, 0], COUNT)
    whole = simulated(2).several([5, 6, 7], FIRST, SLOTS, COUNT, draws=table(numbers))
    limits = [limit_words(FIRST[0] + 2), limit_words(1 << 40, [whole[1][0]]), limit_words(1 << 40, [whole[2][2]])]
    assert whole[2].index(whole[2][2]) == 2
    found = wave.several([5, 6, 7], FIRST, SLOTS, COUNT, limits, table(numbers))
    assert found == [[*row[:n], *[-1] * (COUNT - n)] for row, n in zip(whole, (2, 1, 3), strict=True)]
