"""The GPU a call is for: its number, compute capability and SMs. The one file of this room that imports torch."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch

__all__ = ["capability", "current_device", "num_sms"]


def current_device() -> int:
    """Return the index of the GPU that CUDA calls are for; 0 in a process that has not used CUDA.

    Asking PyTorch would initialise CUDA.
    """
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; (0, 0) elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    # torch.cuda's properties carry no types.
    return int(cast("Any", torch.cuda).get_device_properties(device).multi_processor_count)
