"""A CUDA device that is not there: host code takes tensors of the CPU for its own, and launches are recorded, not made.

While `pretended_device` lasts, in this thread, each tensor says that it lies on `cuda:0`, tensors asked for there are
made on the CPU, and `torch.cuda` answers for a device of the given capability. Memory that nothing writes takes none.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onewave.base import device as base_device

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_MANY = 1 << 18


class _OnDevice(TorchFunctionMode):
    """Tensors' answers to where they lie, and the CPU in place of each device that is asked for."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and isinstance(args[0], Tensor):
            return answer
        if func is Tensor.pin_memory:
            return args[0]
        named = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if named.get("device") is not None:
            named["device"] = _CPU
        if func is torch.zeros and prod(shape := torch.Size(args[0] if isinstance(args[0], tuple) else args)) > _MANY:
            return torch.empty(shape, **named)  # nobody reads them, and writing so many takes time
        return func(*(_CPU if isinstance(value, torch.device) else value for value in args), **named)


_ANSWERS: dict[Any, Any] = {
    Tensor.device.__get__: DEVICE,
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.get_device: 0,
}


class _Stream(SimpleNamespace):
    """The one stream there is. It waits for nothing."""

    def __init__(self, *_: object) -> None:
        super().__init__(cuda_stream=1)

    def synchronize(self) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class _Event(SimpleNamespace):
    """An event that is done at once."""

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@contextmanager
def pretended_device(capability: tuple[int, int] = (9, 0), sms: int = base_device.H200_SMS) -> Generator[torch.device]:
    """Meanwhile this thread's tensors lie on a CUDA device of that capability and number of SMs."""
    stream = _Stream()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "current_stream": lambda *_: stream,
        "stream": lambda *_: nullcontext(),
        "device": lambda *_: nullcontext(),
        "synchronize": lambda *_: None,
        "Stream": _Stream,
        "Event": _Event,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: "NVIDIA H200",
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=sms),
        "mem_get_info": lambda *_: (1 << 37, 1 << 37),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
    }
    caches = (base_device.capability, base_device.num_sms, base_device.device_of)
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        for cache in caches:  # another device may have answered before, and will again
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        stack.enter_context(_OnDevice())
        yield DEVICE
