"""Launches of several tokens that end: stop tokens, lengths, sequences that had stopped before, the host's request.

The wave kernel's own source in NumPy, against as many launches of one token each.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from onewave.wave.plan.layout import LIMIT_WORDS, limit_words

sys.path.insert(0, str(Path(__file__).parent))
from test_decode_in_numpy import LONG, Simulated
from tiny_decoders import random_model

BATCH, COUNT = 3, 5
FED, FIRST, SLOTS = [5, 6, 7], [0, 4, 2], [2, 0, 1]
NEVER = 1 << 40
# With biases, so that the head is not drawn as the embedding is, and tokens differ from one to the next.
MODEL = random_model(replace(LONG, qkv_bias=True))


def simulated(workers: int) -> Simulated:
    wave = Simulated(MODEL, BATCH, workers, BATCH)
    wave.fill(SLOTS, FIRST)
    return wave


@lru_cache(maxsize=1)
def one_by_one() -> tuple[list[list[int]], list[Tensor]]:
    """Twice COUNT tokens of each sequence, and both caches after them."""
    wave = simulated(3)
    tokens, made = FED, list[list[int]]()
    for step in range(2 * COUNT):
        tokens = wave.step(tokens, [first + step for first in FIRST], SLOTS).argmax(dim=1).tolist()
        made.append(tokens)
    return [list(row) for row in zip(*made, strict=True)], wave.caches()


def assert_caches_hold(wave: Simulated, lengths: list[int]) -> None:
    """So many of each sequence's new keys and values are those of single steps; nobody has written behind them."""
    for ours, theirs in zip(wave.caches(), one_by_one()[1], strict=True):
        for slot, first, length in zip(SLOTS, FIRST, lengths, strict=True):
            assert torch.equal(ours[:, slot, :, first : first + length], theirs[:, slot, :, first : first + length])
            assert ours[:, slot, :, first + length :].isnan().all()


def cut(row: list[int], length: int) -> list[int]:
    return row[:length] + [-1] * (COUNT - length)


def first_time(row: list[int], at_least: int) -> int:
    """Where a token stands that has not come before, from a place on."""
    return next(at for at in range(at_least, COUNT) if row[at] not in row[:at])


# Few workers stream more tiles a token than the ring holds, many fewer.
@pytest.mark.parametrize("workers", [2, 9])
def test_each_sequence_stops_by_itself_and_the_others_go_on_with_their_bits(workers: int) -> None:
    expected, _ = one_by_one()
    wave = simulated(workers)
    by_token = first_time(expected[0], 1)
    limits = [
        limit_words(NEVER, [130, expected[0][by_token]]),
        limit_words(FIRST[1] + 3),
        limit_words(NEVER, [128]),
    ]
    found = wave.several(FED, FIRST, SLOTS, COUNT, limits)
    assert found == [cut(expected[0], by_token + 1), cut(expected[1], 3), expected[2][:COUNT]]
    assert_caches_hold(wave, [by_token + 1, 3, COUNT])
    # The next launch is fed what the last one reported, stop tokens and -1 included.
    positions = [first + COUNT for first in FIRST]
    found = wave.several([row[-1] for row in found], positions, SLOTS, COUNT, limits)
    assert found == [cut([], 0), cut([], 0), expected[2][COUNT:]]
    assert_caches_hold(wave, [by_token + 1, 3, 2 * COUNT])


@pytest.mark.parametrize("workers", [2, 9])
def test_a_launch_ends_when_its_last_sequence_has_stopped_and_the_next_one_goes_on(workers: int) -> None:
    expected, _ = one_by_one()
    wave = simulated(workers)
    lengths = [1, 3, 2]
    limits = [limit_words(first + length) for first, length in zip(FIRST, lengths, strict=True)]
    found = wave.several(FED, FIRST, SLOTS, COUNT, limits)
    assert found == [cut(row, length) for row, length in zip(expected, lengths, strict=True)]
    epochs = wave.bench.memory.get(wave.bench.arguments["epochs"], (workers,))
    assert epochs.tolist() == [3] * workers  # as many tokens as the longest has
    assert_caches_hold(wave, lengths)
    # Nobody is left: nothing is made, and nothing stays behind that would disturb a launch.
    last = [row[length - 1] for row, length in zip(expected, lengths, strict=True)]
    positions = [first + length for first, length in zip(FIRST, lengths, strict=True)]
    assert wave.several(last, positions, SLOTS, COUNT, limits) == [cut([], 0)] * BATCH
    assert wave.bench.memory.get(wave.bench.arguments["epochs"], (workers,)).tolist() == [3] * workers
    found = wave.several(last, positions, SLOTS, COUNT)
    assert found == [row[length : length + COUNT] for row, length in zip(expected, lengths, strict=True)]
    assert_caches_hold(wave, [length + COUNT for length in lengths])


def test_a_stop_token_that_a_sequence_is_fed_stops_it_at_once() -> None:
    wave = simulated(3)
    limits = [limit_words(NEVER, FED[:1]), limit_words(FIRST[1]), limit_words(NEVER)]
    assert wave.several([FED[0], FED[1], -1], FIRST, SLOTS, COUNT, limits) == [cut([], 0)] * BATCH
    assert_caches_hold(wave, [0, 0, 0])


def test_the_hosts_request_ends_a_launch_with_the_token_that_it_is_making() -> None:
    expected, _ = one_by_one()
    wave = simulated(3)
    wave.bench.memory.set(wave.bench.asked, np.array([1], dtype=np.int32))
    assert wave.several(FED, FIRST, SLOTS, COUNT) == [cut(row, 1) for row in expected]
    assert_caches_hold(wave, [1, 1, 1])
    wave.bench.memory.set(wave.bench.asked, np.array([0], dtype=np.int32))
    fed, positions = [row[0] for row in expected], [first + 1 for first in FIRST]
    assert wave.several(fed, positions, SLOTS, COUNT) == [row[1 : 1 + COUNT] for row in expected]


def test_limits_have_room_for_seven_stop_tokens() -> None:
    assert limit_words(9, [3, 4]) == [9, 3, 4, -1, -1, -1, -1, -1]
    assert limit_words(9, range(20)) == [9, 0, 1, 2, 3, 4, 5, 6]
    assert len(limit_words(0)) == LIMIT_WORDS
