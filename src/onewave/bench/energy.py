"""Board energy of a GPU: NVML's energy counter over a run of some seconds, idle power measured before."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from onewave.base.errors import UnsupportedError

_MIN_SECONDS = 2.0
_IDLE_SECONDS = 0.5


@dataclass(frozen=True)
class BoardEnergy:
    """Energy of one call: millijoules of the whole board and above idle. watts: while it ran. idle_watts: before."""

    millijoules: float
    above_idle: float
    watts: float
    idle_watts: float


class _Meter:
    """NVML's counter of a device: millijoules since the driver was loaded. Raises UnsupportedError without one."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise UnsupportedError("--energy", got="no libnvidia-ml.so.1", allowed="NVIDIA's driver") from error
        self._handle = ctypes.c_void_p()
        found = cast("Any", torch.cuda).get_device_properties(device)  # which carry no types
        uuid = f"GPU-{found.uuid}".encode()
        self._nvml.nvmlInit_v2()
        if self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)):
            raise UnsupportedError("--energy", got=f"{device}, which NVML does not find")

    def read(self) -> float:
        found = ctypes.c_ulonglong()
        if self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(found)):
            raise UnsupportedError("--energy", got="a GPU without an energy counter")
        return float(found.value)


def measure_energy(run: Callable[[], object], device: torch.device) -> BoardEnergy:
    """Call `run`, which queues work on the device, for some seconds, and say what a call took of the board."""
    meter = _Meter(device)
    torch.cuda.synchronize(device)
    first, began = meter.read(), time.perf_counter()
    time.sleep(_IDLE_SECONDS)
    idle = (meter.read() - first) / (time.perf_counter() - began)
    for _ in range(3):
        run()
    torch.cuda.synchronize(device)
    first, began, calls = meter.read(), time.perf_counter(), 0
    while time.perf_counter() - began < _MIN_SECONDS:
        for _ in range(50):
            run()
        torch.cuda.synchronize(device)
        calls += 50
    spent, seconds = meter.read() - first, time.perf_counter() - began
    return BoardEnergy(spent / calls, (spent - idle * seconds) / calls, spent / seconds * 1e-3, idle * 1e-3)
