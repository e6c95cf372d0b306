"""The engine on KV blocks: prefix hits, copies and preemptions change no token; salts and switches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.models.fake_model import VOCAB, FakeRunner, expected_tokens, make_engine, run_all
from kit.serving.blocks import check_pool
from onewave.engine.params import SamplingParams
from onewave.engine.request import Request
from onewave.engine.scheduler.sequence import PassLimits
from onewave.memory.block_pool import PrefixCaching
from onewave.ops.sampling import stream_key

PROMPT = [5, 9, 33]

params_strategy = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    max_tokens=st.sampled_from([1, 7, 20]),
    min_tokens=st.sampled_from([0, 1]),
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    seed=st.integers(0, 5),
    stop_token_ids=st.sampled_from([None, [20, 30, 40]]),
    logprobs=st.sampled_from([None, 3]),
)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 24), st.sampled_from([0, 1]), params_strategy, st.integers(0, 2)),
        min_size=2, max_size=7,
    ),
    st.sampled_from([0, 1]),
    st.integers(0, 6),
)  # fmt: skip
def test_a_tiny_cache_with_prefix_hits_and_preemptions_changes_no_token(
    jobs: list[tuple[int, int, SamplingParams, int]], run_ahead: int, late: int
) -> None:
    runner = FakeRunner(run_ahead=run_ahead, num_blocks=11, block_size=4, limits=PassLimits(10, 3))
    engine = make_engine(runner)
    requests: list[Request] = []
    for i, (length, family, params, priority) in enumerate(jobs):
        for _ in range(late if i % 2 else 0):
            if engine.has_work:
                engine.step()
        prompt = [(token * 7 + family) % VOCAB for token in range(length)]
        requests.append(engine.add(None, prompt, params, priority=priority))
    run_all(engine)
    check_pool(engine._scheduler.pool)
    for request in requests:
        for i, sample in enumerate(request.samples):
            key = stream_key(0, request.params.seed or 0, i)
            assert sample.token_ids == expected_tokens(request.prompt_token_ids, request.params, key)
            if request.params.logprobs is not None:
                assert len(sample.logprobs or ()) == len(sample.token_ids)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_preempted_row_goes_on_with_the_same_tokens_penalties_and_logprobs(run_ahead: int) -> None:
    params = SamplingParams(
        max_tokens=24, ignore_eos=True, temperature=0.9, repetition_penalty=1.5, frequency_penalty=0.5, logprobs=2
    )
    runner = FakeRunner(run_ahead=run_ahead, num_blocks=9, block_size=4)
    engine = make_engine(runner)
    requests = [engine.add(None, [*PROMPT, i], replace(params, seed=i)) for i in range(3)]
    run_all(engine)
    again = [chunks for chunks in runner.passes[1:] if chunks]
    assert len(again) >= 2, "nothing was preempted"
    for seed, request in enumerate(requests):
        assert request.samples[0].token_ids == expected_tokens(
            request.prompt_token_ids, request.params, stream_key(0, seed, 0)
        )
        assert len(request.samples[0].logprobs or ()) == 24


def test_outputs_say_how_much_of_a_prompt_was_cached_and_a_salt_keeps_caches_apart() -> None:
    engine = make_engine(FakeRunner())
    prompt = [5] * 20
    found: list[int | None] = []
    for salt, asked in ((None, {}), (None, {}), ("a", {}), ("a", {"n": 2}), (None, {"prompt_logprobs": 1})):
        request = engine.add(None, prompt, SamplingParams(max_tokens=1, **asked), cache_salt=salt)
        assert request.output().num_cached_tokens is None
        run_all(engine)
        found.append(request.output().num_cached_tokens)
    assert found == [0, 16, 0, 16, 0]


def test_without_prefix_caching_prompts_run_whole() -> None:
    events: list[object] = []
    for enabled in (False, True):
        runner = FakeRunner()
        engine = make_engine(runner, prefixes=PrefixCaching(enabled, listener=events.append))
        for _ in range(2):
            engine.add(None, [5] * 20, SamplingParams(max_tokens=1))
            run_all(engine)
        assert [each[0][1] for each in runner.passes] == [0, 16 if enabled else 0]
        assert len(events) == (2 if enabled else 0)


class _Thirds:
    """A form in which token n leaves n % 3 when divided by 3; it notices a token that comes twice or not at all."""

    num_words, ended, failure = -(-VOCAB // 32), False, None

    def __init__(self) -> None:
        self.count = 0

    def begin(self, **_: Any) -> "_Thirds":
        return _Thirds()

    def fill(self, words: np.ndarray) -> None:
        words[:] = 0
        for token in range(self.count % 3, VOCAB, 3):
            words[token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))

    def accept(self, token_id: int) -> None:
        assert token_id % 3 == self.count % 3
        self.count += 1


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_preempted_row_goes_on_in_its_form(run_ahead: int) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, frequency_penalty=0.5)
    found: list[list[list[int]]] = []
    for num_blocks in (9, 100):
        runner = FakeRunner(run_ahead=run_ahead, num_blocks=num_blocks, block_size=4)
        engine = make_engine(runner)
        form: Any = _Thirds()
        requests = [
            engine.add(None, [*PROMPT, i], replace(params, seed=i), grammar=form if i < 2 else None) for i in range(3)
        ]
        run_all(engine)
        assert engine.load.num_preempted == 0 if num_blocks == 100 else engine.load.num_preempted > 0
        assert all(request.failure is None for request in requests)
        found.append([request.samples[0].token_ids for request in requests])
    assert found[0] == found[1]
