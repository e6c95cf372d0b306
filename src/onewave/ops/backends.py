"""Which implementation of an operator runs: Triton on CUDA, compiled loops for float32 on the CPU, or the reference."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["capability", "current_card", "implementation", "load", "num_sms"]


def implementation(operator: str, x: Tensor) -> ModuleType:
    """Return the module that runs `operator` (a folder of ops) on x's device and dtype."""
    if x.is_cuda:
        return load(operator, "triton_impl")
    return load(operator, "numba_impl" if x.dtype is torch.float32 and x.is_cpu else "reference")


@cache
def load(operator: str, module: str) -> ModuleType:
    """Import and return one implementation of an operator by name."""
    # Late, so that a machine without Triton never asks for it; cached, because this is in every operator's way.
    return import_module(f"onewave.ops.{operator}.{module}")


def current_card() -> int:
    """The number of the card that CUDA calls are for. A process that has not used CUDA begins with card 0; asking
    PyTorch would make it use CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return a card's compute capability; (0, 0) elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def num_sms(device: torch.device) -> int:
    """Return the streaming multiprocessors of a card; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    # torch.cuda's properties carry no types.
    return int(cast("Any", torch.cuda).get_device_properties(device).multi_processor_count)
