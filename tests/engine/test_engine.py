"""The engine's loop against a reference that recomputes everything, on a runner that notices misuse."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.models import fake_model
from kit.models.fake_model import (
    EOS,
    LIMITS,
    PIECES,
    VOCAB,
    FakeRunner,
    expected_tokens,
    hash_logits,
    make_engine,
    run_all,
)
from onewave.base.errors import CapacityError, WaveStalled
from onewave.engine import host_copies
from onewave.engine.engine import Engine
from onewave.engine.params import SamplingParams
from onewave.engine.request import Request
from onewave.models.batch import StepRows
from onewave.ops.sampling import reference, stream_key

PROMPT = [5, 9, 33]

params_strategy = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    max_tokens=st.sampled_from([1, 2, 7, 20, None]),
    min_tokens=st.sampled_from([0, 1]),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.sampled_from([None, {7: 2.0, 11: -3.0}]),
    seed=st.integers(0, 5),
    stop_token_ids=st.sampled_from([None, [20, 30, 40]]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3]),
)
prompt_strategy = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(prompt_strategy, params_strategy), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from([0, 1]),
    st.integers(0, 6),
)
def test_any_mix_of_requests_gives_each_what_it_would_get_alone(
    jobs: list[tuple[list[int], SamplingParams]], num_slots: int, run_ahead: int, late: int
) -> None:
    runner = FakeRunner(max_num_seqs=num_slots, run_ahead=run_ahead)
    engine = make_engine(runner)
    requests: list[Request] = []
    for i, (prompt, params) in enumerate(jobs):
        for _ in range(late if i % 2 else 0):
            if engine.has_work:
                engine.step()
        requests.append(engine.add(None, prompt, params))
    run_all(engine)
    for (prompt, params), request in zip(jobs, requests, strict=True):
        assert params.seed is not None
        for i, sample in enumerate(request.samples):
            expected = expected_tokens(prompt, params, stream_key(0, params.seed, i))
            assert sample.token_ids == expected
            ended = expected[-1] in request.end_ids
            assert sample.finish_reason == ("stop" if ended else "length")
            assert sample.stop_reason == (expected[-1] if expected[-1] in params.stop_ids else None)
            assert sample.text == "".join(PIECES[token] for token in (expected[:-1] if ended else expected))


def generate(params: SamplingParams, prompt: list[int] = PROMPT, *, run_ahead: int = 0, seed: int = 0) -> Request:
    engine = make_engine(FakeRunner(run_ahead=run_ahead), seed)
    request = engine.add(None, prompt, params)
    run_all(engine)
    return request


def test_positions_go_on_where_those_laid_out_ahead_end() -> None:
    runner = FakeRunner(max_model_len=256, run_ahead=1)
    engine = make_engine(runner)
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    prompts = [PROMPT, PROMPT[:1], PROMPT * 2]
    requests = [engine.add(None, prompt, params) for prompt in prompts]
    run_all(engine)  # the runner compares every position with what its cache holds
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.samples[0].token_ids == expected_tokens(prompt, params, 0, max_model_len=256)


def test_a_stop_string_ends_what_runs_ahead() -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    stop = generate(params).samples[0].text[12:15]
    params = replace(params, stop=[stop])
    sample = generate(params, run_ahead=1).samples[0]
    assert sample.token_ids == generate(params).samples[0].token_ids
    assert sample.stop_reason == stop


def test_running_rows_decode_together_and_freed_slots_are_refilled_at_once() -> None:
    runner = FakeRunner(max_num_seqs=2)
    engine = make_engine(runner)
    for length in (9, 3, 3, 3):
        engine.add(None, PROMPT, SamplingParams(max_tokens=length, ignore_eos=True, temperature=0))
    run_all(engine)
    # 8 decode steps of the long one; the three short ones take 2 each, one after the other, in the second slot.
    assert runner.batch_sizes == [2] * 6 + [1, 1]


def test_the_first_token_is_seen_before_the_second_is_computed() -> None:
    engine = make_engine(FakeRunner())
    request = engine.add(None, PROMPT, SamplingParams(ignore_eos=True))
    engine.step()
    assert len(request.samples[0].token_ids) == 1


def test_a_flood_of_short_requests_does_not_hold_up_a_long_one() -> None:
    engine = make_engine(FakeRunner(max_num_seqs=2))
    long = engine.add(None, PROMPT, SamplingParams(ignore_eos=True, max_tokens=20))
    for _ in range(100):
        engine.add(None, PROMPT, SamplingParams(max_tokens=1))
    for _ in range(45):
        engine.step()
    assert long.finished
    assert engine.has_work


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_no_step_is_launched_after_the_last_token_that_max_tokens_allows(run_ahead: int) -> None:
    runner = FakeRunner(run_ahead=run_ahead)
    engine = make_engine(runner)
    engine.add(None, PROMPT, SamplingParams(max_tokens=5, ignore_eos=True, temperature=0))
    run_all(engine)
    assert runner.batch_sizes == [1] * 4


def test_requests_without_a_seed_differ_from_each_other_and_repeat_from_run_to_run() -> None:
    def two(seed: int) -> list[list[int]]:
        engine = make_engine(FakeRunner(), seed)
        requests = [engine.add(None, PROMPT, SamplingParams(ignore_eos=True)) for _ in range(2)]
        run_all(engine)
        return [request.samples[0].token_ids for request in requests]

    first, second = two(1)
    assert first != second
    assert two(1) == [first, second]
    assert two(2) != [first, second]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_logprobs_are_those_of_the_raw_logits(run_ahead: int) -> None:
    params = SamplingParams(
        logprobs=3, temperature=0.3, repetition_penalty=2.0, logit_bias={4: 5.0}, seed=1, ignore_eos=True
    )
    request = generate(params, run_ahead=run_ahead)
    output = request.output().outputs[0]
    total = 0.0
    for i, (token, entries) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        expected = reference.logprobs(hash_logits(PROMPT + output.token_ids[:i]).astype(np.float64))
        order = np.argsort(-expected).tolist()
        assert next(iter(entries)) == token
        assert set(entries) == {token, *order[:3]}
        for entry_id, entry in entries.items():
            assert entry.logprob == pytest.approx(expected[entry_id], rel=1e-4, abs=1e-5)
            assert entry.rank == order.index(entry_id) + 1
            assert entry.decoded_token == PIECES[entry_id]
        total += expected[token]
    assert output.cumulative_logprob == pytest.approx(total, rel=1e-4)


def test_a_neighbours_logprobs_do_not_leak_and_minus_one_means_the_vocabulary() -> None:
    engine = make_engine(FakeRunner())
    wanted = [None, 0, 2, -1]
    requests = [engine.add(None, PROMPT, SamplingParams(logprobs=count, seed=1)) for count in wanted]
    run_all(engine)
    assert requests[0].output().outputs[0].logprobs is None
    assert requests[0].output().outputs[0].cumulative_logprob is None
    for request, low, high in zip(requests[1:], (1, 2, VOCAB), (1, 3, VOCAB), strict=True):
        logprobs = request.output().outputs[0].logprobs
        assert all(low <= len(entries) <= high for entries in logprobs)


def test_logprobs_that_tie_are_the_same_beside_a_neighbour_that_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_model, "hash_logits", lambda sequence: np.round(hash_logits(sequence)))
    asked = SamplingParams(logprobs=3, seed=1, max_tokens=12, ignore_eos=True)
    found: list[Any] = []
    for others in ([], [replace(asked, logprobs=40)]):
        engine = make_engine(FakeRunner())
        request, *_ = [engine.add(None, PROMPT, params) for params in (asked, *others)]
        run_all(engine)
        found.append(request.output().outputs[0])
    alone, beside = found
    for i, (mine, same) in enumerate(zip(alone.logprobs, beside.logprobs, strict=True)):
        assert list(mine.items()) == list(same.items())
        logits = np.round(hash_logits(PROMPT + alone.token_ids[:i]))
        most_likely = np.argsort(-logits, kind="stable")[:3].tolist()
        assert list(mine) == [alone.token_ids[i], *[other for other in most_likely if other != alone.token_ids[i]]]
        assert all(entry.rank == (logits > logits[other]).sum() + 1 for other, entry in mine.items())


def test_prompt_logprobs_equal_the_reference_and_change_no_token() -> None:
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 50)]
    with_logprobs = generate(SamplingParams(prompt_logprobs=2, seed=5, n=2), prompt)
    without = generate(SamplingParams(seed=5, n=2), prompt)
    assert [s.token_ids for s in with_logprobs.samples] == [s.token_ids for s in without.samples]
    engine = make_engine(FakeRunner())
    twice = [engine.add(None, prompt, SamplingParams(prompt_logprobs=2, max_tokens=1)) for _ in range(2)]
    run_all(engine)
    assert [each.prompt_logprobs for each in twice] == [with_logprobs.prompt_logprobs] * 2
    found = with_logprobs.prompt_logprobs
    assert len(found) == 50
    assert found[0] is None
    for i, entries in enumerate(found[1:], 1):
        expected = reference.logprobs(hash_logits(prompt[:i]).astype(np.float64))
        assert set(entries) == {prompt[i], *np.argsort(-expected)[:2].tolist()}
        assert entries[prompt[i]].logprob == pytest.approx(expected[prompt[i]], rel=1e-4, abs=1e-5)


def test_log_probabilities_that_no_memory_holds_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of a vocabulary of 49,152 took 15 MB a prompt token, until the system ended the process."""
    monkeypatch.setattr(host_copies, "_MIN_CHECKED_ENTRIES", 0)
    room = 100 * 250 * VOCAB
    monkeypatch.setattr(host_copies, "available_bytes", lambda: room)
    engine = make_engine(FakeRunner(max_model_len=256))
    everything = SamplingParams(prompt_logprobs=-1, max_tokens=1)
    with pytest.raises(CapacityError, match=r"6161 log-probabilities: 0\.0 GiB on a host with 0\.0 GiB.*Ask for fewer"):
        engine.add(None, PROMPT[:1] * 102, everything)
    assert not engine.has_work
    fits = engine.add(None, PROMPT[:1] * 101, everything)
    few = engine.add(None, PROMPT[:1] * 102, SamplingParams(prompt_logprobs=59, max_tokens=1))
    run_all(engine)
    assert fits.failure is None
    assert few.failure is None
    # Room that is gone by then ends the one that needs it.
    late, grows, other = (
        engine.add(None, PROMPT, SamplingParams(max_tokens=9, ignore_eos=True, **asked))
        for asked in ({"prompt_logprobs": -1}, {"logprobs": -1}, {})
    )
    room = 0
    run_all(engine)
    assert isinstance(late.failure, CapacityError)
    assert isinstance(grows.failure, CapacityError)
    assert other.failure is None


def test_eos_and_stop_tokens_wait_for_min_tokens() -> None:
    likely = {EOS: 100.0, 30: 90.0}
    params = SamplingParams(temperature=0, min_tokens=4, max_tokens=10, stop_token_ids=[30], logit_bias=likely)
    sample = generate(params).samples[0]
    assert len(sample.token_ids) == 5
    assert sample.token_ids[-1] == EOS
    assert sample.stop_reason is None
    params = SamplingParams(temperature=0, min_tokens=4, stop_token_ids=[30], logit_bias={30: 90.0})
    sample = generate(params).samples[0]
    assert sample.token_ids.index(30) == 4
    assert sample.stop_reason == 30


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_banned_end_does_not_end_the_row_that_is_fed_it(least: int, run_ahead: int) -> None:
    params = SamplingParams(temperature=0, min_tokens=least, max_tokens=10, stop_token_ids=list(range(VOCAB)))
    tokens = generate(params, run_ahead=run_ahead).samples[0].token_ids
    assert tokens == generate(params).samples[0].token_ids
    assert len(tokens) == least + 1


def test_the_text_of_the_ending_token_is_left_out_unless_asked_for() -> None:
    biased = {"temperature": 0, "logit_bias": {30: 100.0}, "stop_token_ids": [30]}
    assert generate(SamplingParams.from_dict(biased)).samples[0].text == ""
    kept = generate(SamplingParams.from_dict({**biased, "include_stop_str_in_output": True}))
    assert kept.samples[0].text == PIECES[30]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_aborting_frees_slots_and_leaves_the_others_alone(run_ahead: int) -> None:
    runner = FakeRunner(max_num_seqs=2, run_ahead=run_ahead)
    engine = make_engine(runner)
    params = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in range(4)]
    requests = [engine.add(None, PROMPT, each) for each in params]
    for _ in range(3):
        engine.step()
    engine.abort(requests[0])  # running
    engine.abort(requests[3])  # waiting
    run_all(engine)
    assert [request.samples[0].finish_reason for request in requests] == ["abort", "length", "length", "abort"]
    for seed in (1, 2):
        assert requests[seed].samples[0].token_ids == expected_tokens(PROMPT, params[seed], stream_key(0, seed, 0))
    engine.abort(requests[1])
    assert requests[1].samples[0].finish_reason == "length"


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("failure", [RuntimeError("out of luck"), KeyboardInterrupt()])
def test_a_failing_step_ends_what_has_begun_an_interrupt_all_and_the_engine_goes_on(
    run_ahead: int, failure: BaseException
) -> None:
    runner = FakeRunner(max_num_seqs=2, run_ahead=run_ahead)
    engine = make_engine(runner)
    requests = [engine.add(None, PROMPT, SamplingParams(ignore_eos=True)) for _ in range(5)]
    engine.step()
    engine.step()
    runner.fail_at_decode = failure
    with pytest.raises(type(failure)):
        engine.step()
    waiting = [] if isinstance(failure, KeyboardInterrupt) else requests[2:]
    assert engine.has_work == bool(waiting)
    assert all((request.samples[0].finish_reason is None) == (request in waiting) for request in requests)
    params = SamplingParams(seed=9, n=3)
    request = engine.add(None, PROMPT, params)
    run_all(engine)
    assert all(each.samples[0].finish_reason == "length" for each in waiting)
    for i, sample in enumerate(request.samples):
        assert sample.token_ids == expected_tokens(PROMPT, params, stream_key(0, 9, i))


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_what_a_stalled_launch_gave_reaches_nobody(run_ahead: int) -> None:
    runner = FakeRunner(run_ahead=run_ahead)
    engine = make_engine(runner)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    request = engine.add(None, PROMPT, params)
    runner.stalls_at = 2  # with the very last token, after which nothing is launched that would find out
    with pytest.raises(WaveStalled):
        run_all(engine)
    assert not engine.has_work
    assert request.samples[0].finish_reason == "abort"
    assert len(request.samples[0].token_ids) <= 2
    again = engine.add(None, PROMPT, params)
    run_all(engine)
    assert again.samples[0].token_ids == expected_tokens(PROMPT, params, stream_key(0, 0, 0))


def test_metrics_count_tokens_and_seconds() -> None:
    request = generate(SamplingParams(max_tokens=5, n=2, ignore_eos=True))
    metrics = request.output().metrics
    assert metrics.num_generation_tokens == 10
    assert metrics.num_prompt_tokens == 3
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert abs(metrics.arrival_time - time.time()) < 60
    assert metrics.time_to_first_token == pytest.approx(metrics.first_token_time - metrics.arrival_time, abs=1e-5)
    elapsed = metrics.finished_time - metrics.first_token_time
    assert metrics.tokens_per_second == pytest.approx(8 / elapsed, rel=0.2)


class InstantRunner:
    """Gives the same logits every time, so that what a step takes is the engine's own work."""

    def __init__(self, vocab_size: int) -> None:
        self.device = torch.device("cpu")
        self.vocab_size, self.max_model_len, self.max_num_seqs, self.run_ahead = vocab_size, 100_000, 4, 0
        self.logits = torch.zeros(1, vocab_size)
        self.limits, self.num_blocks, self.block_size = LIMITS, 400, 1000

    def check(self) -> None:
        pass

    def prefill(self, chunks: object, *, each: object = None) -> torch.Tensor:
        return self.logits

    def copy_blocks(self, pairs: object) -> None:
        pass

    def set_blocks(self, entries: object) -> None:
        pass

    def decode(self, rows: StepRows) -> torch.Tensor:
        return self.logits


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_steps_rows_lie_as_kernels_are_compiled_for(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, logits, apart = InstantRunner(64), torch.zeros(4, 64), list[int]()

    def decode(rows: StepRows) -> torch.Tensor:
        assert all(part.shape == (count,) and part.is_contiguous() for part in rows)
        apart.extend(part.data_ptr() % 16 for part in (rows.slots, rows.positions))
        return logits[:count]

    monkeypatch.setattr(runner, "prefill", lambda chunks, each=None: logits[: len(chunks)])
    monkeypatch.setattr(runner, "decode", decode)
    engine = Engine(runner)
    for _ in range(count):
        engine.add(None, PROMPT, SamplingParams(max_tokens=70, temperature=0))
    while engine.has_work:
        engine.step()
    assert apart == [0] * (69 * 2)


@pytest.mark.slow
def test_a_greedy_step_costs_the_host_little() -> None:
    engine = Engine(InstantRunner(49152))
    engine.add(None, PROMPT, SamplingParams(max_tokens=2000, temperature=0))
    for _ in range(200):
        engine.step()
    times: list[float] = []
    for _ in range(1000):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    # 60 us on a quiet machine; the bound leaves room for a busy one.
    assert sorted(times)[len(times) // 2] < 300e-6
