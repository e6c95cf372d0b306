"""A step's results on their way to the host, and there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from onewave.base.errors import CapacityError
from onewave.engine.output import Logprob, Logprobs
from onewave.engine.request import Sample
from onewave.engine.sampler import Sampled
from onewave.memory.host import available_bytes
from onewave.memory.staging import Staging
from onewave.ops.sampling import TokenLogprobs

# Bytes of a token's entry in a dict: Logprob, its numbers and the dict's own room (282 with a text for each).
_ENTRY_BYTES = 250
# Fewer are not worth asking the system.
_MIN_CHECKED_ENTRIES = 1000


def check_room(entries: int) -> None:
    """Raise CapacityError where the host has no memory for so many log-probabilities."""
    room = available_bytes() if entries >= _MIN_CHECKED_ENTRIES else None
    if room is not None and entries * _ENTRY_BYTES > room:
        got = f"{entries * _ENTRY_BYTES / 2**30:.1f} GiB on a host with {room / 2**30:.1f} GiB of memory left"
        raise CapacityError(f"{entries} log-probabilities", got=got, next="Ask for fewer a token, or of fewer tokens.")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step with tokens that the host has not read: copies under way to host memory, done when `ready` is.
    numbers: of each sample, which of its tokens it is. source: what is copied, which has to live as long."""

    samples: list[Sample]
    numbers: list[int]
    sampled: Sampled
    ready: torch.cuda.Event | None = None
    source: Sampled | None = None

    @classmethod
    def copy(cls, sampled: Sampled, samples: list[Sample], numbers: list[int], staging: Staging | None) -> InFlight:
        """Start moving a step's results to the host. staging: None on a CPU."""
        if staging is None:
            return cls(samples, numbers, sampled)
        copied, ready = staging.start(sampled.parts)
        return cls(samples, numbers, Sampled.of(copied), ready, source=sampled)


class HostLogprobs:
    """TokenLogprobs as Python lists."""

    def __init__(self, logprobs: TokenLogprobs) -> None:
        self.sampled: list[float] = to_list(logprobs.sampled)
        self.rank: list[int] = to_list(logprobs.rank)
        self.top: list[list[float]] = to_list(logprobs.top)
        self.top_ids: list[list[int]] = to_list(logprobs.top_ids)

    def entry(self, row: int, token_id: int, wanted: int, text: Callable[[int], str]) -> tuple[float, Logprobs]:
        """One position's log-probabilities: the token itself, then the `wanted` most probable ones (-1: all). text: of
        a token."""
        own = self.sampled[row]
        entries: Logprobs = {token_id: Logprob(own, self.rank[row], text(token_id))}
        count = len(self.top_ids[row]) if wanted == -1 else wanted
        rank, before = 0, None
        for place, (other, value) in enumerate(zip(self.top_ids[row][:count], self.top[row], strict=False)):
            if value != before:  # equals share a rank
                rank, before = place + 1, value
            if other not in entries:
                entries[other] = Logprob(value, rank, text(other))
        return own, entries


def to_list(tensor: Tensor) -> list[Any]:
    return cast("list[Any]", tensor.tolist())  # pyright: ignore[reportUnknownMemberType] (torch's stub)
