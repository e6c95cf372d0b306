"""Which implementation of an operator runs: Triton on CUDA, compiled loops for float32 on the CPU, or the reference."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


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
