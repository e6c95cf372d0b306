"""Threads that share an engine: what its one thread does between steps, and what streams show meanwhile."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.models.dummy import dummy_llm, write_config
from kit.models.fake_model import PIECES, FakeRunner, make_engine, run_all
from kit.processes import is_interrupted
from onewave import LLM, InvalidArgumentError, OnewaveError, SamplingParams, UnsupportedError
from onewave.engine import request as request_module
from onewave.engine import thread as thread_module
from onewave.engine.request import Reader, Sample
from onewave.engine.thread import EngineThread

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with dummy_llm(tmp_path) as model:
        yield model


def in_threads(*works: Any) -> None:
    """Run every work in a thread of its own, to the end, and raise what one of them raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        for each in [pool.submit(work) for work in works]:
            each.result(60)


def test_a_stream_that_looks_late_still_shows_every_token(llm: LLM) -> None:
    late = llm.stream([3, 4], GREEDY)
    next(late)
    assert [len(output.outputs[0].token_ids) for output in llm.stream([5], GREEDY)] == list(range(1, 21))
    outputs = list(late)
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(2, 21))
    assert [output.metrics.num_generation_tokens for output in outputs] == list(range(2, 21))
    assert [output.finished for output in outputs] == [False] * 18 + [True]
    assert outputs[-1].outputs[0].token_ids == llm.generate([3, 4], GREEDY)[0].outputs[0].token_ids


def test_streams_of_several_threads_show_every_token_in_order_and_end_complete(llm: LLM) -> None:
    found: dict[int, list[Any]] = {}

    def stream(i: int) -> None:
        found[i] = list(llm.stream([i + 1], GREEDY))

    in_threads(*[lambda i=i: stream(i) for i in range(5)], lambda: llm.generate([[7], [8]], GREEDY))
    for outputs in found.values():
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 21))
        assert all(len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids) for output in outputs)
        assert outputs[-1].metrics.finished_time is not None


def test_whoever_sees_a_request_finished_sees_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = make_engine(FakeRunner()), list[bool]()
    real = Sample.add_logprobs

    def add_logprobs(sample: Sample, *args: Any) -> None:
        if sample.finished:
            seen.append(sample.request.finished)
        real(sample, *args)

    monkeypatch.setattr(Sample, "add_logprobs", add_logprobs)
    request = engine.add(None, [3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0))
    run_all(engine)
    assert seen == [False]
    assert request.finished


def test_what_a_reader_may_see_never_holds_a_stop_string(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = make_engine(FakeRunner())
    free = plain.add(None, [3], asked)
    run_all(plain)
    text = "".join(PIECES[token] for token in free.samples[0].token_ids)
    stop = text[6:9]
    engine, shown = make_engine(FakeRunner()), list[str]()
    request = engine.add(None, [3], replace(asked, stop=[stop]), Reader(streaming=True))
    real, told = request_module.find_stop, list[Any]()
    monkeypatch.setattr(request, "updates", SimpleNamespace(put=told.append))

    def find_stop(so_far: str, *args: Any) -> Any:
        found = real(so_far, *args)
        if found is not None:  # the text holds it for a moment: what does another thread find?
            text = request.samples[0].text
            assert stop in text
            shown.extend(text[: state.samples[0].num_shown] for state in told if state)
        return found

    monkeypatch.setattr(request_module, "find_stop", find_stop)
    while engine.has_work:
        engine.step()
        engine.tell_readers()
    assert shown
    assert told[-1] is None
    assert not any(stop in each for each in shown)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_readers_are_told_while_the_device_works_and_of_every_token(run_ahead: int) -> None:
    """A reader that wakes while the next step is launched holds it up."""
    log = list[str]()

    class Noting(FakeRunner):
        def decode(self, *given: Any) -> Any:
            log.append("launch")
            return super().decode(*given)

        def check(self) -> None:
            log.append("read")

    engine = make_engine(Noting(run_ahead=run_ahead))
    request = engine.add(None, [3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), Reader(True))
    real, told = request.updates, list[int]()

    def put(state: Any) -> None:
        log.append("tell")
        told.append(5 if state is None else state.samples[0].num_tokens)
        real.put(state)

    request.updates = SimpleNamespace(put=put, get=real.get)
    thread = EngineThread(engine)
    thread.call(lambda: None)
    while real.get() is not None:
        pass
    thread.end()
    assert told == [1, 2, 3, 4, 5]
    # The first token at once, or with steps that run ahead behind the launch of the one that it is fed to; the others
    # between a launch and the wait for the one before.
    ahead = "launch read tell launch read" + " launch tell read" * 2 + " tell read tell"
    assert " ".join(log) == (ahead if run_ahead else "read tell" + " launch read tell" * 4)


def test_a_stream_that_is_dropped_in_the_middle_of_a_step_ends_after_it(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    stream = llm.stream([3, 4], GREEDY)
    engine: Any = llm._engine
    real, running, begun = llm.runner.decode, list[list[str]](), threading.Event()

    def decode(*args: Any) -> Any:
        assert begun.wait(60)
        stream.close()
        running.append([each.owner.request.request_id for each in engine._scheduler.running])
        return real(*args)

    monkeypatch.setattr(llm.runner, "decode", decode)
    next(stream)
    begun.set()
    answer = llm.generate([5], GREEDY)[0].outputs[0]
    assert running[0] == ["0"]
    assert all("0" not in each for each in running[1:])
    monkeypatch.undo()
    assert answer == llm.generate([5], GREEDY)[0].outputs[0]


def test_a_model_that_fails_to_stop_what_runs_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def abort_all(*args: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(llm._engine, "abort_all", abort_all)
    with pytest.raises(RuntimeError, match="boom"):
        llm.close()
    assert not hasattr(llm, "runner")
    with pytest.raises(InvalidArgumentError, match="LLM: closed"):
        llm.generate([1], GREEDY)


class Stepped:
    """An engine that only counts its steps, as many as are asked for, and whose steps do what they are told."""

    def __init__(self, step: Callable[[], object] = lambda: None) -> None:
        self.stream, self.wanted, self.steps = None, 0, 0
        self.told = SimpleQueue[int]()
        self._step = step

    @property
    def has_work(self) -> bool:
        return self.steps < self.wanted

    def step(self) -> bool:
        self.steps += 1
        self._step()
        return False

    def tell_readers(self) -> None:
        self.told.put(self.steps)

    def abort_all(self, error: BaseException | None = None) -> None:
        self.wanted = self.steps

    def want(self, steps: int) -> None:
        self.wanted = self.steps + steps


def until(engine: Stepped, steps: int) -> None:
    """Return once so many steps are made and their readers told."""
    while engine.told.get() < steps:
        pass


def test_one_thread_makes_every_step_and_every_job_comes_between_two() -> None:
    inside, idents = threading.Lock(), set[int]()

    def alone() -> None:
        assert inside.acquire(blocking=False), "two at once"
        idents.add(threading.get_ident())
        inside.release()

    engine = Stepped(alone)
    thread = EngineThread(engine)

    def ask() -> None:
        for _ in range(50):
            thread.call(lambda: engine.want(3))
            thread.call(alone)

    in_threads(ask, ask, ask)
    assert len(idents) == 1
    assert idents != {threading.get_ident()}


def test_what_is_posted_in_a_step_is_done_after_it_and_before_the_next() -> None:
    log = list[str]()

    def step() -> None:
        log.append("begin")
        thread.post(lambda: log.append("posted"))
        log.append("end")

    engine = Stepped(step)
    thread = EngineThread(engine)
    thread.call(lambda: engine.want(2))
    until(engine, 2)
    thread.end()
    assert log == ["begin", "end", "posted"] * 2


def test_a_job_that_fails_and_a_step_that_fails_leave_the_thread_to_others(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("boom")

    engine = Stepped(fail)
    thread = EngineThread(engine)
    with pytest.raises(ValueError, match="boom"):
        thread.call(fail)
    thread.post(fail)
    thread.call(lambda: engine.want(2))
    until(engine, 2)
    assert thread.call(lambda: "mine") == "mine"
    assert "a job between two steps failed" in caplog.text


def test_a_call_from_within_a_step_is_refused() -> None:
    refused = SimpleQueue[str]()

    def step() -> None:
        with pytest.raises(OnewaveError) as error:
            thread.call(lambda: None)
        refused.put(str(error.value))

    engine = Stepped(step)
    thread = EngineThread(engine)
    thread.call(lambda: engine.want(1))
    assert "LLM: called from within one of its own steps. Call it afterwards" in refused.get()


def test_who_is_interrupted_returns_at_once_and_its_request_ends_after_the_step(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    real, over = llm.runner.decode, threading.Event()

    def decode(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)  # to the main thread, which waits for this step
        assert over.wait(60)
        monkeypatch.undo()
        return real(*args)

    monkeypatch.setattr(llm.runner, "decode", decode)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5], GREEDY)
    over.set()
    engine: Any = llm._engine
    thread: Any = llm._thread
    assert thread.call(lambda: engine.has_work) is False
    assert len(llm.generate([5], GREEDY)[0].outputs[0].token_ids) == 20


def test_whenever_ctrl_c_comes_the_engine_goes_on_for_others_and_the_request_ends(llm: LLM) -> None:
    engine: Any = llm._engine
    thread: Any = llm._thread
    asked = replace(GREEDY, max_tokens=2)
    for work in (lambda: llm.generate([5], asked), lambda: list(llm.stream([5], asked))):
        place = 0
        for place in count(1):
            came = is_interrupted(work, place, [thread_module.__file__])
            assert thread.call(lambda: engine.has_work) is False
            if not came:
                break
        assert place > 8
    assert len(llm.generate([5], GREEDY)[0].outputs[0].token_ids) == 20


@pytest.mark.parametrize("way", ["closed", "collected"])
def test_the_thread_ends_with_the_model(way: str, tmp_path: Path) -> None:
    model = dummy_llm(tmp_path)
    before = {thread.ident for thread in threading.enumerate()}
    model.generate([5], GREEDY)
    (thread,) = [each for each in threading.enumerate() if each.ident not in before and each.name == "onewave"]
    assert thread.daemon
    if way == "closed":
        model.close()
    else:
        del model
        gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_call_that_comes_as_the_thread_ends_is_answered() -> None:
    engine = Stepped()
    thread = EngineThread(engine)

    def ask() -> None:
        for i in range(300):
            assert thread.call(lambda i=i: i) == i

    def end() -> None:
        for _ in range(300):
            thread.end()

    in_threads(ask, ask, end)


IN_A_NEW_PROCESS = """
import os, sys, torch
from onewave import LLM, OnewaveError, SamplingParams
torch.ones(1 << 20).cos()  # in several threads, of which a forked child has none
llm = LLM(sys.argv[1], device="cpu", load_format="dummy")
asked = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
expected = llm.generate([3, 4], asked)[0].outputs[0].token_ids
stream = llm.stream([3, 4], asked)
next(stream)
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        try:
            list(stream)
        except OnewaveError as error:
            print(error, flush=True)
        assert llm.generate([3, 4], asked)[0].outputs[0].token_ids == expected
        torch.ones(1 << 20).cos()
        with LLM(sys.argv[1], device="cpu", load_format="dummy") as another:
            assert another.generate([3, 4], asked)[0].outputs[0].token_ids == expected
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert list(stream)[-1].outputs[0].token_ids == expected
"""


@pytest.mark.parametrize("way", ["fork", "exit"])
def test_a_forked_child_has_a_thread_of_its_own_and_a_process_that_ends_amid_a_stream_ends_well(
    way: str, tmp_path: Path
) -> None:
    several = os.environ | {"OMP_NUM_THREADS": "2", "ONEWAVE_NUM_THREADS": "2"}
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, str(write_config(tmp_path)), way]
    run = subprocess.run(command, env=several, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert ("begun before this process was forked" in run.stdout) == (way == "fork")


def test_a_forked_child_is_told_that_it_can_not_use_its_parents_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Stepped()
    thread = EngineThread(engine)
    thread.call(lambda: None)
    monkeypatch.setattr(engine, "stream", SimpleNamespace(device="cuda:0"))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    updates = SimpleQueue[None]()
    for ask in (lambda: thread.call(lambda: None), lambda: thread.wait(updates)):
        with pytest.raises(UnsupportedError, match="made on cuda:0, in a process that then was forked"):
            ask()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    for device in ("auto", "cuda"):
        with pytest.raises(UnsupportedError, match=f"device: '{device}' in a process forked from one that uses CUDA"):
            LLM("llama-1b", device=device, load_format="dummy")
