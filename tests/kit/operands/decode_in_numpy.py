"""Runs Hopper's decode kernel in NumPy: its own source, with the very arguments that a GPU would get."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from kit.numpy_gpu.gluon_in_numpy import Boxes, Fault, Memory, Pointer, launch
from kit.operands import decode_calls
from kit.operands.random import randn_half as randn
from onewave.base.device import Device
from onewave.ops.decode_attention.hopper import kernel as stream_impl
from onewave.ops.decode_attention.hopper import load as stream_load_impl
from onewave.ops.decode_attention.hopper import merge as stream_merge_impl
from onewave.ops.decode_attention.hopper import parts as stream_parts_impl
from onewave.ops.decode_attention.hopper import widen as stream_widen_impl
from onewave.ops.decode_attention.triton import merge as merge_impl
from onewave.ops.decode_attention.triton import projection as projection_impl
from onewave.ops.decode_attention.triton import shares as shares_impl

MODULES = (
    merge_impl, projection_impl, shares_impl, stream_parts_impl, stream_load_impl, stream_merge_impl, stream_widen_impl,
    stream_impl,
)  # fmt: skip
OPTIONS = {"num_warps", "maxnreg", "launch_pdl", "enable_fp_fusion"}


# So that several programs have a row, and one program several rows.
H200 = Device((9, 0), 6)


def in_numpy(tensor: Tensor) -> np.ndarray:
    """The same memory; PyTorch gives NumPy no float8."""
    if tensor.dtype is not torch.float8_e4m3fn:
        return tensor.numpy()
    return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)


class Gpu:
    """Runs the kernel in NumPy: copies its tensors in, and those that it may write out again.

    lengths_before, finished_before: what stands there until the launch before has been waited for. nearer: pieces of
    the caches that were brought into L2, (k or v, offset in bytes, bytes). boxes: how many TMA
    brought.
    """

    def __init__(self) -> None:
        self.grids: list[tuple[int, int]] = []
        self.lengths_before: Tensor | None = None
        self.finished_before: Tensor | None = None
        self.nearer: list[tuple[str, int, int]] = []
        self.boxes = 0
        self.pause: Callable[[], None] = lambda: None
        self.planted: list[Fault] = []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def run(*positional: Any, **named: Any) -> None:
            self.grids.append(grid)
            given = dict(zip(stream_impl.stream_kernel.arg_names, positional, strict=False)) | named
            memory, copies = Memory(1 << 25), {}
            gpu, self.boxes = self, 0

            class Counted(Boxes):
                def box(self, at: Sequence[Any]) -> np.ndarray:
                    gpu.boxes += 1
                    return super().box(at)

            def place(tensor: Tensor) -> Pointer:
                whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
                if whole.data_ptr() not in copies:
                    copies[whole.data_ptr()] = (memory.put(in_numpy(whole)), whole)
                return copies[whole.data_ptr()][0] + tensor.storage_offset()

            def made(value: Any) -> Any:
                if isinstance(value, Tensor):
                    return place(value)
                if hasattr(value, "block_shape"):
                    return Counted(memory, place(value.base), value.shape, value.strides, list(value.block_shape))
                return value

            arguments = {name: made(value) for name, value in given.items() if name not in OPTIONS}
            assert set(arguments) == set(stream_impl.stream_kernel.arg_names)
            more: dict[str, Any] = {"modules": MODULES, "pause": self.pause, "planted": self.planted}
            late: list[tuple[Any, np.ndarray]] = []
            for name, before in (("lengths", self.lengths_before), ("finished", self.finished_before)):
                if before is not None:
                    late.append((arguments[name], memory.get(arguments[name], tuple(given[name].shape))))
                    memory.set(arguments[name], before.numpy().view(late[-1][1].dtype))
            if late:
                # All have looked before anybody waits no more.
                waits = threading.Barrier(
                    2 * grid[0] * grid[1], lambda: [memory.set(at, right) for at, right in late], timeout=200
                )
                more["before"] = lambda: (waits.wait(), None)[1]
            launch(memory, grid, arguments, name="stream_kernel", **more)
            self.nearer = []
            for _, address, size in memory.prefetched:
                offsets = {name: address - int(arguments[name].address) for name in ("k", "v")}
                found = [name for name, offset in offsets.items() if 0 <= offset <= given[name].nbytes - size]
                assert len(found) == 1, "what was brought nearer lies in no cache"
                self.nearer.append((found[0], offsets[found[0]], size))
            for pointer, tensor in copies.values():
                in_numpy(tensor)[...] = memory.get(pointer, tuple(tensor.shape))

        return run


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return decode_calls.attend(q, k, v, lengths, device=H200, **{"backend": "gluon"} | options)


def case(lengths: list[int], heads: int = 4, dim: int = 64, queries: int = 1, capacity: int = 520) -> Any:
    q, k, v = (
        randn(len(lengths), heads, queries, dim, seed=1),
        *(randn(len(lengths), 2, capacity, dim, seed=seed) for seed in (2, 3)),
    )
    for row, length in enumerate(lengths):
        k[row, :, max(0, length) :] = v[row, :, max(0, length) :] = float("nan")
    return q, k, v, torch.tensor(lengths, dtype=torch.int32)
