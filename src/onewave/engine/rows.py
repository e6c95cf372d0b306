"""The rows that decode together: their tokens, positions and slots on the device."""

from array import array
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor

from onewave.engine.params import SamplingParams
from onewave.engine.request import Sample
from onewave.engine.sampler import Sampler, SamplerRow, SamplingPlan
from onewave.engine.scheduler.sequence import Scheduled
from onewave.models.batch import StepRows

# Steps ahead of the launched ones for which positions lie on the device.
_STEPS_AHEAD = 64
# How the tokens of a row are sampled whose tokens are known: not at all, as cheaply as can be.
_KNOWN = SamplingParams(temperature=0, detokenize=False)

NewestTokens = tuple[tuple[Scheduled, ...], Tensor]
"""Sequences of the newest launch, and what it sampled for each, int64 on the device."""


def sample_of(sequence: Scheduled) -> Sample:
    """Return the sample that a sequence is scheduled for."""
    return cast("Sample", sequence.owner)


def sampler_row(sequence: Scheduled) -> SamplerRow:
    """Return what samples a sequence's next token."""
    sample = sample_of(sequence)
    request = sample.request
    return SamplerRow(
        sequence.slot_now, request.params, sample.key, sequence.launched, request.end_ids, sample.grammar
    )  # fmt: skip


@dataclass
class DecodeRows:
    """The rows of a decode step, fixed until one of them leaves or another joins.

    A row that was preempted is fed the tokens that it has generated already, one a step as before, so that its cache
    gets the same bits; what is sampled for it meanwhile is not looked at.

    slots, token_ids: int64 [rows] on the device; token_ids are the next step's input. coming: the positions of the next
    _STEPS_AHEAD steps, int64 [steps, rows or one more], as adding one on the device would be a kernel a step. known:
    int64 [left, rows], what steps sample for rows that are fed known tokens, -1 for others; None where there are none.
    left: steps until the rows have to be built again, None: any number.
    """

    sequences: tuple[Scheduled, ...]
    slots: Tensor
    token_ids: Tensor
    coming: Tensor
    plan: SamplingPlan
    samples: list[Sample]
    known: Tensor | None = None
    left: int | None = None
    step: int = 0
    made: int = 0

    @classmethod
    def build(cls, sequences: tuple[Scheduled, ...], newest: NewestTokens | None, sampler: Sampler) -> "DecodeRows":
        """Collect sequences that decode. Those that are ahead of the host have their newest tokens in `newest` only;
        every other newest token is known here."""
        device, rows, samples = sampler.device, list[SamplerRow](), list[Sample]()
        slots, positions, fed = list[int](), list[int](), list[int]()
        for each in sequences:
            sample, launched = sample_of(each), each.launched
            if each.replays and launched >= len(sample.token_ids):
                each.replays = False
                sampler.begin(each.slot_now, each.prompt, sample.request.params, sample.token_ids)
            samples.append(sample)
            rows.append(SamplerRow(each.slot_now, _KNOWN, 0, 0, ()) if each.replays else sampler_row(each))
            slots.append(each.slot_now)
            positions.append(len(each.prompt) + launched - 1)
            fed.append(sample.token_ids[launched - 1] if launched <= len(sample.token_ids) else -1)
        # Among the newest tokens, with those behind them that are known here.
        places = list[int]()
        if newest is not None and -1 in fed:
            row_of = {sequence: row for row, sequence in enumerate(newest[0])}
            behind = enumerate(fed, len(row_of))
            places = [row if token >= 0 else row_of[each] for each, (row, token) in zip(sequences, behind, strict=True)]
        # One transfer carries all. Each begins at a multiple of 16 bytes, as kernels are compiled for.
        count, pad = len(sequences), [0] * (len(sequences) % 2)
        words = array("q", [*slots, *pad, *positions, *pad, *fed, *pad, *places])
        sent = torch.frombuffer(words, dtype=torch.int64).to(device, non_blocking=True)
        size = count + len(pad)
        token_ids = sent[2 * size :][:count]
        if newest is not None and places:
            token_ids = torch.cat((newest[1], token_ids)).index_select(0, sent[3 * size :])
        coming = sent[size : 2 * size] + _steps_ahead(device)
        known, left = _known(sequences, device)
        return cls(sequences, sent[:count], token_ids, coming, sampler.plan(rows), samples, known, left)

    @property
    def next(self) -> StepRows:
        """The next step's rows."""
        return StepRows(self.token_ids, self.coming[self.step, : len(self.sequences)], self.slots)

    def advance(self, sampled: Tensor) -> None:
        """Go on to the step after a launched one. sampled: what it gave, int64 [rows]."""
        self.token_ids = sampled
        if self.known is not None:
            known = self.known[self.made]
            self.token_ids = torch.where(known < 0, sampled, known)
        self.made += 1
        self.step += 1
        if self.step >= len(self.coming):
            self.coming, self.step = self.coming + self.step, 0

    def are(self, sequences: tuple[Scheduled, ...]) -> bool:
        """Whether these rows still serve for a step of those sequences."""
        return self.sequences is sequences and (self.left is None or self.made < self.left)


@cache
def _steps_ahead(device: torch.device) -> Tensor:
    """How far ahead each of the coming steps is: int64 [steps, 1]."""
    return torch.arange(_STEPS_AHEAD, device=device)[:, None]


def _known(sequences: tuple[Scheduled, ...], device: torch.device) -> tuple[Tensor | None, int | None]:
    """Tokens that coming steps sample for rows that replay, and how many steps that is."""
    replays = [sequence for sequence in sequences if sequence.replays]
    if not replays:
        return None, None
    left = min(_STEPS_AHEAD, *(len(sample_of(each).token_ids) - each.launched for each in replays))
    columns = [
        sample_of(each).token_ids[each.launched : each.launched + left] if each.replays else [-1] * left
        for each in sequences
    ]
    return torch.tensor(columns, dtype=torch.int64).T.contiguous().to(device, non_blocking=True), left
