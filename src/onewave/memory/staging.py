"""Pinned host memory for what is on its way to a GPU or from it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from onewave.memory.tensors import Done, pool_of


class Staging:
    """Pinned memory that steps' results are copied to: those of the same shapes take turns in the same blocks."""

    def __init__(self, device: torch.device) -> None:
        self._pool = pool_of(device, pinned=True)
        self._spare: list[list[Tensor]] = []
        self._device, self._stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Copy what the current stream makes, on a stream of their own, so that its next work does not wait for it. The
        event says when it is there."""
        made, ready = torch.cuda.Event(), torch.cuda.Event()
        assert self._stream is not None
        made.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(made)
        with torch.cuda.stream(self._stream):
            copied = self.copy(parts)
            ready.record(self._stream)
        return copied, ready

    def copy(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Start asynchronous copies on the current stream."""
        found = self._spare.pop() if self._spare else []
        if [_form(part) for part in found] != [_form(part) for part in parts]:
            for part in found:
                self._pool.give(part)
            found = [self._pool.take(part.shape, part.dtype) for part in parts]
        for host, part in zip(found, parts, strict=True):
            host.copy_(part, non_blocking=True)
        return found

    def give(self, copied: list[Tensor]) -> None:
        """Take back what was copied, once it was read."""
        self._spare.append(copied)

    def clear(self, dropped: Iterable[tuple[list[Tensor], Done | None]] = ()) -> None:
        """Give every block to the pool. dropped: what no one will read, with the events that end its copies."""
        for copied, after in [*((spare, None) for spare in self._spare), *dropped]:
            for part in copied:
                self._pool.give(part, after)
        self._spare.clear()


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
