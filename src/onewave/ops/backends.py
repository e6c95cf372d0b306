"""Which implementation of an operator runs: Triton on CUDA, compiled loops for float32 on the CPU, or the reference."""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


def module_for(dtype: torch.dtype, *, on_gpu: bool, on_cpu: bool) -> str:
    """Return the name of the module that runs an operator of one kernel a device."""
    return "triton_impl" if on_gpu else "numba_impl" if on_cpu and dtype is torch.float32 else "reference"


def implementation(operator: str, x: Tensor) -> ModuleType:
    """Return the module that runs `operator` (a folder of ops) on x's device and dtype."""
    return load(operator, module_for(x.dtype, on_gpu=x.is_cuda, on_cpu=x.is_cpu))


@cache
def load(operator: str, module: str) -> ModuleType:
    """Import and return one implementation of an operator by name."""
    # Late, so that a machine without Triton never asks for it; cached, because this is in every operator's way.
    return import_module(f"onewave.ops.{operator}.{module}")
