"""Decoding through the one-launch wave: built when the model loads, checked against the plain operators, then used."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# (tolist and torch.linalg are only partly annotated.)

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.memory.kv_cache import StaticKVCache
from onewave.models.batch import Batch
from onewave.models.llama import Llama
from onewave.weights.progress import byte_progress

__all__ = ["Step", "WaveDecoder", "self_check"]

# Lengths of the self-check's sequences, in turn: one key, few, and more than a split of 16 has.
_CHECKED_LENGTHS = (1, 19, 40, 7)
_CHECKED_CAPACITY = 64
# Two 16-bit ways to the same logits differ by about a hundredth; a wrong one by about their size.
_MOST_DIFFERENCE = 0.05


class Step(Protocol):
    """Something that decodes one token a sequence, as DecodeWave does."""

    def bind_cache(self, kv: StaticKVCache) -> None: ...
    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor: ...


class WaveDecoder:
    """A model's decode steps, one launch each, for up to max_num_seqs sequences.

    progress: draw a bar on stderr while the weights are packed.
    Raises UnsupportedError when the card or the model does not suit the wave, or when the self-check fails.
    """

    def __init__(self, model: Llama, max_num_seqs: int, *, progress: bool = False):
        from onewave.models.llama_plan import DecodeWave, packed_bytes, unsupported_because

        reason = unsupported_because(model.config, max_num_seqs)
        if reason is not None:
            raise UnsupportedError("decode wave", got=reason, next='Use decode="graph".')
        with byte_progress("packing", packed_bytes(model), enabled=progress) as report:
            self._wave = DecodeWave(model, batch=max_num_seqs, progress=report)
        difference = self_check(model, self._wave, max_num_seqs)
        self._wave.wave.check()
        if not difference <= _MOST_DIFFERENCE:
            got = f"logits {difference:.1%} from the plain operators'"
            raise UnsupportedError("decode wave: self-check", got=got, next='Use decode="graph".')

    def bind_cache(self, kv: StaticKVCache) -> None:
        """Use this cache from now on."""
        self._wave.bind_cache(kv)

    def step(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Feed one token a row, int64 [rows] each. Returns float32 logits [rows, vocab]. Raises WaveStalled."""
        return self._wave(token_ids, positions, slots)


@torch.inference_mode()
def self_check(model: Llama, wave: Step, sequences: int) -> float:
    """One step of the wave beside one of the plain operators, on the real weights.

    Returns the difference of the logits and of the caches' new rows over
    the plain ones' size, whichever is greater; infinite if any is not a number.
    """
    most = min(_CHECKED_CAPACITY, model.max_model_len) - 1
    lengths = [min(most, _CHECKED_LENGTHS[i % len(_CHECKED_LENGTHS)]) for i in range(sequences)]
    dice = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = [torch.randint(model.config.vocab_size, (n,), generator=dice).tolist() for n in lengths]
    ours, theirs = (model.new_cache(num_slots=sequences + 1, capacity=_CHECKED_CAPACITY) for _ in range(2))
    for slot, prompt in enumerate(prompts):
        model.forward(Batch.prefill([(slot, prompt, 0)], model.device), theirs)
    ours.copy_from(theirs)
    tokens = torch.randint(model.config.vocab_size, (sequences,), generator=dice).to(model.device)
    positions = torch.tensor(lengths, device=model.device)
    slots = torch.arange(sequences, device=model.device)
    expected = model.forward(Batch.decode(tokens, positions, slots), theirs)
    wave.bind_cache(ours)
    found = wave(tokens, positions, slots)
    pairs = [(found, expected)]
    for mine, plain in ((ours.k, theirs.k), (ours.v, theirs.v)):
        pairs.append((mine[:, slots, :, positions].float(), plain[:, slots, :, positions].float()))
    found_errors = [_difference(a, b) for a, b in pairs]
    return float("inf") if any(math.isnan(error) for error in found_errors) else max(found_errors)


def _difference(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm(a - b)) / max(size, 1e-9)
