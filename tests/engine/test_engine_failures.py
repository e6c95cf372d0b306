"""A failure or an interrupt in the engine's loop ends whom it must, and nobody and nothing else."""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from kit.models.fake_model import PIECES, FakeDetokenizer, FakeRunner, expected_tokens, make_engine, run_all
from onewave.base.errors import CapacityError
from onewave.engine.params import SamplingParams
from onewave.engine.prompt.passes import PromptChunk
from onewave.engine.request import Reader
from onewave.models.batch import StepRows
from onewave.ops.sampling import stream_key

PROMPT = [5, 9, 33]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_what_the_cache_can_never_hold_is_refused_at_once_and_holds_nobody_up(run_ahead: int) -> None:
    engine = make_engine(FakeRunner(run_ahead=run_ahead, num_blocks=5))
    first = engine.add(None, PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
    refused = (([5] * 41, None), ([5] * 21, 20), (PROMPT, 38))
    for prompt, max_tokens in refused:
        with pytest.raises(
            CapacityError, match=r"a KV cache of 40 tokens\. Shorten it, or raise kv_cache_memory_bytes"
        ):
            engine.add(None, prompt, SamplingParams(max_tokens=max_tokens))
    grows = engine.add(None, PROMPT, SamplingParams(max_tokens=None, ignore_eos=True, seed=2))
    run_all(engine)
    assert [len(each.samples[0].token_ids) for each in (first, grows)] == [20, 37]
    for seed, request in ((1, first), (2, grows)):
        alone = expected_tokens(PROMPT, request.params, stream_key(0, seed, 0))
        assert request.samples[0].token_ids == alone[: len(request.samples[0].token_ids)]


def test_samples_that_find_no_memory_in_one_pass_end_their_request_once_and_nothing_else() -> None:
    class Small(FakeRunner):
        def prefill(self, chunks: Sequence[PromptChunk], **asked: Any) -> Tensor:
            if any(chunk.start > 0 for chunk in chunks):  # what samples of a request run beside the first one
                raise CapacityError("prompt", got="does not fit")
            return super().prefill(chunks, **asked)

    engine = make_engine(Small())
    several = engine.add(None, PROMPT * 4, SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=1))
    other = engine.add(None, PROMPT, SamplingParams(max_tokens=9, ignore_eos=True, seed=2))
    run_all(engine)
    assert isinstance(several.failure, CapacityError)
    assert other.failure is None
    assert other.samples[0].token_ids == expected_tokens(PROMPT, other.params, stream_key(0, 2, 0))


class Overflowing(FakeRunner):
    """From some length on, the logits of a sequence that begins with token 5 are no numbers."""

    def __init__(self, bad: float, length: int, **sizes: int) -> None:
        super().__init__(**sizes)
        self.bad, self.length = bad, length

    def spoil(self, sequences: Sequence[tuple[int, ...]], logits: Tensor) -> Tensor:
        for row, tokens in zip(logits, sequences, strict=True):
            if tokens[0] == 5 and len(tokens) >= self.length:
                row[7 if self.bad == math.inf else slice(None)] = self.bad
        return logits

    def prefill(self, chunks: Sequence[PromptChunk], **asked: Any) -> Tensor:
        logits = super().prefill(chunks, **asked)
        return self.spoil([self.sequence(chunk.slot, chunk.end) for chunk in chunks], logits)

    def decode(self, rows: StepRows) -> Tensor:
        logits = super().decode(rows)
        ends = zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        return self.spoil([self.sequence(slot, position + 1) for slot, position in ends], logits)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize(
    ("run_ahead", "params"),
    [
        (0, {"temperature": 0}),
        (1, {"temperature": 0, "logprobs": 2}),
        (1, {"temperature": 0.8, "top_p": 0.9}),
        (0, {"temperature": 0.8, "logit_bias": {3: 1.0}, "repetition_penalty": 1.2, "min_tokens": 9}),
    ],
)
def test_logits_that_are_not_finite_end_their_own_request_with_an_error(
    bad: float, length: int, run_ahead: int, params: dict[str, Any]
) -> None:
    engine = make_engine(Overflowing(bad, length, run_ahead=run_ahead))
    given = SamplingParams(max_tokens=12, ignore_eos=True, seed=4, **params)
    prompts = [[8, 9], PROMPT, [33]]
    requests = [engine.add(None, prompt, given) for prompt in prompts]
    run_all(engine)
    spoilt = requests.pop(1)
    count = length - len(PROMPT)
    assert str(spoilt.failure).startswith(f"request: logits that are not finite, after {count} tokens. The model's act")
    assert spoilt.samples[0].finish_reason == "abort"
    assert len(spoilt.samples[0].token_ids) == count
    for prompt, request in zip([prompts[0], prompts[2]], requests, strict=True):
        assert request.failure is None
        assert request.samples[0].token_ids == expected_tokens(prompt, given, stream_key(0, 4, 0))


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


def test_a_text_that_cannot_be_made_is_its_readers_trouble_and_no_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, made = make_engine(FakeRunner()), list[FakeDetokenizer]()
    monkeypatch.setattr(engine, "_make_detokenizer", lambda ids, skip: made.append(FakeDetokenizer()) or made[-1])
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=3)
    spoilt, other = (engine.add(None, PROMPT, params, Reader(streaming=True)) for _ in range(2))
    made[0].push = lambda ids: 1 / 0
    run_all(engine)
    with pytest.raises(ZeroDivisionError):
        spoilt.output()
    assert other.output().outputs[0].text == "".join(map(PIECES.__getitem__, other.samples[0].token_ids))
