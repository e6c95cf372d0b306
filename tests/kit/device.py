"""Have operators choose for a GPU that is not there."""

from typing import Any

import pytest

from onewave.base.device import Device
from onewave.ops.choice import Call

H200 = Device((9, 0), 132)


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), *, num_sms: int = 132) -> None:
    """From now on every call runs as on such a GPU, whatever its tensors lie on."""
    device = Device(capability, num_sms)

    def of_call(call: Any) -> Device:
        return call.described or device

    monkeypatch.setattr(Call, "device", property(of_call))
    monkeypatch.setattr(Call, "on_cpu", False)
