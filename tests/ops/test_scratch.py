"""Scratch that one launch leaves for the next, when several threads launch."""

from __future__ import annotations

import threading

import pytest
import torch

from onewave.ops import scratch

CARD = torch.device("cuda", 0)


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
        with scratch.held(CARD), scratch.held(CARD):  # the same thread may hold it twice
            entered[threading.current_thread().name].set()
            let_go.wait(20)

    threads = {name: threading.Thread(target=work, name=name) for name in streams}
    threads["first"].start()
    assert entered["first"].wait(20)
    threads["second"].start()
    threads["third"].start()
    assert entered["third"].wait(20)
    assert not entered["second"].wait(0.2)
    let_go.set()
    assert entered["second"].wait(20)
    for thread in threads.values():
        thread.join(20)
