"""Where an allocator takes its memory from."""

import ctypes
import mmap
from typing import Protocol


class RawMemory(Protocol):
    """Memory in large pieces, as a device or the system hands it out: each call is slow.

    name: of the device, for errors and traces.
    """

    name: str

    def reserve(self, num_bytes: int) -> int:
        """Return the address of num_bytes, a multiple of allocator.ALIGNMENT. Raises MemoryError."""
        ...

    def release(self, address: int) -> None:
        """Hand back what `reserve` returned."""
        ...


class MappedMemory:
    """The host's memory, mapped without a file: a piece takes room when it is first written."""

    name = "cpu"

    def __init__(self) -> None:
        self._pieces: dict[int, mmap.mmap] = {}

    def reserve(self, num_bytes: int) -> int:
        """See RawMemory."""
        try:
            piece = mmap.mmap(-1, num_bytes)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no {num_bytes} bytes to map") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        self._pieces[address] = piece
        return address

    def release(self, address: int) -> None:
        """See RawMemory."""
        self._pieces.pop(address).close()
