"""Launches of the chains' kernels, run in NumPy with the very arguments that a GPU would get."""

from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from kit.numpy_gpu.gluon_in_numpy import Matrix, Memory, launch
from onewave.ops.ffn.chain import kernel as chain_kernel_impl
from onewave.ops.ffn.chain import launch as chain_impl
from onewave.ops.post_attention.chain import kernel as post_attention_kernel_impl
from onewave.ops.post_attention.chain import launch as post_attention_impl
from onewave.wave.kernel import finish
from onewave.wave.launch import launch as wave_launch


class ChainDevice:
    """A GPU in NumPy: every launch copies its tensors in, runs, and copies them out again.

    delays: what the kernel's own delay() does in a build for tests. What the launcher makes holds NaN until written.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: int = 4):
        self.launches: list[tuple[str, int, dict[str, Any]]] = []
        self.delays: Callable[[], None] = lambda: None
        for name in ("chain_kernel", "started_kernel"):
            monkeypatch.setattr(chain_impl, name, Kernel(self, chain_kernel_impl, name))
        name = "post_attention_kernel"
        monkeypatch.setattr(post_attention_impl, name, Kernel(self, post_attention_kernel_impl, name))
        monkeypatch.setattr(chain_impl, "_kept", OrderedDict())
        monkeypatch.setattr(wave_launch, "runs_here", lambda device: True)
        for module in (chain_impl, post_attention_impl, wave_launch):
            monkeypatch.setattr(module, "co_resident", lambda device: workers)
        stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)
        for name, value in (
            ("is_current_stream_capturing", lambda: False),
            ("current_stream", lambda device=None: stream),
            ("Stream", lambda device=None: stream),
            ("stream", lambda which: torch.no_grad()),
            ("synchronize", lambda device=None: None),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(Tensor, "new_empty", lambda like, *shape: torch.full(shape, torch.nan, dtype=like.dtype))

    def run(self, name: str, blocks: int, given: dict[str, Any], options: dict[str, Any]) -> None:
        self.launches.append((name, blocks, options))
        if name == "started_kernel":
            # The launch before has ended here, so that it must find all blocks started.
            assert int(given["started"][0]) == (int(given["epochs"][0]) + 1) * given["blocks"]
            given["epochs"] += 1
            return
        memory, copies = Memory(1 << 23), {}

        def place(tensor: Tensor) -> Any:
            whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
            if whole.data_ptr() not in copies:
                copies[whole.data_ptr()] = (whole, memory.put(whole.numpy()))
            return copies[whole.data_ptr()][1] + tensor.storage_offset()

        arguments: dict[str, Any] = {}
        for key, value in given.items():
            if isinstance(value, Tensor):
                arguments[key] = place(value)
            elif hasattr(value, "base"):
                shape, box = tuple(value.shape), tuple(value.block_shape)
                arguments[key] = Matrix(memory, place(value.base), shape, box, value.strides[0])
            else:
                arguments[key] = value
        assert arguments.pop("DTYPE") is gl.float16
        arguments["DTYPE"] = np.float16
        modules = (finish, chain_kernel_impl, post_attention_kernel_impl)
        launch(memory, blocks, arguments, self.delays, modules=modules, name=name)
        for whole, pointer in copies.values():
            whole.copy_(torch.from_numpy(memory.get(pointer, tuple(whole.shape))))


class Kernel:
    """Stands for a compiled kernel: kernel[(blocks,)](*arguments)."""

    def __init__(self, device: ChainDevice, module: ModuleType, name: str):
        self.device, self.name = device, name
        self.names = getattr(module, name).arg_names

    def __getitem__(self, grid: tuple[int]) -> Any:
        def start(*values: Any, **more: Any) -> None:
            given = dict(zip(self.names, values, strict=False))
            options = {key: value for key, value in more.items() if key not in self.names}
            given |= {key: value for key, value in more.items() if key in self.names}
            assert given.keys() == set(self.names), set(self.names) ^ given.keys()
            self.device.run(self.name, grid[0], given, options)

        return start
