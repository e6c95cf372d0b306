"""The GPU a call is for: its number, compute capability and SMs. The one file of this room that imports torch."""

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch

H200_SMS = 132


@dataclass(frozen=True)
class Device:
    """The properties of a device that the choice of a kernel needs. The device may be here or only described.

    capability: (9, 0) for sm_90; None on a CPU. name: of a GPU that is here, None for any of its kind.
    """

    capability: tuple[int, int] | None
    num_sms: int
    name: str | None = None

    @property
    def text(self) -> str:
        """As a user writes it: cpu, cuda sm_90."""
        return "cpu" if self.capability is None else f"cuda sm_{self.capability[0]}{self.capability[1]}"


CPU = Device(None, 1)


def current_device() -> int:
    """Return the index of the GPU that CUDA calls are for; 0 in a process that has not used CUDA.

    Asking PyTorch would initialise CUDA.
    """
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


@cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return CPU
    return Device(capability(device), num_sms(device), torch.cuda.get_device_name(device))


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
