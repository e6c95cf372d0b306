"""Allocators that replay a trace: ours, PyTorch's, and the device's own calls."""

import ctypes
import ctypes.util
from collections.abc import Callable
from typing import Any, Protocol

import torch

from onewave.base.errors import OnewaveError
from onewave.memory.allocator import Allocator
from onewave.memory.raw import MappedMemory, RawMemory


class Peer(Protocol):
    """One allocator, begun anew."""

    def allocate(self, num_bytes: int, /) -> Any:
        """Return what `free` takes."""
        ...

    def free(self, block: Any, /) -> None:
        """Give a block back."""
        ...

    def reserved_bytes(self) -> int | None:
        """Return the bytes of device memory that it holds now; None where nothing says."""
        ...

    def raw_calls(self) -> int | None:
        """Calls to the device or the system so far."""
        ...

    def close(self) -> None:
        """Hand everything back."""
        ...


class DriverMemory:
    """A GPU's memory as its driver hands it out (what cudaMalloc calls). Its context must be current."""

    def __init__(self, device: torch.device) -> None:
        own = torch.zeros(1, device=device).device  # makes the context; "cuda" is the current one
        torch.cuda.set_device(own)
        self.name = str(device)
        self._driver = ctypes.CDLL("libcuda.so.1")

    def reserve(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        if status := self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)):
            raise MemoryError(f"cuMemAlloc: {status}")
        return address.value

    def release(self, address: int) -> None:
        if status := self._driver.cuMemFree_v2(ctypes.c_uint64(address)):
            raise OnewaveError("cuMemFree", got=f"status {status}")


class Pooled:
    """Ours."""

    def __init__(self, raw: RawMemory) -> None:
        self._allocator = Allocator(raw)
        self.allocate, self.free = self._allocator.allocate, self._allocator.free

    def reserved_bytes(self) -> int:
        return self._allocator.statistics().reserved_bytes

    def raw_calls(self) -> int:
        found = self._allocator.statistics()
        return found.num_reserves + found.num_releases

    def close(self) -> None:
        self._allocator.trim()


class TorchOnGpu:
    """PyTorch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)
        self._calls_before = 0
        self._calls_before = self.raw_calls()

    def allocate(self, num_bytes: int) -> Any:
        return torch.cuda.caching_allocator_alloc(max(num_bytes, 1), self._device)  # pyright: ignore[reportUnknownMemberType] # untyped

    def free(self, block: Any) -> None:
        torch.cuda.caching_allocator_delete(block)  # pyright: ignore[reportUnknownMemberType] # untyped

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device) - self._before

    def raw_calls(self) -> int:
        found = torch.cuda.memory_stats(self._device)
        return found["num_device_alloc"] + found["num_device_free"] - self._calls_before

    def close(self) -> None:
        torch.cuda.empty_cache()


class PlainDriver:
    """One driver call a block."""

    def __init__(self, device: torch.device) -> None:
        self._raw, self._calls = DriverMemory(device), 0
        self._before = torch.cuda.mem_get_info(device)[0]
        self._device = device

    def allocate(self, num_bytes: int) -> int:
        self._calls += 1
        return self._raw.reserve(max(num_bytes, 1))

    def free(self, block: int) -> None:
        self._calls += 1
        self._raw.release(block)

    def reserved_bytes(self) -> int:
        return self._before - torch.cuda.mem_get_info(self._device)[0]

    def raw_calls(self) -> int:
        return self._calls

    def close(self) -> None: ...


class _Mallinfo(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


class Malloc:
    """The C library's malloc and free, one call a block."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(ctypes.util.find_library("c"))
        self._malloc, self._free = self._libc.malloc, self._libc.free
        self._malloc.restype, self._malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self._free.restype, self._free.argtypes = None, [ctypes.c_void_p]
        if hasattr(self._libc, "mallinfo2"):
            self._libc.mallinfo2.restype = _Mallinfo
        self.close()
        before = self._held()
        self._used_by_others = 0 if before is None else before.uordblks + before.hblkhd

    def _held(self) -> _Mallinfo | None:
        return self._libc.mallinfo2() if hasattr(self._libc, "mallinfo2") else None

    def allocate(self, num_bytes: int) -> Any:
        return self._malloc(num_bytes)

    def free(self, block: Any) -> None:
        self._free(block)

    def reserved_bytes(self) -> int | None:
        """Bytes that the C library holds of the process's memory, but for those in use before."""
        found = self._held()
        return None if found is None else found.arena + found.hblkhd - self._used_by_others

    def raw_calls(self) -> None:
        """The C library counts none."""

    def close(self) -> None:
        """Give memory that is free at its end back to the system."""
        if hasattr(self._libc, "malloc_trim"):
            self._libc.malloc_trim(0)


class TorchOnCpu(Malloc):
    """PyTorch's tensors on a CPU: the C library's aligned blocks."""

    def allocate(self, num_bytes: int) -> Any:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free(self, block: Any) -> None:
        """The caller holds no other reference."""


def peers_of(device: torch.device) -> dict[str, Callable[[], Peer]]:
    """Return a factory of each allocator, by name; ours first."""
    if device.type == "cuda":
        return {
            "onewave": lambda: Pooled(DriverMemory(device)),
            "torch caching": lambda: TorchOnGpu(device),
            "cudaMalloc": lambda: PlainDriver(device),
        }
    return {"onewave": lambda: Pooled(MappedMemory()), "torch": TorchOnCpu, "malloc": Malloc}
