"""Tensors from pooled memory: one pool for each GPU, for each GPU's pinned host memory, and for the CPU."""

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError
from onewave.memory.allocator import ALIGNMENT, Allocator
from onewave.memory.shortage import is_out_of_memory


class Done(Protocol):
    """A point that the device has to reach first, say a torch.cuda.Event."""

    def query(self) -> bool:
        """Whether it has."""
        ...


class TorchMemory:
    """Raw memory that PyTorch hands out: a device's, or pinned memory of the host."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.name = f"the host, pinned for {device}" if pinned else str(device)
        self._device, self._pinned = torch.device("cpu") if pinned else device, pinned
        # PyTorch's memory may have work of its stream to come. No work is ever on this one, so its memory is fresh.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and not pinned else None
        # Each piece's bytes; its address is aligned, which a CPU's memory is not by itself.
        self._pieces: dict[int, Tensor] = {}

    def reserve(self, num_bytes: int) -> int:
        """See RawMemory."""
        try:
            # Not as an inference tensor: what is made of it is written inside and outside of that mode.
            with torch.inference_mode(False), torch.cuda.stream(self._stream):
                size = num_bytes + ALIGNMENT
                piece = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(str(error)) from error
        begin = -piece.data_ptr() % ALIGNMENT
        piece = piece[begin : begin + num_bytes]
        self._pieces[piece.data_ptr()] = piece
        return piece.data_ptr()

    def release(self, address: int) -> None:
        """See RawMemory."""
        del self._pieces[address]

    def at(self, address: int, num_bytes: int) -> Tensor:
        """Bytes of a piece, uint8 [num_bytes]."""
        for begin, piece in self._pieces.items():
            if begin <= address < begin + len(piece):
                return piece[address - begin : address - begin + num_bytes]
        raise AssertionError("no piece holds this address")


class TensorPool:
    """Takes tensors from an Allocator over PyTorch's memory. Threads may share it."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._memory = TorchMemory(device, pinned=pinned)
        self.allocator = Allocator(self._memory)
        self._lock = threading.Lock()
        self._leaving: deque[tuple[int, Done]] = deque()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with any contents, aligned to ALIGNMENT. Raises CapacityError."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            while self._leaving and self._leaving[0][1].query():
                self.allocator.free(self._leaving.popleft()[0])
            address = self.allocator.allocate(num_bytes)
            with torch.inference_mode(False):
                return self._memory.at(address, num_bytes).view(dtype).view(*shape)

    def give(self, tensor: Tensor, after: Done | None = None) -> None:
        """Take back what `take` returned, for others once the device is past `after`. Raises InvalidArgumentError."""
        # An empty tensor has no data_ptr of its own.
        address = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.dtype.itemsize
        with self._lock:
            if after is None:
                self.allocator.free(address)
            elif any(address == leaving for leaving, _ in self._leaving):
                raise InvalidArgumentError("give", got=f"{address:#x}, twice", allowed="what take returned, once")
            else:
                self._leaving.append((address, after))


_pools: dict[tuple[torch.device, bool], TensorPool] = {}
_making = threading.Lock()


def pool_of(device: torch.device, *, pinned: bool = False) -> TensorPool:
    """The one pool of a device, or of the host's memory that is pinned for it."""
    # "cuda" is the current one.
    own = torch.empty(0, device=device).device
    with _making:
        if (own, pinned) not in _pools:
            _pools[own, pinned] = TensorPool(own, pinned=pinned)
        return _pools[own, pinned]
