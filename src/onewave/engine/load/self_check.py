"""Checks a wave before it is used: its steps beside those of plain operators and of other launches."""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onewave.engine.prompt.passes import MAX_SEQUENCES, PromptChunk, PromptPasses
from onewave.memory.kv_cache import KVCache
from onewave.models.batch import Batch
from onewave.models.llama import Llama
from onewave.ops.embedding import embedding

# Lengths of the self-check's sequences, in turn: several splits of 128 keys, one key, a few, a split and a little.
_CHECKED_LENGTHS = (299, 1, 19, 129)
CHECKED_CAPACITY = 320
"""Entries a sequence of the self-check's caches."""
# A few wrong numbers in one launch of four are far below what rounding differs by.
_CHECKED_AGAIN = 15
# A token alone of random K-quant weights was off by up to 2.8 times as much as the larger of two nudges moved it,
# half of 17 by 1.1 in their worst layer (docs/log/correctness.md).
_NUDGES, _GROWTH = 4, 3.0
# Results that are missing are 1 apart, vectors that have nothing to do with each other 1.41.
_MAX_MOVED = 0.8


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
    return _CheckedStep(model, checked_lengths(model.max_model_len, sequences)).taken(wave).largest()


@torch.inference_mode()
def follows_growth(model: Llama, wave: Step, sequences: int, limit: float) -> bool:
    """Whether a wave beyond the limit is about as far from the plain operators as rounding takes these themselves.

    Where attention's scores are far apart, each layer makes what 16 bits rounded larger, and two right ways end far
    from each other. Each layer's keys and values, and the logits, may be further off than the limit if plain operators
    move about as far when embeddings are nudged by a rounding. That is asked of the step of `self_check`, which sees
    queries and attention, best in the first layers; and of a token without others before it, whose attention weighs
    nothing: there errors hardly grow, and twice the limit is the most. That sees every layer's other matrices.
    """
    cases = ([0] * sequences, 2 * limit), (checked_lengths(model.max_model_len, sequences), _MAX_MOVED)
    for lengths, highest in cases:
        step = _CheckedStep(model, lengths)
        moved = torch.stack([step.nudged(seed).by_layer() for seed in range(_NUDGES)]).amax(0)
        allowed = (_GROWTH * moved).clamp(max=highest).clamp(min=limit)
        if not bool((step.taken(wave).by_layer() <= allowed).all()):
            return False
    return True


class _Apart(NamedTuple):
    """How far two ways to a step are apart, and how large the plain one's results are: norms of the logits, and of each
    layer's new keys and values, float32 [1] or [layers]."""

    gaps: list[Tensor]
    sizes: list[Tensor]

    def by_layer(self) -> Tensor:
        """Differences over sizes, of all of them."""
        return torch.cat(self.gaps) / torch.cat(self.sizes).clamp(min=1e-9)

    def largest(self) -> float:
        """The largest of three, each of all layers together; infinite if one is not a number."""
        gaps, sizes = (torch.stack([_norm(part, 0) for part in parts]) for parts in self)
        return float((gaps / sizes.clamp(min=1e-9)).nan_to_num(nan=math.inf).max())


class _CheckedStep:
    """A token of each sequence behind tokens that plain operators kept, and what these make of it.

    lengths: tokens of each sequence before it.
    """

    def __init__(self, model: Llama, lengths: Sequence[int]) -> None:
        sequences, device = len(lengths), model.device
        dice = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (sequences, CHECKED_CAPACITY), generator=dice)
        prompts: list[list[int]] = [row[: n + 1].tolist() for row, n in zip(ids, lengths, strict=True)]  # pyright: ignore[reportUnknownMemberType]
        self._model, self._lengths = model, lengths
        self._ours, self._theirs = (
            model.new_row_cache(num_slots=sequences + 1, capacity=CHECKED_CAPACITY) for _ in range(2)
        )
        self._expected = prompt_logits(model, self._theirs, prompts)
        self._tokens = torch.tensor([prompt[-1] for prompt in prompts], device=device)
        self._positions, self._slots = torch.tensor(lengths, device=device), torch.arange(sequences, device=device)
        table, size = self._ours.table_of(self._slots), self._ours.block_size
        self._new = table[self._slots, self._positions // size].long(), self._positions % size

    def taken(self, wave: Step) -> _Apart:
        """The wave's step beside the plain one; no numbers if it ever has other bits."""
        wave.bind_cache(self._forget())
        row = self._tokens, self._positions, self._slots
        found = wave(*row)
        same = all(torch.equal(wave(*row), found) for _ in range(_CHECKED_AGAIN))
        return self._beside(found if same else found * math.nan)

    def nudged(self, seed: int) -> _Apart:
        """Plain operators beside themselves, with the tokens' embeddings off by as much as rounding them would be."""
        rows = embedding(self._tokens, self._model.weights.embedding).float()
        noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)).to(rows.device)
        table = rows * (1 + noise * (torch.finfo(self._model.dtype).eps / 4))
        model = copy(self._model)
        model.weights = replace(model.weights, embedding=table)
        tokens = [[i] for i in range(len(rows))]
        return self._beside(prompt_logits(model, self._forget(), tokens, self._lengths))

    def _forget(self) -> KVCache:
        """Our cache with the tokens before the step alone."""
        for mine, plain in ((self._ours.k, self._theirs.k), (self._ours.v, self._theirs.v)):
            mine.copy_(plain)
            _words(mine)[:, self._new[0], :, self._new[1]] = 0  # what the step is to write
        return self._ours

    def _beside(self, logits: Tensor) -> _Apart:
        ours, theirs = ((kv.k, kv.v) for kv in (self._ours, self._theirs))
        pairs = [(logits[:, None], self._expected[:, None])]
        pairs += [(_cells(a, *self._new), _cells(b, *self._new)) for a, b in zip(ours, theirs, strict=True)]
        return _Apart(
            [_norm(a - b, (0, *range(2, a.ndim))) for a, b in pairs],
            [_norm(b, (0, *range(2, b.ndim))) for _, b in pairs],
        )


def prompt_logits(
    model: Llama, kv: KVCache, prompts: Sequence[Sequence[int]], starts: Sequence[int] | None = None
) -> Tensor:
    """Run prompts by plain operators as the engine does, that of slot i the i-th, together where prompts are packed.

    kv: with a row for one sequence more. starts: tokens of each that lie there already, none by default. Returns
    float32 [prompts, vocab] of their last tokens.
    """
    chunks = [
        PromptChunk(slot, ids, start)
        for slot, (ids, start) in enumerate(zip(prompts, starts or [0] * len(prompts), strict=True))
    ]
    if not model.packs_prompts:
        passes = (Batch.prefill([(each.slot, each.token_ids, each.start)], model.device) for each in chunks)
        return torch.cat([model.forward(batch, kv) for batch in passes])
    packed = PromptPasses(model, kv, spare_slot=len(prompts), use_graphs=False)
    parts = range(0, len(chunks), MAX_SEQUENCES)
    return torch.cat([packed.run(chunks[first : first + MAX_SEQUENCES]) for first in parts])


def _words(cache: Tensor) -> Tensor:
    """A cache in numbers that PyTorch can index everywhere, as it can't float8."""
    return cache.view(torch.uint8) if cache.itemsize == 1 else cache


def _cells(cache: Tensor, blocks: Tensor, at: Tensor) -> Tensor:
    """The numbers of some keys in every layer, float32 [keys, layers, heads, head_dim]. blocks, at: int64 [keys]."""
    return _words(cache)[:, blocks, :, at].view(cache.dtype).float()


def _norm(numbers: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    return torch.linalg.vector_norm(numbers, dim=dims)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
