"""Pinned host memory for what is on its way to a GPU or from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.memory.tensors import Done, pool_of


@dataclass(frozen=True, slots=True)
class Copied:
    """A step's results in host memory, all of which is used again.

    parts, views: the same memory for PyTorch and for Python: between two waits for a GPU the first call of a Tensor's
    takes 20 to 30 us, as its code is in no cache. made, ready: events when they are there, and here; None on a CPU.
    """

    parts: list[Tensor]
    views: list[memoryview]
    made: torch.cuda.Event | None
    ready: torch.cuda.Event | None


class Staging:
    """Pinned memory that steps' results are copied to: those of the same shapes take turns in the same blocks."""

    def __init__(self, device: torch.device) -> None:
        self._pool = pool_of(device, pinned=True)
        self._spare: list[Copied] = []
        self._device, self._stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, parts: Sequence[Tensor]) -> Copied:
        """Copy what the current stream makes, on a stream of their own, so that its next work does not wait for it."""
        copied = self._room_for(parts)
        assert self._stream is not None
        assert copied.made is not None
        assert copied.ready is not None
        copied.made.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(copied.made)
        with torch.cuda.stream(self._stream):
            _copy(parts, copied)
        copied.ready.record(self._stream)
        return copied

    def copy(self, parts: Sequence[Tensor]) -> Copied:
        """Start asynchronous copies on the current stream."""
        copied = self._room_for(parts)
        _copy(parts, copied)
        return copied

    def _room_for(self, parts: Sequence[Tensor]) -> Copied:
        found = self._spare.pop() if self._spare else None
        if found is not None and list(map(_form, found.parts)) == list(map(_form, parts)):
            return found
        for part in () if found is None else found.parts:
            self._pool.give(part)
        hosts = [self._pool.take(part.shape, part.dtype) for part in parts]
        events = (None, None) if self._stream is None else (torch.cuda.Event(), torch.cuda.Event())
        return Copied(hosts, views_of(hosts), *events)

    def give(self, copied: Copied) -> None:
        """Take back what was copied, once it was read."""
        self._spare.append(copied)

    def clear(self, dropped: Iterable[tuple[Copied, Done | None]] = ()) -> None:
        """Give every block to the pool. dropped: what no one will read, with the events that end its copies."""
        for copied, after in [*((spare, None) for spare in self._spare), *dropped]:
            for part in copied.parts:
                self._pool.give(part, after)
        self._spare.clear()


def views_of(tensors: Iterable[Tensor]) -> list[memoryview]:
    """The memory of tensors, on the host now or from now on."""
    return [tensor.numpy(force=True).data for tensor in tensors]


def _copy(parts: Sequence[Tensor], to: Copied) -> None:
    for host, part in zip(to.parts, parts, strict=True):
        host.copy_(part, non_blocking=True)


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
