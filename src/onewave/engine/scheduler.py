"""The order in which samples run, and their slots: plain Python, no torch."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from onewave.base.errors import InvalidArgumentError

T = TypeVar("T", bound=Hashable)


class Scheduler(Generic[T]):
    """First come, first served over a fixed number of KV slots.

    An item is in one of three places: waiting, running (with a slot of its own) or gone. Nothing overtakes, so nothing
    starves: an item starts as soon as all that came before it have started and a slot is free. The lowest free slot is
    taken, so the same calls give the same slots.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise InvalidArgumentError("num_slots", got=str(num_slots), allowed="a whole number from 1")
        self.num_slots = num_slots
        self._waiting: deque[T] = deque()
        self._running: dict[int, T] = {}
        self._slots: dict[T, int] = {}
        self._free = list(range(num_slots))

    @property
    def waiting(self) -> tuple[T, ...]:
        """Items without a slot, the next one first."""
        return tuple(self._waiting)

    @property
    def running(self) -> Mapping[int, T]:
        """Slot -> item, in the order in which they started (a live view)."""
        return MappingProxyType(self._running)

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def can_admit(self) -> bool:
        """Whether `admit` would return an item now."""
        return bool(self._waiting and self._free)

    def add(self, item: T) -> None:
        """Put an item at the end of the queue. It must be neither waiting nor running."""
        assert item not in self._slots
        self._waiting.append(item)

    def admit(self) -> tuple[int, T] | None:
        """Give the first waiting item the lowest free slot; None when there is no item or no slot."""
        if not self.can_admit:
            return None
        slot, item = heapq.heappop(self._free), self._waiting.popleft()
        self._running[slot] = item
        self._slots[item] = slot
        return slot, item

    def remove(self, item: T) -> int | None:
        """Take an item out, finished or aborted. Returns the slot it held; None when it had none (or is unknown)."""
        slot = self._slots.pop(item, None)
        if slot is None:
            if item in self._waiting:
                self._waiting.remove(item)
            return None
        del self._running[slot]
        heapq.heappush(self._free, slot)
        return slot
