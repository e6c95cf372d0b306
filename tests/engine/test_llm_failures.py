"""Failures in one LLM: those that its callers see of each other's, and the cost of a caller's own for the others."""

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.models.dummy import dummy_llm
from onewave import LLM, CapacityError, SamplingParams, UnsupportedError
from onewave.engine import prompts
from onewave.engine.params import SamplingParams as Params
from onewave.engine.prompt.passes import PromptChunk
from onewave.engine.request import Sample
from onewave.models.batch import Batch, StepRows

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with dummy_llm(tmp_path) as model:
        yield model


def test_a_step_that_fails_is_told_to_everybody_whose_request_it_ended(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    real, inbox = llm.runner.decode, llm._thread._mailbox.inbox

    def decode(rows: StepRows) -> torch.Tensor:
        while rows.num_rows == 1 and inbox.empty():  # until the other request comes
            pass
        if rows.num_rows == 2:
            raise RuntimeError("boom")
        return real(rows)

    monkeypatch.setattr(llm.runner, "decode", decode)
    stream = llm.stream([3, 4], LONG)
    next(stream)
    with pytest.raises(RuntimeError, match=r"^boom$"):
        llm.generate([5], LONG)
    with pytest.raises(RuntimeError, match=r"^boom$") as found:
        list(stream)
    assert 'raise RuntimeError("boom")' in str(found.value.__cause__)
    monkeypatch.undo()
    assert len(llm.generate([3, 4], LONG)[0].outputs[0].token_ids) == 40


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_prompt_that_finds_no_memory_ends_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, error: BaseException
) -> None:
    stream = llm.stream([3, 4], LONG)
    next(stream)
    real = llm.runner.model.forward

    def forward(batch: Any, kv: Any, **kwargs: Any) -> Any:
        if len(batch.token_ids) >= 60:
            raise error
        return real(batch, kv, **kwargs)

    monkeypatch.setattr(llm.runner.model, "forward", forward)
    with pytest.raises(CapacityError, match="a prompt of 60 tokens: does not fit beside the model on cpu") as found:
        llm.generate([[5] * 60, [6]], LONG)
    assert found.value.__cause__ is error
    last = list(stream)[-1].outputs[0]
    assert (last.finish_reason, len(last.token_ids)) == ("length", 40)
    monkeypatch.undo()
    assert llm.generate([3, 4], LONG)[0].outputs[0].token_ids == last.token_ids


def test_a_prompt_that_fails_does_not_wait_for_those_beside_it(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    run = llm.runner.prefill

    def prefill(chunks: Sequence[PromptChunk], **asked: Any) -> torch.Tensor:
        if any(5 in chunk.token_ids for chunk in chunks):
            raise CapacityError("boom")
        return run(chunks, **asked)

    monkeypatch.setattr(llm.runner, "prefill", prefill)
    real, told = llm.runner.decode, threading.Event()
    monkeypatch.setattr(llm.runner, "decode", lambda *args: told.wait(60) and real(*args))
    with pytest.raises(CapacityError, match="boom"):
        llm.generate([[5], [6]], LONG)
    told.set()


def test_another_error_of_a_prompt_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def prefill(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("a bug")

    monkeypatch.setattr(llm.runner, "prefill", prefill)
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        llm.generate([5], LONG)


def test_drawing_from_more_tokens_than_the_sampler_takes_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    monkeypatch.setattr(prompts, "MAX_VOCAB", 63)
    with pytest.raises(UnsupportedError, match=r"temperature 1.0: a vocabulary of 64 tokens; allowed: up to 63"):
        llm.generate([1], Params(temperature=1.0))
    assert len(llm.generate([1], LONG)[0].outputs[0].token_ids) == 40


def test_every_output_of_a_stream_has_its_own_prompt_logprobs(llm: LLM) -> None:
    first, *_, last = llm.stream([3, 4], SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1))
    assert first.prompt_logprobs == last.prompt_logprobs
    assert first.prompt_logprobs is not last.prompt_logprobs


@contextmanager
def failed_step(monkeypatch: pytest.MonkeyPatch, llm: LLM, error: BaseException) -> Iterator[list[Any]]:
    """A prompt whose step fails, without garbage collection; weak references to what the step worked on."""
    real, kept = llm.runner.model.forward, list[Any]()

    def forward(batch: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(batch.token_ids) >= 60:
            activations = torch.empty(1000)
            kept.append(weakref.ref(activations))
            raise type(error)(*error.args)
        return real(batch, *args, **kwargs)

    monkeypatch.setattr(llm.runner.model, "forward", forward)
    gc.disable()
    try:
        with pytest.raises((CapacityError, RuntimeError)) as found:
            llm.generate([[5] * 60], LONG)
        del found
        yield kept
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("boom")])
def test_a_failed_step_does_not_keep_what_it_worked_on(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    with failed_step(monkeypatch, llm, error) as kept:
        assert [ref() for ref in kept] == [None]


def test_a_callers_error_holds_neither_the_model_nor_takes_frames_from_what_is_being_handled(tmp_path: Path) -> None:
    llm = dummy_llm(tmp_path)

    def prefill(*args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            raise MemoryError
        except MemoryError as error:
            raise CapacityError("a prompt") from error

    llm.runner.prefill = prefill
    gc.disable()
    try:
        try:
            _ = 1 // 0
        except ZeroDivisionError as handled:
            with pytest.raises(CapacityError) as found:
                llm.generate([[5, 6]], LONG)
            frames = handled.__traceback__
        assert frames is not None
        assert isinstance(found.value.__cause__, MemoryError)
        model = weakref.ref(llm)
        llm.close()
        del llm, found, frames
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("look", ["not asked again", "closed"])
def test_a_stream_that_does_not_look_keeps_nothing_of_a_step_that_failed(
    look: str, monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    stream = llm.stream([3, 4], LONG)
    next(stream)
    with failed_step(monkeypatch, llm, RuntimeError("boom")) as kept:
        if look == "closed":
            stream.close()
        assert [ref() for ref in kept] == [None]


@pytest.mark.parametrize("all_of_them", [False, True])
def test_whoever_sees_a_request_ended_sees_why(all_of_them: bool, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    engine = llm._engine
    request = engine.add(None, [3, 4], LONG)
    real, seen = Sample.abort, list[object]()

    def abort(sample: Sample) -> None:
        seen.append(sample.request.failure)
        real(sample)

    monkeypatch.setattr(Sample, "abort", abort)
    if all_of_them:
        engine.abort_all(RuntimeError("boom"))
    else:
        engine.abort(request, CapacityError("boom"))
    assert request.finished
    assert seen == [request.failure]
    assert str(request.failure) == "boom"


def test_each_request_has_an_error_of_its_own(llm: LLM) -> None:
    engine = llm._engine
    requests = [engine.add(None, [3, 4], LONG) for _ in range(2)]
    error = CapacityError("memory", got="none", next="Wait.")
    engine.abort_all(error)
    first, second = (request.failure for request in requests)
    assert isinstance(first, CapacityError)
    assert str(first) == str(second) == str(error)
    assert first is not second
    assert error not in (first, second)


def test_an_error_that_does_not_say_what_it_is_ends_every_request(llm: LLM) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("mute")

    engine = llm._engine
    requests = [engine.add(None, [3, 4], LONG) for _ in range(2)]
    engine.abort_all(Mute())
    assert all("Mute" in str(request.failure) for request in requests)


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"presence_penalty": 0.5}, {"temperature": 1, "top_p": 0.5}])
def test_what_is_asked_about_a_prompt_ends_its_own_request_alone_if_it_finds_no_memory(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    stream = llm.stream([3, 4], LONG)
    next(stream)

    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = llm._engine
    monkeypatch.setattr(engine, "_find_logprobs", no_memory)
    monkeypatch.setattr(engine._sampler, "seen", no_memory)
    plan = engine._sampler.plan
    monkeypatch.setattr(
        engine._sampler,
        "plan",
        lambda rows: no_memory if rows[0].params.top_p == 0.5 else plan(rows),
    )
    with pytest.raises(CapacityError, match=r"of 5 tokens: do(es)? not fit beside the model"):
        llm.generate([[5] * 5], SamplingParams(max_tokens=4, **asked))
    last = list(stream)[-1].outputs[0]
    assert (last.finish_reason, len(last.token_ids)) == ("length", 40)


def test_a_request_whose_text_cannot_be_made_leaves_its_slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken:
        def push(self, ids: Sequence[int]) -> str:
            raise MemoryError("text")

        def finish(self) -> str:
            return ""

    with dummy_llm(tmp_path, max_num_seqs=1) as llm:
        engine = llm._engine
        monkeypatch.setattr(engine, "_make_detokenizer", lambda ids, skip: Broken())
        for _ in range(2):
            with pytest.raises(MemoryError, match="text"):
                llm.generate([[3]], LONG)
        monkeypatch.setattr(engine, "_make_detokenizer", None)
        plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        assert len(llm.generate([[3]], plain)[0].outputs[0].token_ids) == 4
