"""A board's energy, by an NVML that stands in for the driver's."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onewave.base.errors import UnsupportedError
from onewave.bench import energy

DEVICE = torch.device("cuda", 0)
# Millijoules a second, idle and while calls run.
IDLE, BUSY = 100_000, 600_000


class Board:
    """A clock, and a board that takes BUSY from the first call on. refuses: the function of NVML that fails."""

    def __init__(self, refuses: str = "") -> None:
        self.now, self.spent, self.calls, self.refuses = 0.0, 0.0, 0, refuses

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.spent += seconds * (BUSY if self.calls else IDLE)

    def call(self) -> None:
        self.calls += 1
        self.pass_time(0.01)

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
        assert uuid == b"GPU-61095587"
        return int(self.refuses == "handle")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object, found: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_ulonglong))[0] = int(self.spent)
        return int(self.refuses == "energy")


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Any:
    def into(board: Board | None) -> None:
        def library(name: str) -> Board:
            if board is None:
                raise OSError(name)
            return board

        monkeypatch.setattr(energy.ctypes, "CDLL", library)
        if board is not None:
            clock = SimpleNamespace(perf_counter=lambda: board.now, sleep=board.pass_time)
            monkeypatch.setattr(energy, "time", clock)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="61095587"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    return into


def test_a_call_takes_its_share_of_what_the_board_took(plug: Any) -> None:
    plug(board := Board())
    found = energy.measure_energy(board.call, DEVICE)
    assert found.millijoules == pytest.approx(0.01 * BUSY, rel=1e-3)
    assert found.above_idle == pytest.approx(0.01 * (BUSY - IDLE), rel=1e-3)
    assert (found.watts, found.idle_watts) == pytest.approx((600, 100), rel=1e-3)
    assert board.now > 2


@pytest.mark.parametrize(
    ("board", "says"),
    [
        (None, "no libnvidia-ml.so.1; allowed: NVIDIA's driver"),
        (Board("handle"), "cuda:0, which NVML does not find"),
        (Board("energy"), "a GPU without an energy counter"),
    ],
)
def test_a_machine_without_a_counter_gets_one_error(plug: Any, board: Board | None, says: str) -> None:
    plug(board)
    with pytest.raises(UnsupportedError, match=f"^--energy: {says}"):
        energy.measure_energy(lambda: None, DEVICE)
