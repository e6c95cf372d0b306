"""Threads that share an engine: whose turn it is, and what streams show meanwhile."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fake_model import PIECES, FakeRunner, make_engine, run_all

from onewave import LLM, InvalidArgumentError, OnewaveError, SamplingParams
from onewave.engine import request as request_module
from onewave.engine import turns as turns_module
from onewave.engine.request import Sample
from onewave.engine.turns import Turns

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 96, "rms_norm_eps": 1e-5, "eos_token_id": 2,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with LLM(tmp_path, device="cpu", load_format="dummy") as model:
        yield model


def in_threads(*works: Any) -> None:
    """Run every work in a thread of its own, to the end, and raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def is_interrupted(work: Callable[[], object], place: int) -> bool:
    """Do the work, with Ctrl-C at the place-th of the moments in turns.py when it can come: where a function begins,
    and after a call. Returns whether there was such a moment."""
    left = place

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename == turns_module.__file__:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    try:
        sys.setprofile(look)
        work()
    except KeyboardInterrupt:
        assert left == 0
    finally:
        sys.setprofile(None)
    return left <= 0


def in_line(turns: Turns, count: int) -> None:
    """Return once so many wait."""
    while len(turns._line) < count:  # pyright: ignore[reportPrivateUsage]
        pass


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
    request = engine.add(None, [3], replace(asked, stop=[stop]), streaming=True)
    real = request_module.find_stop

    def find_stop(so_far: str, *args: Any) -> Any:
        found = real(so_far, *args)
        if found is not None:  # the text holds it for a moment: what does another thread find?
            shown.extend(so_far[: state.samples[0].num_shown] for state in request.states)
        return found

    monkeypatch.setattr(request_module, "find_stop", find_stop)
    run_all(engine)
    assert shown
    assert not any(stop in each for each in shown)


def test_a_stream_that_is_dropped_in_the_middle_of_a_step_ends_after_it(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    stream = llm.stream([3, 4], GREEDY)
    next(stream)
    engine: Any = llm._engine  # pyright: ignore[reportPrivateUsage]
    real, running = llm.runner.decode, list[list[str]]()

    def decode(*args: Any) -> Any:
        stream.close()  # type: ignore[attr-defined] (it is a generator; as the garbage collector does)
        running.append([sample.request.request_id for sample in engine._scheduler.running.values()])
        return real(*args)

    monkeypatch.setattr(llm.runner, "decode", decode)
    answer = llm.generate([5], GREEDY)[0].outputs[0]
    assert running[:2] == [["0"], ["1"]]
    monkeypatch.undo()
    assert answer == llm.generate([5], GREEDY)[0].outputs[0]


def test_a_model_that_fails_to_stop_what_runs_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def abort_all(*args: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(llm._engine, "abort_all", abort_all)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(RuntimeError, match="boom"):
        llm.close()
    assert not hasattr(llm, "runner")
    with pytest.raises(InvalidArgumentError, match="LLM: closed"):
        llm.generate([1], GREEDY)


def test_one_thread_at_a_time_steps_and_all_come_to_their_end() -> None:
    turns, steps, inside = Turns(), list[int](), threading.Lock()

    def step() -> None:
        assert inside.acquire(blocking=False), "two steps at once"
        steps.append(len(steps))
        inside.release()

    def wait_for_each(last: int) -> None:
        for wanted in range(1, last + 1):
            turns.until(lambda wanted=wanted: len(steps) >= wanted, step)

    def meanwhile() -> None:
        assert inside.acquire(blocking=False), "a step meanwhile"
        inside.release()

    def be_alone() -> None:
        for _ in range(50):
            turns.alone(meanwhile)

    in_threads(*[lambda last=last: wait_for_each(last) for last in (50, 200, 300)], be_alone, be_alone)
    assert len(steps) == 300


def test_who_wants_the_engine_alone_comes_next() -> None:
    turns, steps, began, done = Turns(), list[int](), threading.Event(), threading.Event()

    def step() -> None:
        steps.append(0)
        began.set()
        if len(steps) == 1:
            in_line(turns, 1)

    def meanwhile() -> None:
        assert len(steps) == 1
        done.set()

    def be_alone() -> None:
        began.wait()
        turns.alone(meanwhile)

    in_threads(lambda: turns.until(done.is_set, step), be_alone)
    assert len(steps) == 1


def test_what_is_posted_in_a_step_is_done_after_it_and_before_the_next() -> None:
    turns, log = Turns(), list[str]()

    def step() -> None:
        log.append("begin")
        turns.post(lambda: log.append("posted"))
        log.append("end")

    turns.until(lambda: log.count("end") == 2, step)
    assert log == ["begin", "end", "posted"] * 2
    turns.post(lambda: log.append("at once"))
    assert log[-1] == "at once"


def test_a_posted_job_that_fails_and_a_step_that_fails_leave_the_turn_to_others() -> None:
    turns = Turns()

    def fail() -> None:
        raise ValueError("boom")

    for call in (lambda: turns.post(fail), lambda: turns.until(lambda: False, fail)):
        with pytest.raises(ValueError, match="boom"):
            call()
    assert turns.alone(lambda: "mine") == "mine"


def test_a_call_from_within_a_step_is_refused() -> None:
    turns = Turns()

    def call() -> None:
        turns.until(lambda: False, call)

    with pytest.raises(OnewaveError, match=r"LLM: called from within one of its own steps\. Call it afterwards"):
        call()


def test_who_is_interrupted_in_the_line_leaves_it() -> None:
    turns, interrupted, began = Turns(), threading.Event(), threading.Event()

    def step() -> None:
        began.set()
        in_line(turns, 1)
        os.kill(os.getpid(), signal.SIGINT)  # to the main thread
        interrupted.wait(60)

    other = threading.Thread(target=lambda: turns.until(interrupted.is_set, step), daemon=True)
    other.start()
    began.wait()
    with pytest.raises(KeyboardInterrupt):
        turns.until(lambda: False, lambda: None)
    assert not turns._line  # pyright: ignore[reportPrivateUsage]
    interrupted.set()
    other.join(60)
    assert not other.is_alive()


def test_whenever_ctrl_c_comes_the_turn_is_given_back() -> None:
    def post_and_step(turns: Turns) -> None:
        steps = list[int]()
        turns.post(lambda: None)
        turns.until(lambda: len(steps) == 2, lambda: turns.post(lambda: steps.append(0)))

    def interrupted(work: Callable[[Turns], object], place: int) -> bool:
        turns = Turns()
        came = is_interrupted(lambda: work(turns), place)
        in_threads(lambda: turns.alone(lambda: None))
        return came

    works: list[Callable[[Turns], object]] = [lambda turns: turns.alone(lambda: None), post_and_step]
    for work in works:
        place = next(place for place in count(1) if not interrupted(work, place))
        assert place > 10


def test_whenever_ctrl_c_comes_those_in_line_come_to_their_end() -> None:
    def first_is_interrupted(place: int) -> bool:
        turns, steps, began, interrupted = Turns(), list[int](), threading.Event(), list[bool]()

        def step() -> None:
            steps.append(0)
            if len(steps) == 1:
                began.set()
                in_line(turns, 3)

        def wait_for(wanted: int) -> None:
            began.wait()
            turns.until(lambda: len(steps) >= wanted, step)

        def be_alone() -> None:
            began.wait()
            turns.alone(lambda: None)

        def be_first() -> None:
            interrupted.append(is_interrupted(lambda: turns.until(lambda: len(steps) >= 2, step), place))
            if not steps:  # the others wait for one
                turns.until(lambda: len(steps) >= 1, step)

        in_threads(be_first, be_alone, lambda: wait_for(1), lambda: wait_for(3))
        return interrupted[0]

    place = next(place for place in count(1) if not first_is_interrupted(place))
    assert place > 20
