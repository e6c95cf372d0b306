"""What fails or is interrupted in the engine's loop ends whom it must, and nobody and nothing else."""

from __future__ import annotations

import heapq

import pytest

from kit.models.fake_model import FakeRunner, expected_tokens, make_engine, run_all
from onewave.base.errors import CapacityError
from onewave.engine import engine as engine_module
from onewave.engine.params import SamplingParams
from onewave.ops.sampling import stream_key

PROMPT = [5, 9, 33]


def test_a_row_that_grows_and_finds_no_memory_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_FIRST_ROOM", 8)

    class Small(FakeRunner):
        def reserve(self, num_tokens: int) -> None:
            if num_tokens > 40:
                raise CapacityError("KV cache", got="does not fit")
            super().reserve(num_tokens)

    engine = make_engine(Small(run_ahead=1))
    grows = engine.add(None, PROMPT, SamplingParams(max_tokens=None, ignore_eos=True, seed=1))
    while len(grows.samples[0].token_ids) < 25:
        engine.step()
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=seed) for seed in range(2, 5)]
    others = [engine.add(None, PROMPT, each) for each in params]
    run_all(engine)
    assert grows.samples[0].finish_reason == "abort"
    assert isinstance(grows.failure, CapacityError)
    for other, each in zip(others, params, strict=True):
        assert other.failure is None
        assert other.samples[0].token_ids == expected_tokens(PROMPT, each, stream_key(0, each.seed or 0, 0))


@pytest.mark.parametrize("name", ["heappop", "heappush"])
def test_an_interrupt_amid_the_bookkeeping_loses_neither_slots_nor_requests(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(FakeRunner(max_num_seqs=1))
    requests = [engine.add(None, PROMPT, SamplingParams(max_tokens=2, ignore_eos=True)) for _ in range(2)]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(heapq, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_all(engine)
    assert not engine.has_work
    assert all(request.finished for request in requests)
    params = SamplingParams(seed=9, n=2)
    request = engine.add(None, PROMPT, params)
    run_all(engine)
    for i, sample in enumerate(request.samples):
        assert sample.token_ids == expected_tokens(PROMPT, params, stream_key(0, 9, i))
