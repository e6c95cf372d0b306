"""Allocators that a trace is replayed through, where no GPU is."""

import ctypes

import pytest
import torch

from kit.no_device import DEVICE, pretended_device
from onewave.bench.memory.peers import DriverMemory, Malloc


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_may_have_no_number(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)  # which wants one
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    with pretended_device():
        DriverMemory(torch.device(device))
    assert chosen == [DEVICE]


def test_a_block_counts_where_it_lies_in_memory_that_was_free_before() -> None:
    before = Malloc()
    *hole, above = [before.allocate(1 << 16) for _ in range(200)]
    for block in hole:
        before.free(block)
    peer = Malloc()
    if peer.reserved_bytes() is None:
        pytest.skip("a C library without mallinfo2")
    blocks = [peer.allocate(1 << 16) for _ in range(100)]
    assert peer.reserved_bytes() > 90 << 16
    for block in [*blocks, above]:
        peer.free(block)
