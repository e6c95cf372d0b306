"""Scratch that one launch leaves for the next, when several threads launch."""

import threading

import pytest
import torch

from onewave.gpu import scratch
from onewave.memory.tensors import TensorPool

GPU = torch.device("cuda", 0)


def test_a_cpu_has_nothing_to_hold() -> None:
    with scratch.held(torch.device("cpu")):
        pass


def test_threads_wait_for_each_other_on_one_stream_and_not_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {"first": 1, "second": 1, "third": 2}
    monkeypatch.setattr(scratch, "_locks", {})
    monkeypatch.setattr(scratch, "_owner", lambda device: streams[threading.current_thread().name])
    entered = {name: threading.Event() for name in streams}
    let_go = threading.Event()

    def work() -> None:
        with scratch.held(GPU), scratch.held(GPU):  # the same thread may hold it twice
            entered[threading.current_thread().name].set()
            let_go.wait(60)

    threads = {name: threading.Thread(target=work, name=name) for name in streams}
    threads["first"].start()
    assert entered["first"].wait(60)
    threads["second"].start()
    threads["third"].start()
    assert entered["third"].wait(60)
    # Whoever asks for the first one's lock now is refused, from the thread of the second or any other.
    taken: list[bool] = []
    refused = threading.Thread(target=lambda: taken.append(scratch._locks[GPU, 1].acquire(blocking=False)))
    refused.start()
    refused.join(60)
    assert taken == [False]
    assert not entered["second"].is_set()
    let_go.set()
    assert entered["second"].wait(60)
    for thread in threads.values():
        thread.join(60)


def test_each_use_and_stream_has_memory_of_its_own_and_never_less_than_it_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = [1]
    monkeypatch.setattr(scratch, "_blocks", {})
    monkeypatch.setattr(scratch, "_owner", lambda device: stream[0])
    pool = TensorPool(torch.device("cpu"))
    monkeypatch.setattr(scratch, "pool_of", lambda device: pool)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **more: empty(*size, device="cpu", **more))

    def block(use: str, size: int) -> torch.Tensor:
        return scratch._kept(use, GPU, size, 8, torch.float32)

    first = block("partials", 10)
    assert block("partials", 9) is first
    assert block("order of tiles", 10) is not first
    grown = block("partials", 11)
    assert grown is not first
    assert len(grown) >= 20
    assert block("partials", 10) is grown
    stream[0] = 2
    assert block("partials", 10) is not grown
    # A recording takes what eager calls of any stream have made, and else has its own.
    stream[0] = scratch._GRAPHS
    recorded = block("partials", 11)
    assert recorded is block("partials", 10)
    assert len(block("partials", 1000)) == 1000
    assert block("partials", 10) is recorded
