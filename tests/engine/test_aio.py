"""AsyncLLM: many requests on one loop, and what becomes of them when readers go, steps fail or the engine stops."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kit.models.dummy import dummy_llm
from onewave import LLM, BusyError, InvalidArgumentError, OnewaveError, SamplingParams, StoppingError
from onewave.engine.aio import AsyncLLM, Limits
from onewave.engine.engine import Engine
from onewave.engine.prompts import RawPrompt

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return dummy_llm(tmp_path)


def on_a_loop(llm: LLM, work: Callable[[AsyncLLM], Awaitable[Any]], **limits: Any) -> Any:
    """Run some work with an AsyncLLM of an LLM, and close both."""

    async def run() -> Any:
        front = AsyncLLM(llm, Limits(**limits))
        try:
            return await asyncio.wait_for(work(front), 60)
        finally:
            await front.close()

    return asyncio.run(run())


def samples_in(engine: Engine) -> int:
    return engine.load.num_running + engine.load.num_waiting


def test_deltas_of_many_requests_join_to_what_each_gives_alone(llm: LLM) -> None:
    alone = [output.outputs[0] for output in llm.generate([[i + 1] for i in range(20)], GREEDY)]

    async def one(front: AsyncLLM, i: int) -> tuple[list[int], list[Any], bool]:
        ids, logprobs, output = list[int](), list[Any](), None
        async for output in front.generate([i + 1], GREEDY, delta=True, request_id=f"r{i}"):
            assert output.request_id == f"r{i}"
            ids += output.outputs[0].token_ids
            logprobs += output.outputs[0].logprobs or []
        return ids, logprobs, output.finished

    async def work(front: AsyncLLM) -> list[Any]:
        return await asyncio.gather(*[one(front, i) for i in range(20)])

    for (ids, logprobs, finished), expected in zip(on_a_loop(llm, work), alone, strict=True):
        assert (ids, finished) == (expected.token_ids, True)
        assert [list(entry) for entry in logprobs] == [list(entry) for entry in expected.logprobs or []]


def test_the_loop_is_woken_once_a_step_however_many_requests_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, real = [0], Engine.step

    def step(engine: Engine) -> bool:
        steps[0] += 1
        return real(engine)

    monkeypatch.setattr(Engine, "step", step)

    async def work(front: AsyncLLM) -> int:
        loop, woken = asyncio.get_running_loop(), [0]
        call = loop.call_soon_threadsafe

        def counted(*given: Any, **named: Any) -> Any:
            woken[0] += 1
            return call(*given, **named)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        async def read(i: int) -> None:
            async for _ in front.generate([i + 1], GREEDY):
                pass

        await asyncio.gather(*[read(i) for i in range(8)])
        return woken[0]

    assert 0 < on_a_loop(llm, work) <= steps[0] + 2


@pytest.mark.parametrize("how", ["closed", "cancelled", "cancelled before it began"])
def test_a_reader_that_goes_ends_its_request_after_the_step_under_way(llm: LLM, how: str) -> None:
    async def read(front: AsyncLLM, seen: asyncio.Event) -> None:
        async for _ in front.generate([3], ENDLESS):
            seen.set()

    async def work(front: AsyncLLM) -> int:
        if how == "closed":
            outputs = front.generate([3], ENDLESS)
            await anext(outputs)
            await outputs.aclose()
        else:
            seen = asyncio.Event()
            task = asyncio.create_task(read(front, seen))
            await (seen.wait() if how == "cancelled" else asyncio.sleep(0))
            task.cancel()
            await asyncio.wait([task])
        assert front.num_requests == 0
        return await front.run_between_steps(samples_in)

    assert on_a_loop(llm, work) == 0


def test_a_reader_that_is_slow_finds_every_token_in_fewer_outputs(llm: LLM) -> None:
    async def work(front: AsyncLLM) -> tuple[list[int], int]:
        ids, count = list[int](), 0
        async for output in front.generate([3], GREEDY, delta=True):
            ids += output.outputs[0].token_ids
            count += 1
            if count == 1:
                while await front.run_between_steps(samples_in):
                    pass
        return ids, count

    ids, count = on_a_loop(llm, work)
    assert len(ids) == 20
    assert count <= 3


def test_more_requests_than_are_let_in_are_refused_and_none_are_when_it_stops(llm: LLM) -> None:
    async def work(front: AsyncLLM) -> None:
        running = front.generate([3], GREEDY)
        await anext(running)
        with pytest.raises(BusyError, match="1 wait or run; allowed: 1"):
            await anext(front.generate([4], GREEDY))
        drained = asyncio.gather(front.drain(), front.drain())
        await asyncio.sleep(0)
        with pytest.raises(StoppingError):
            await anext(front.generate([4], GREEDY))
        assert not drained.done()
        assert [output async for output in running][-1].outputs[0].finish_reason == "length"
        await drained

    on_a_loop(llm, work, max_requests=1)


def test_a_step_that_raises_ends_what_has_begun_and_those_that_wait_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = dummy_llm(tmp_path, max_num_seqs=2)
    expected = llm.generate([[9]], GREEDY)[0].outputs[0].token_ids
    left, real, begun = [4], Engine._step, threading.Event()

    def failing(engine: Engine) -> bool:
        assert begun.wait(60)
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("boom")
        return real(engine)

    monkeypatch.setattr(Engine, "_step", failing)

    async def work(front: AsyncLLM) -> list[Any]:
        jobs = [await front.prepare(RawPrompt(None, (i,)), GREEDY) for i in (3, 4, 9, 9)]
        answers = asyncio.gather(*[front.complete(job) for job in jobs], return_exceptions=True)
        while front.num_requests < len(jobs):
            await asyncio.sleep(0)
        begun.set()
        return await answers

    found = on_a_loop(llm, work)
    assert [str(each) for each in found[:2]] == ["boom", "boom"]
    assert [each.outputs[0].token_ids for each in found[2:]] == [expected, expected]


def test_bad_arguments_are_refused_and_a_closed_engine_says_so(llm: LLM) -> None:
    async def work(front: AsyncLLM) -> None:
        for prompt in ([], [99], "text"):
            with pytest.raises(OnewaveError):
                await anext(front.generate(prompt, GREEDY))
        for name, value in (("priority", "high"), ("priority", 2**31), ("cache_salt", 5), ("request_id", 5)):
            with pytest.raises(InvalidArgumentError, match=name):
                await anext(front.generate([3], GREEDY, **{name: value}))
        front.llm.close()
        with pytest.raises(InvalidArgumentError, match="closed"):
            await anext(front.generate([3], GREEDY))
        with pytest.raises(StoppingError):
            await front.run_between_steps(samples_in)

    on_a_loop(llm, work)


def test_requests_of_several_loops_run_together(llm: LLM) -> None:
    alone = llm.generate([[3]], GREEDY)[0].outputs[0].token_ids

    async def one(front: AsyncLLM) -> list[int]:
        return [output async for output in front.generate([3], GREEDY)][-1].outputs[0].token_ids

    async def work(front: AsyncLLM) -> list[list[int]]:
        others = [asyncio.to_thread(asyncio.run, one(front)) for _ in range(2)]
        return await asyncio.gather(one(front), *others)

    assert on_a_loop(llm, work) == [alone] * 3


def test_a_step_that_takes_too_long_is_reported_with_its_requests_and_its_place(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held, real = threading.Event(), Engine.step

    def slow_step_of_this_test(engine: Engine) -> bool:
        held.wait(60)
        return real(engine)

    monkeypatch.setattr(Engine, "step", slow_step_of_this_test)

    async def work(front: AsyncLLM) -> None:
        reading = asyncio.create_task(anext(front.generate([3], GREEDY, request_id="the-slow-one")))
        while "the-slow-one" not in caplog.text:
            await asyncio.sleep(0.01)
        assert front.stalled
        await asyncio.sleep(0.1)  # it is looked at again
        said = [record for record in caplog.records if "a step has taken" in record.getMessage()]
        held.set()
        await reading
        assert len(said) == 1

    with caplog.at_level(logging.WARNING, "onewave"):
        on_a_loop(llm, work, step_seconds=0.02)
    assert "slow_step_of_this_test" in caplog.text
