"""Allocators that a trace is replayed through, where no GPU is."""

import ctypes

import pytest
import torch

from kit.no_device import DEVICE, pretended_device
from onewave.bench.memory.peers import DriverMemory


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_may_have_no_number(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)  # which wants one
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    with pretended_device():
        DriverMemory(torch.device(device))
    assert chosen == [DEVICE]
