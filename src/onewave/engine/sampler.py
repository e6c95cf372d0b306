"""Turns the logits of the running rows into tokens, with everything the parameters ask for.

A `SamplingPlan` is made when the set of rows changes and then called once a step; it holds whatever the parameters need
as device tensors, so that a step of greedy rows is one argmax and no step reads anything back to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.engine.params import SamplingParams
from onewave.ops.sampling import (
    Chosen,
    RowParameters,
    TokenLogprobs,
    bound_greedy,
    choose,
    greedy,
    highest_of,
    numpy_impl,
    penalise,
    restrict,
    restrict_numpy,
    sample,
    token_logprobs,
    uniforms,
)

# Batches whose parameters are kept on the device, and places of logits that tokens were chosen from: a few KB each.
_MAX_KEPT = 512
_RowValues = tuple[float, int, float, float]
# Uniform numbers are made and sent to the device for this many steps at once.
_STEPS_PER_BLOCK = 64


class TokenMask(Protocol):
    """Which tokens may come next; see engine.grammar.compiler.GrammarState."""

    num_words: int

    def fill(self, words: NDArray[np.int32]) -> None: ...


class SamplerRow(NamedTuple):
    """One row of the batch: its slot, its random stream and the step it is at (tokens launched so far).

    banned_ids: ids that may not come before min_tokens. mask: what its grammar allows, which knows min_tokens itself.
    """

    slot: int
    params: SamplingParams
    key: int
    step: int
    banned_ids: Collection[int]
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int64 [rows] on the device. highest: what tells rows whose logits are no numbers (ops.sampling.Chosen).
    logprobs: of those tokens, when a row asked for them."""

    tokens: Tensor
    highest: Tensor
    logprobs: TokenLogprobs | None

    @property
    def parts(self) -> list[Tensor]:
        """All of it."""
        return [self.tokens, self.highest, *(self.logprobs or ())]


class Sampler:
    """Holds, on the device and per slot, which tokens a penalised sequence has seen.

    in_prompt: bool [slots, vocab]. counts: int32 [slots, vocab], occurrences in the output. Both are made when the
    first sequence with a penalty comes.
    """

    def __init__(self, *, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.num_slots, self.vocab_size, self.device = num_slots, vocab_size, device
        self._seen: tuple[Tensor, Tensor] | None = None
        self._row_parameters: dict[tuple[_RowValues, ...], RowParameters | None] = {}
        # By where logits lie, and their form; results of two steps, as the host reads one's while the next one runs.
        self._greedy: dict[tuple[int, ...], deque[tuple[Callable[[], None], Chosen]]] = {}
        if device.type == "cuda":
            compile_kernels(vocab_size, device)

    def begin(
        self, slot: int, prompt_token_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int] = ()
    ) -> None:
        """Forget what the slot's last owner saw and keep the new prompt. output_ids: what was generated already."""
        if not params.has_penalties:
            return
        in_prompt, counts = map(_array, self.seen())
        in_prompt[slot] = False
        in_prompt[slot, self.send(prompt_token_ids, torch.int64)] = True
        counts[slot] = 0
        if output_ids:
            generated = torch.tensor(output_ids, dtype=torch.int64).bincount(minlength=self.vocab_size)
            counts[slot] = _array(generated.int().to(self.device, non_blocking=True))

    def send(self, values: object, dtype: torch.dtype) -> Any:
        """Values on the device. From pageable memory the driver copies before it returns: the source may go, and the
        host need not wait."""
        return _array(torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True))

    def seen(self) -> tuple[Tensor, Tensor]:
        """(in_prompt, counts)."""
        if self._seen is None:
            shape = (self.num_slots, self.vocab_size)
            in_prompt = torch.empty(shape, dtype=torch.bool, device=self.device)
            self._seen = in_prompt, torch.empty(shape, dtype=torch.int32, device=self.device)
            for made in map(_array, self._seen):
                made[:] = 0
        return self._seen

    def row_parameters(self, params: Sequence[SamplingParams]) -> RowParameters | None:
        """Parameters of rows on the device, kept: they often are the last batch's, of other requests. None where all
        are greedy."""
        values = tuple(
            [(0.0, 0, 1.0, 0.0) if p.is_greedy else (p.temperature, p.top_k, p.top_p, p.min_p) for p in params]
        )
        if values not in self._row_parameters:
            temperature, top_k, top_p, min_p = zip(*values, strict=True)
            if len(self._row_parameters) >= _MAX_KEPT:
                self._row_parameters.clear()
            self._row_parameters[values] = (
                RowParameters.build(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, device=self.device)
                if any(temperature)
                else None
            )
        return self._row_parameters[values]

    def greedy(self, logits: Tensor) -> Chosen:
        """The most likely token of each row. logits: float32 [rows, vocab]. On a GPU the second choice after this one
        from where these logits lie writes over what it gives."""
        if logits.is_cpu:
            return choose(logits, None, None)
        place = logits.data_ptr(), *logits.shape, *logits.stride()
        calls = self._greedy.get(place)
        if calls is None:
            if len(self._greedy) >= _MAX_KEPT:
                self._greedy.clear()
            calls = self._greedy[place] = deque(filter(None, (bound_greedy(logits), bound_greedy(logits))))
        if not calls:
            return choose(logits, None, None)
        calls.rotate()
        launch, chosen = calls[0]
        launch()
        return chosen

    def plan(self, rows: Sequence[SamplerRow]) -> SamplingPlan:
        """Prepare to sample these rows, in this order, from their current steps on."""
        return SamplingPlan(self, rows)


def compile_kernels(vocab_size: int, device: torch.device) -> None:
    """Sample from zeros, so that no request waits for the sampling kernels to be compiled."""
    logits, uniform = torch.zeros(1, vocab_size, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    with torch.cuda.device(device):
        greedy(logits)
        with suppress(ShapeError):  # too large a vocabulary to sample from: a request that asks for it is refused
            for top_p in (1.0, 0.9):
                sampled = RowParameters.build(temperature=[1.0], top_k=[0], top_p=[top_p], min_p=[0.0], device=device)
                sample(logits, uniform, sampled)


class SamplingPlan:
    """Samples one fixed set of rows, step after step. Order: bias, bans, penalties, grammars, then sampling.

    has_masks: a row follows a grammar, so that its last token has to be read before the next call.
    """

    def __init__(self, sampler: Sampler, rows: Sequence[SamplerRow]) -> None:
        self._sampler, self._rows = sampler, rows
        # Those of whose logits something has to be changed, by number.
        self._edited = [(i, row) for i, row in enumerate(rows) if row.mask is not None or row.params.edits_logits]
        self._device = sampler.device
        self._step = 0
        wanted = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        self._num_logprobs: int | None = None
        if wanted:
            self._num_logprobs = sampler.vocab_size if -1 in wanted else max(wanted)
        self._parameters = sampler.row_parameters([row.params for row in rows])
        self._uniforms: Tensor | None = None
        self._uniforms_from = 0
        self._build_biases()
        self._build_penalties()
        self._build_bans()
        self._build_masks()
        self._note_edits()

    def __call__(self, logits: Tensor) -> Sampled:
        """Choose a token for every row. logits: float32 [rows, vocab]; left as they are."""
        if self._next_ban_end is not None and self._step >= self._next_ban_end:
            self._build_bans()
            self._note_edits()
        edited = logits if self._as_is else self._edit(logits)
        if self._as_is and self._parameters is None:
            tokens, highest = self._sampler.greedy(logits)
        else:
            uniform = None if self._parameters is None else self._next_uniforms()
            tokens, highest = choose(edited, uniform, self._parameters)
        if not self._as_is:
            highest = highest_of(logits)  # of which a ban makes none infinite
        if self._penalties is not None:
            rows, slots = self._penalties[:2]
            # A slot appears once, so nothing is added twice to one place.
            _array(self._sampler.seen()[1])[slots, _array(tokens)[rows]] += 1
        self._step += 1
        if self._num_logprobs is None:
            return Sampled(tokens, highest, None)
        return Sampled(tokens, highest, token_logprobs(logits, tokens, self._num_logprobs))

    def _note_edits(self) -> None:
        edits = (self._biases, self._bans, self._penalties)
        self._as_is = all(edit is None for edit in edits) and not self.has_masks

    def _edit(self, logits: Tensor) -> Tensor:
        if not logits.is_cpu:
            return self._edit_in_place(logits.clone())
        edited = torch.from_numpy(logits.numpy().copy())  # pyright: ignore[reportUnknownMemberType]
        self._edit_in_place(edited.numpy())
        return edited

    def _edit_in_place(self, logits: Any) -> Any:
        if self._biases is not None:
            rows, ids, values = self._biases
            logits[rows, ids] += values
        if self._bans is not None:
            rows, ids = self._bans
            logits[rows, ids] = -torch.inf
        if self._penalties is not None:
            rows, slots, repetition, presence, frequency = self._penalties
            in_prompt, counts = map(_array, self._sampler.seen())
            factors = {"repetition": repetition, "presence": presence, "frequency": frequency}
            apply: Any = penalise if isinstance(logits, Tensor) else numpy_impl.penalise
            logits[rows] = apply(logits[rows], in_prompt[slots], counts[slots], **factors)
        if self.has_masks:
            self._restrict(logits)
        return logits

    def _restrict(self, logits: Any) -> None:
        """Keep rows to their grammars. The last call's words have reached the device: its tokens were read."""
        for mask, words in zip(self._masks, self._words.numpy(), strict=True):
            mask.fill(words)
        if isinstance(logits, Tensor):
            restrict(logits, self._masked_rows, self._words.to(self._device, non_blocking=True))
        else:
            restrict_numpy(logits, self._masked_rows, self._words.numpy())

    def _next_uniforms(self) -> Tensor:
        column = self._step - self._uniforms_from
        if column >= _STEPS_PER_BLOCK or self._uniforms is None:
            column, self._uniforms_from = 0, self._step
            steps = [row.step + self._step for row in self._rows]
            block = uniforms([row.key for row in self._rows], steps, _STEPS_PER_BLOCK)
            self._uniforms = torch.from_numpy(block.T.copy()).to(self._device, non_blocking=True)  # pyright: ignore[reportUnknownMemberType]
        return self._uniforms[column]

    def _build_biases(self) -> None:
        triples = [
            (i, token_id, bias) for i, row in self._edited for token_id, bias in (row.params.logit_bias or {}).items()
        ]
        self._biases: tuple[Any, Any, Any] | None = None
        if triples:
            rows, ids, values = zip(*triples, strict=True)
            long = torch.int64
            self._biases = (
                self._sampler.send(rows, long),
                self._sampler.send(ids, long),
                self._sampler.send(values, torch.float32),
            )

    def _build_penalties(self) -> None:
        chosen = [(i, row.slot, row.params) for i, row in self._edited if row.params.has_penalties]
        self._penalties: tuple[Any, Any, Any, Any, Any] | None = None
        if chosen:
            self._penalties = (
                self._sampler.send([i for i, _, _ in chosen], torch.int64),
                self._sampler.send([slot for _, slot, _ in chosen], torch.int64),
                self._sampler.send([params.repetition_penalty for _, _, params in chosen], torch.float32),
                self._sampler.send([params.presence_penalty for _, _, params in chosen], torch.float32),
                self._sampler.send([params.frequency_penalty for _, _, params in chosen], torch.float32),
            )

    def _build_masks(self) -> None:
        found = [(i, row.mask) for i, row in self._edited if row.mask is not None]
        self._masks, self.has_masks = [mask for _, mask in found], bool(found)
        if found:
            size = (len(found), self._masks[0].num_words)
            self._words = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            every = len(found) == len(self._rows)
            self._masked_rows: Any = None if every else self._sampler.send([i for i, _ in found], torch.int64)

    def _build_bans(self) -> None:
        """Ban what may not end a row yet; the bans hold until one of them is over."""
        self._bans: tuple[Any, Any] | None = None
        self._next_ban_end: int | None = None
        active = [
            (i, row, row.params.min_tokens - row.step)
            for i, row in self._edited
            if row.params.min_tokens - row.step > self._step and row.banned_ids and row.mask is None
        ]
        if active:
            self._next_ban_end = min(left for _, _, left in active)
            pairs = [(i, token_id) for i, row, _ in active for token_id in row.banned_ids]
            numbers, ids = zip(*pairs, strict=True)
            self._bans = self._sampler.send(numbers, torch.int64), self._sampler.send(ids, torch.int64)


def _array(tensor: Tensor) -> Any:
    """A tensor of a CPU as the NumPy array that shares its memory: PyTorch's operators would share a row among all its
    threads and wait for them. A GPU's as it is."""
    return tensor.numpy() if tensor.is_cpu else tensor
