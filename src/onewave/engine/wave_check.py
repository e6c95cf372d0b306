"""What a wave has to pass before it is used: its steps beside those of plain operators and of other launches."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# (tolist and torch.linalg are only partly annotated.)

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.memory.kv_cache import StaticKVCache
from onewave.models.batch import Batch
from onewave.models.llama import Llama
from onewave.ops.sampling import RowParameters, greedy, sample, uniforms
from onewave.wave.layout import DRAW_WORDS, draw_words, limit_words

if TYPE_CHECKING:
    from onewave.models.llama_plan import DecodeWave

__all__ = ["CHECKED_CAPACITY", "Step", "check_several", "checked_lengths", "self_check", "some_draws"]

# Lengths of the self-check's sequences, in turn: several splits of 128 keys, one key, a few, a split and a little.
_CHECKED_LENGTHS = (299, 1, 19, 129)
CHECKED_CAPACITY = 320
"""Entries a sequence of the self-check's caches."""
# A few wrong numbers in one launch of four are far below what rounding differs by.
_CHECKED_AGAIN = 15
# How their tokens are drawn, in turn: temperature, min_p, top_k, top_p.
_CHECKED_DRAWS = (
    (0.8, 0.0, 40, 0.9),
    (1.0, 0.0, 0, 1.0),
    (0.0, 0.0, 0, 1.0),
    (1.5, 0.0, 0, 0.7),
    (1.2, 0.02, 0, 1.0),
    (0.7, 0.01, 5, 1.0),
)


class Step(Protocol):
    """Something that decodes one token a sequence, as DecodeWave does."""

    def bind_cache(self, kv: StaticKVCache) -> None: ...
    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor: ...


def checked_lengths(max_model_len: int, sequences: int, steps: int = 1) -> list[int]:
    """Tokens of each sequence before the step that `self_check` makes, or so many steps."""
    most = min(CHECKED_CAPACITY, max_model_len) - steps
    return [min(most, _CHECKED_LENGTHS[i % len(_CHECKED_LENGTHS)]) for i in range(sequences)]


@torch.inference_mode()
def self_check(model: Llama, wave: Step, sequences: int) -> float:
    """One step of the wave beside one of the plain operators, on the real weights, and beside itself.

    Returns the difference of the logits and of the caches' new rows over the plain ones' size, whichever is greater;
    infinite if any is not a number, or if the step, made again and again, ever has other bits.
    """
    lengths = checked_lengths(model.max_model_len, sequences)
    dice = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = [torch.randint(model.config.vocab_size, (n,), generator=dice).tolist() for n in lengths]
    ours, theirs = (model.new_cache(num_slots=sequences + 1, capacity=CHECKED_CAPACITY) for _ in range(2))
    for slot, prompt in enumerate(prompts):
        model.forward(Batch.prefill([(slot, prompt, 0)], model.device), theirs)
    ours.copy_from(theirs)
    tokens = torch.randint(model.config.vocab_size, (sequences,), generator=dice).to(model.device)
    positions = torch.tensor(lengths, device=model.device)
    slots = torch.arange(sequences, device=model.device)
    expected = model.forward(Batch.decode(tokens, positions, slots), theirs)
    wave.bind_cache(ours)
    found = wave(tokens, positions, slots)
    if not all(torch.equal(wave(tokens, positions, slots), found) for _ in range(_CHECKED_AGAIN)):
        return float("inf")
    pairs = [(found, expected)]
    for mine, plain in ((ours.k, theirs.k), (ours.v, theirs.v)):
        pairs.append((mine[:, slots, :, positions].float(), plain[:, slots, :, positions].float()))
    found_errors = [_difference(a, b) for a, b in pairs]
    return float("inf") if any(math.isnan(error) for error in found_errors) else max(found_errors)


@torch.inference_mode()
def check_several(
    model: Llama, one: DecodeWave, several: DecodeWave, sequences: int, count: int, draws: Tensor | None = None
) -> None:
    """Raise UnsupportedError unless a launch of `count` tokens gives those of as many launches, and the same caches,
    and if its sequences end one after the other as much of both as it should. draws: as SamplingPlan.draws; what is
    drawn is compared with the sampler's."""
    most = min(CHECKED_CAPACITY, model.max_model_len) - count
    if most < 1:
        raise UnsupportedError(
            "tokens_per_launch", got=str(count), allowed=f"below max_model_len={model.max_model_len}"
        )
    lengths = checked_lengths(model.max_model_len, sequences, count)
    before, ours, theirs = (model.new_cache(num_slots=sequences + 1, capacity=CHECKED_CAPACITY) for _ in range(3))
    dice = torch.Generator(model.device).manual_seed(0)
    for cache in (before.k, before.v):
        cache.normal_(generator=dice)
    first = torch.randint(model.config.vocab_size, (sequences,), generator=dice, device=model.device)
    positions = torch.tensor(lengths, device=model.device)
    slots = torch.arange(sequences, device=model.device)
    theirs.copy_from(before)
    one.bind_cache(theirs)
    tokens, expected = first, list[Tensor]()
    for step in range(count):
        logits = one(tokens, positions + step, slots)
        tokens = greedy(logits) if draws is None else _drawn(logits, draws, step)
        expected.append(tokens)
    rows = cast("list[list[int]]", torch.stack(expected).T.tolist())
    several.bind_cache(ours)
    whole = [limit_words(most + count)] * sequences, [count] * sequences
    for limits, kept in (whole, _some_limits(rows, lengths, first.tolist())):
        ours.copy_from(before)
        given = torch.tensor(limits, device=model.device)
        found = several.produce(first, positions, slots, given, None if draws is None else draws.to(model.device))
        several.wave.check()
        cut = [row[:more] + [-1] * (count - more) for row, more in zip(rows, kept, strict=True)]
        ends = [length + more for length, more in zip(lengths, kept, strict=True)]
        if found.T.tolist() != cut or not _holds_up_to(ends, ours, theirs, before):
            got = f"{count} tokens of one launch differ from those of {count} launches"
            got += "" if (limits, kept) == whole else " up to some limits"
            got += "" if draws is None else " where they are drawn"
            raise UnsupportedError("self-check of the wave", got=got, next="Use tokens_per_launch=1.")


def _holds_up_to(ends: list[int], ours: StaticKVCache, new: StaticKVCache, old: StaticKVCache) -> bool:
    """Whether each slot holds what is new up to its end, and what is old behind."""
    for mine, made, left in ((ours.k, new.k, old.k), (ours.v, new.v, old.v)):
        for slot, end in enumerate(ends):
            if not torch.equal(mine[:, slot, :, :end], made[:, slot, :, :end]):
                return False
            if not torch.equal(mine[:, slot, :, end:], left[:, slot, :, end:]):
                return False
    return True


def some_draws(sequences: int, count: int, first: int) -> Tensor:
    """Draws of sequences with limits of different kinds, from that one on, as SamplingPlan.draws has them."""
    fixed = [draw_words(*_CHECKED_DRAWS[(first + i) % len(_CHECKED_DRAWS)]) for i in range(sequences)]
    return torch.from_numpy(np.concatenate((fixed, uniforms(range(sequences), [0] * sequences, count)), axis=1))


def _drawn(logits: Tensor, draws: Tensor, step: int) -> Tensor:
    """What the sampler draws at a step of these draws, by its sort: its search would be the launch's own."""
    temperature, min_p, top_k, top_p = cast("list[list[float]]", draws[:, :DRAW_WORDS].T.tolist())
    ranks = [int(k) for k in top_k]
    rows = RowParameters.build(temperature=temperature, top_k=ranks, top_p=top_p, min_p=min_p, device=logits.device)
    return sample(logits, draws[:, DRAW_WORDS + step].to(logits.device), rows, search=False)


def _some_limits(rows: list[list[int]], lengths: list[int], first: list[int]) -> tuple[list[list[int]], list[int]]:
    """Limits at which sequences with these tokens end one after the other, by their length or by a token, and how many
    tokens each then has. lengths: before the first token that is fed, which may be that very token: then none."""
    limits: list[list[int]] = []
    kept: list[int] = []
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        last = i % len(row)
        by_token = i % 2 == 1
        limits.append(limit_words(length + (len(row) if by_token else last + 1), [row[last]] if by_token else []))
        kept.append([first[i], *row].index(row[last]) if by_token else last + 1)
    return limits, kept


def _difference(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm(a - b)) / max(size, 1e-9)
