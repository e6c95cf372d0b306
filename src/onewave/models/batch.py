"""What one forward pass works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class StepRows(NamedTuple):
    """One token of each sequence in a decode step: int64 [rows] each, on the model's device.

    Row i feeds token_ids[i], which is written to the cache at [slots[i], :, positions[i]].
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor

    @property
    def num_rows(self) -> int:
        """Sequences in the step."""
        return len(self.slots)

    def each(self) -> list[StepRows]:
        """The rows as steps of one row."""
        return [StepRows(*(part[row : row + 1] for part in self)) for row in range(self.num_rows)]


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

    token_ids, positions, slots: [tokens] int64 on the model's device; token i is written to the cache at
    [slots[i], :, positions[i]]. chunks: the sequences of a prefill in packing order; empty when decoding, where every
    row is one token and nothing about the batch is known on the host.
    """

    phase: Phase
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    chunks: tuple[Chunk, ...] = ()

    @classmethod
    def prefill(cls, sequences: Sequence[tuple[int, Sequence[int], int]], device: torch.device) -> Batch:
        """Pack (slot, token_ids, start_position) triples; start_position tokens of each are in the cache already."""
        chunks = tuple(Chunk(slot, start, len(ids)) for slot, ids, start in sequences)
        columns = (
            [token for _, ids, _ in sequences for token in ids],
            [position for chunk in chunks for position in range(chunk.start, chunk.end)],
            [chunk.slot for chunk in chunks for _ in range(chunk.length)],
        )
        # One transfer for all three.
        packed = torch.tensor(columns, dtype=torch.int64).to(device)
        return cls(Phase.PREFILL, packed[0], packed[1], packed[2], chunks)

    @classmethod
    def decode(cls, token_ids: Tensor, positions: Tensor, slots: Tensor) -> Batch:
        """One token a row, as in StepRows."""
        return cls(Phase.DECODE, token_ids, positions, slots)
