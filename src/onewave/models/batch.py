"""Inputs of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class StepRows(NamedTuple):
    """One token of each sequence in a decode step: int64 [rows] each, on the model's device.

    Row i feeds token_ids[i], which is written to the cache at position positions[i] of slot slots[i].
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor

    @property
    def num_rows(self) -> int:
        """Sequences in the step."""
        return len(self.slots)

    def split(self, size: int) -> list[StepRows]:
        """The rows as steps of `size` rows, the last one of what is left."""
        return [StepRows(*(part[at : at + size] for part in self)) for at in range(0, self.num_rows, size)]


class PromptRows(NamedTuple):
    """Tokens of a packed prompt pass, on the model's device; nothing about them is known on the host.

    token_ids, positions, slots: int64 [tokens]. Token i is written to position positions[i] of slot slots[i]; tokens
    beyond the last sequence only fill the pass up, and go to a spare slot.
    sequences, last: int64 [sequences], each sequence's slot, and its last token in this pass.
    starts_q, starts_k: int32 [sequences + 1], where each sequence's tokens begin, and its keys, those in the cache and
    those of this pass, as if all lay one after another. A sequence that only fills the pass up has neither.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sequences: Tensor
    last: Tensor
    starts_q: Tensor
    starts_k: Tensor

    @classmethod
    def of_words(cls, words: Tensor, num_tokens: int, num_sequences: int) -> PromptRows:
        """The rows in int64 words, `num_words` of them. All are 16-byte aligned, as prebuilt kernels take them."""
        num_starts = _aligned_starts(num_sequences)
        starts = words[:num_starts].view(torch.int32).view(2, num_starts)[:, : num_sequences + 1]
        sequences, last = words[num_starts:][: 2 * num_sequences].view(2, num_sequences)
        token_ids, positions, slots = words[num_starts + 2 * num_sequences :].view(3, -1)[:, :num_tokens]
        return cls(token_ids, positions, slots, sequences, last, starts[0], starts[1])

    def first_sequence(self) -> PromptRows:
        """The rows of a pass of one sequence. `last` stays: one row alone would be multiplied by another kernel."""
        return self._replace(sequences=self.sequences[:1], starts_q=self.starts_q[:2], starts_k=self.starts_k[:2])

    @staticmethod
    def num_words(num_tokens: int, num_sequences: int) -> int:
        """Words that hold so many tokens and sequences."""
        return 3 * (num_tokens + num_tokens % 2) + 2 * num_sequences + _aligned_starts(num_sequences)


def _aligned_starts(num_sequences: int) -> int:
    """num_sequences + 1, up to a multiple of 16 bytes in int32; two rows of them take as many int64 words."""
    return -(-(num_sequences + 1) // 4) * 4


class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: cache row, position of the first token, number of tokens."""

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Batch:
    """Tokens of one forward pass, packed without padding.

    token_ids, positions, slots: [tokens] int64 on the model's device; token i is written to
    position positions[i] of slot slots[i]. chunks: the sequences of a prefill in packing order; empty when decoding,
    where every row is one token and nothing about the batch is known on the host. rows: those of a packed prompt pass,
    which has no chunks either.
    """

    phase: Phase
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    chunks: tuple[Chunk, ...] = ()
    rows: PromptRows | None = None

    @classmethod
    def packed(cls, rows: PromptRows) -> Batch:
        """A packed prompt pass."""
        return cls(Phase.PREFILL, rows.token_ids, rows.positions, rows.slots, rows=rows)

    @classmethod
    def prefill(cls, sequences: Sequence[tuple[int, Sequence[int], int]], device: torch.device) -> Batch:
        """Pack (slot, token_ids, start_position) triples; start_position tokens of each are in the cache already."""
        chunks = tuple(Chunk(slot, start, len(ids)) for slot, ids, start in sequences)
        columns = (
            [token for _, ids, _ in sequences for token in ids],
            [position for chunk in chunks for position in range(chunk.start, chunk.end)],
            [chunk.slot for chunk in chunks for _ in range(chunk.length)],
        )
        # One transfer for all three, which waits for nothing that the device runs.
        packed = torch.tensor(columns, dtype=torch.int64).to(device, non_blocking=True)
        return cls(Phase.PREFILL, packed[0], packed[1], packed[2], chunks)

    @classmethod
    def decode(cls, token_ids: Tensor, positions: Tensor, slots: Tensor) -> Batch:
        """One token a row, as in StepRows."""
        return cls(Phase.DECODE, token_ids, positions, slots)
