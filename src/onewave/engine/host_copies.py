"""A step's results on their way to the host, and there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from onewave.base.errors import CapacityError
from onewave.engine.output import Logprob, Logprobs
from onewave.engine.request import Sample
from onewave.engine.sampler import Sampled
from onewave.memory.host import available_bytes
from onewave.memory.staging import Copied, views_of

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
    """A launched step with tokens that the host has not read: copies under way to host memory, done when
    `copied.ready` is.

    first: whether they are samples' first tokens. numbers: of each sample, which of its tokens it is; None where each
    is the one after those that the host has read. sampled: on the device, whose memory has to live as long.
    """

    samples: list[Sample]
    sampled: Sampled
    copied: Copied | None = None
    first: bool = False
    numbers: list[int] | None = None

    @property
    def parts(self) -> list[memoryview]:
        """Sampled.parts, on the host."""
        return views_of(self.sampled.parts) if self.copied is None else self.copied.views


class HostLogprobs:
    """TokenLogprobs as Python lists, of its parts in host memory."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        sampled, rank, top, top_ids = parts
        self.sampled = cast("list[float]", sampled.tolist())
        self.rank = rank.tolist()
        self.top = cast("list[list[float]]", top.tolist())
        self.top_ids = cast("list[list[int]]", top_ids.tolist())

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
