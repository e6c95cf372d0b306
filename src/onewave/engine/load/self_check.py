"""What a wave has to pass before it is used: its steps beside those of plain operators and of other launches."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from onewave.memory.kv_cache import KVCache
from onewave.models.batch import Batch
from onewave.models.llama import Llama

# Lengths of the self-check's sequences, in turn: several splits of 128 keys, one key, a few, a split and a little.
_CHECKED_LENGTHS = (299, 1, 19, 129)
CHECKED_CAPACITY = 320
"""Entries a sequence of the self-check's caches."""
# A few wrong numbers in one launch of four are far below what rounding differs by.
_CHECKED_AGAIN = 15


class Step(Protocol):
    """Something that decodes one token a sequence, as DecodeWave does."""

    def bind_cache(self, kv: KVCache) -> None: ...
    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor: ...


def checked_lengths(max_model_len: int, sequences: int) -> list[int]:
    """Tokens of each sequence before the step that `self_check` makes."""
    most = min(CHECKED_CAPACITY, max_model_len) - 1
    return [min(most, _CHECKED_LENGTHS[i % len(_CHECKED_LENGTHS)]) for i in range(sequences)]


@torch.inference_mode()
def self_check(model: Llama, wave: Step, sequences: int) -> float:
    """One step of the wave beside one of the plain operators, on the real weights, and beside itself.

    Returns the difference of the logits and of the caches' new rows over the plain ones' size, whichever is greater;
    infinite if any is not a number, or if the step, made again and again, ever has other bits.
    """
    lengths = checked_lengths(model.max_model_len, sequences)
    dice = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = [torch.randint(model.config.vocab_size, (n,), generator=dice).tolist() for n in lengths]  # pyright: ignore[reportUnknownMemberType]
    ours, theirs = (model.new_row_cache(num_slots=sequences + 1, capacity=CHECKED_CAPACITY) for _ in range(2))
    for slot, prompt in enumerate(prompts):
        model.forward(Batch.prefill([(slot, prompt, 0)], model.device), theirs)
    for mine, plain in ((ours.k, theirs.k), (ours.v, theirs.v)):
        mine.copy_(plain)
    tokens = torch.randint(model.config.vocab_size, (sequences,), generator=dice).to(model.device)
    positions = torch.tensor(lengths, device=model.device)
    slots = torch.arange(sequences, device=model.device)
    expected = model.forward(Batch.decode(tokens, positions, slots), theirs)
    wave.bind_cache(ours)
    found = wave(tokens, positions, slots)
    if not all(torch.equal(wave(tokens, positions, slots), found) for _ in range(_CHECKED_AGAIN)):
        return float("inf")
    pairs = [(found, expected)]
    blocks = ours.table_of(slots)[slots, positions // ours.block_size].long()
    at = positions % ours.block_size
    for mine, plain in ((ours.k, theirs.k), (ours.v, theirs.v)):
        pairs.append((_cells(mine, blocks, at), _cells(plain, blocks, at)))
    found_errors = [_difference(a, b) for a, b in pairs]
    return float("inf") if any(math.isnan(error) for error in found_errors) else max(found_errors)


def _cells(cache: Tensor, blocks: Tensor, at: Tensor) -> Tensor:
    """The numbers of some keys in every layer, float32. blocks, at: int64 [keys]."""
    # PyTorch can't index float8 everywhere; its bytes it can.
    words = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    return words[:, blocks, :, at].view(cache.dtype).float()


def _difference(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(b))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return float(torch.linalg.vector_norm(a - b)) / max(size, 1e-9)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
