"""Checks a wave before it is used: its steps beside those of plain operators and of other launches."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from onewave.engine.prompt.passes import MAX_SEQUENCES, PromptChunk, PromptPasses
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
    """One step of the wave beside the plain operators' prompt pass, on the real weights, and beside itself.

    Returns the difference of the logits and of the caches' new rows over the plain ones' size, whichever is greater;
    infinite if any is not a number, or if the step, made again and again, ever has other bits.
    """
    lengths, device = checked_lengths(model.max_model_len, sequences), model.device
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (sequences, CHECKED_CAPACITY), generator=dice)
    prompts: list[list[int]] = [row[: n + 1].tolist() for row, n in zip(ids, lengths, strict=True)]  # pyright: ignore[reportUnknownMemberType]
    ours, theirs = (model.new_row_cache(num_slots=sequences + 1, capacity=CHECKED_CAPACITY) for _ in range(2))
    expected = prompt_logits(model, theirs, prompts)
    tokens = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    positions, slots = torch.tensor(lengths, device=device), torch.arange(sequences, device=device)
    new = ours.table_of(slots)[slots, positions // ours.block_size].long(), positions % ours.block_size
    for mine, plain in ((ours.k, theirs.k), (ours.v, theirs.v)):
        mine.copy_(plain)
        _words(mine)[:, new[0], :, new[1]] = 0  # what the step is to write
    wave.bind_cache(ours)
    found = wave(tokens, positions, slots)
    if not all(torch.equal(wave(tokens, positions, slots), found) for _ in range(_CHECKED_AGAIN)):
        return float("inf")
    pairs = [(found, expected)]
    for mine, plain in ((ours.k, theirs.k), (ours.v, theirs.v)):
        pairs.append((_cells(mine, *new), _cells(plain, *new)))
    found_errors = [_difference(a, b) for a, b in pairs]
    return float("inf") if any(math.isnan(error) for error in found_errors) else max(found_errors)


def prompt_logits(model: Llama, kv: KVCache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Run prompts by plain operators as the engine does, that of slot i the i-th, together where prompts are packed.

    kv: with a row for one sequence more. Returns float32 [prompts, vocab] of their last tokens.
    """
    if not model.packs_prompts:
        passes = (Batch.prefill([(slot, list(ids), 0)], model.device) for slot, ids in enumerate(prompts))
        return torch.cat([model.forward(batch, kv) for batch in passes])
    chunks = [PromptChunk(slot, ids) for slot, ids in enumerate(prompts)]
    packed = PromptPasses(model, kv, spare_slot=len(prompts), use_graphs=False)
    parts = range(0, len(chunks), MAX_SEQUENCES)
    return torch.cat([packed.run(chunks[first : first + MAX_SEQUENCES]) for first in parts])


def _words(cache: Tensor) -> Tensor:
    """A cache in numbers that PyTorch can index everywhere, as it can't float8."""
    return cache.view(torch.uint8) if cache.itemsize == 1 else cache


def _cells(cache: Tensor, blocks: Tensor, at: Tensor) -> Tensor:
    """The numbers of some keys in every layer, float32. blocks, at: int64 [keys]."""
    return _words(cache)[:, blocks, :, at].view(cache.dtype).float()


def _difference(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(b))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return float(torch.linalg.vector_norm(a - b)) / max(size, 1e-9)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
