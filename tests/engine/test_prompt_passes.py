"""Prompts of several requests in one pass, long ones in chunks, and one run for all samples of a request."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.models.fake_model import FakeRunner, expected_tokens, make_engine, run_all
from onewave.engine.params import SamplingParams
from onewave.engine.prompt import passes as module
from onewave.engine.prompt.passes import (
    BUCKETS,
    LARGEST_BUCKET,
    MAX_SEQUENCES,
    PromptChunk,
    PromptPasses,
    bucket_of,
    sequences_of,
)
from onewave.engine.request import Request
from onewave.engine.scheduler.sequence import PassLimits
from onewave.models.batch import PromptRows

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def limits(max_tokens: int, *, max_prompts: int = 4, whole: bool = False) -> PassLimits:
    return PassLimits(max_tokens, max_prompts, whole)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 30 + 3 for i in range(length)]


def right(request: Request, max_tokens: int) -> list[int]:
    """A greedy sample's tokens, everything recomputed for each."""
    return expected_tokens(request.prompt_token_ids, SamplingParams(temperature=0, max_tokens=max_tokens), 0)


def test_a_long_prompt_runs_in_chunks_with_decode_steps_between_them() -> None:
    runner = FakeRunner(limits=limits(8))
    engine = make_engine(runner)
    short = engine.add(None, prompt(3), SamplingParams(temperature=0, max_tokens=12))
    engine.step()
    long = engine.add(None, prompt(30, 2), GREEDY)
    run_all(engine)
    # Half of eight tokens, as a row waits.
    assert runner.passes == [[(0, 0, 3)], *([(1, begin, min(30, begin + 4))] for begin in range(0, 30, 4))]
    assert runner.batch_sizes[:4] == [1, 1, 1, 1]
    assert short.samples[0].token_ids == right(short, 12)
    assert long.samples[0].token_ids == right(long, 4)


def test_whole_prompts_are_never_cut_and_share_a_pass_where_they_fit() -> None:
    runner = FakeRunner(limits=limits(8, whole=True))
    engine = make_engine(runner)
    requests = [engine.add(None, prompt(length, length), GREEDY) for length in (5, 3, 2, 20)]
    run_all(engine)
    assert runner.passes == [[(0, 0, 5), (1, 0, 3)], [(2, 0, 2)], [(3, 0, 20)]]
    assert all(r.samples[0].token_ids == right(r, 4) for r in requests)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_sample_whose_leader_is_gone_runs_the_prompt_itself(steps: int) -> None:
    runner = FakeRunner(limits=limits(8), max_num_seqs=2)
    engine = make_engine(runner)
    request = engine.add(None, prompt(20), SamplingParams(n=2, temperature=0, max_tokens=4))
    for _ in range(steps):
        engine.step()
    leader = request.samples[0]
    leader.abort()
    engine._scheduler.remove(leader)
    run_all(engine)
    assert request.samples[1].token_ids == right(request, 4)


@pytest.mark.parametrize("length", [1, 2, 8, 9, 20])
def test_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(length: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    found = []
    for bound in (limits(64), limits(3)):
        runner = FakeRunner(limits=bound)
        engine = make_engine(runner)
        request = engine.add(None, prompt(length), params)
        other = engine.add(None, prompt(4, 9), GREEDY)
        run_all(engine)
        found.append(request.prompt_logprobs)
        assert other.samples[0].token_ids == right(other, 4)
    assert found[0] == found[1]
    assert len(found[0]) == length


def test_a_prompt_that_ends_early_leaves_others_of_its_pass_alone() -> None:
    runner = FakeRunner(limits=limits(8))
    engine = make_engine(runner)
    kept, dropped = (engine.add(None, prompt(length, length), GREEDY) for length in (4, 18))
    engine.step()
    engine.abort(dropped)
    late = engine.add(None, prompt(3, 5), GREEDY)
    run_all(engine)
    assert dropped.samples[0].finish_reason == "abort"
    for request in (kept, late):
        assert request.samples[0].token_ids == right(request, 4)


def test_buckets_pad_a_pass_by_a_quarter_at_most() -> None:
    assert BUCKETS[-1] == LARGEST_BUCKET
    for tokens in range(2, LARGEST_BUCKET + 1):
        assert tokens <= bucket_of(tokens) <= 1.25 * tokens
    assert {64, 128, 256, 512, 1024, 2048} <= set(BUCKETS)
    assert bucket_of(5000) == 5000


@pytest.mark.parametrize("num_tokens", [2, 3, 7, 512])
def test_starts_of_a_pass_are_aligned_as_prebuilt_kernels_take_them(num_tokens: int) -> None:
    """Triton compiles another kernel for addresses that are no multiples of 16: seconds amid requests."""
    sequences = sequences_of(num_tokens)
    assert min(num_tokens, MAX_SEQUENCES) <= sequences <= MAX_SEQUENCES
    words = torch.zeros(PromptRows.num_words(num_tokens, sequences), dtype=torch.int64)
    rows = PromptRows.of_words(words, num_tokens, sequences)
    for part in rows:
        assert part.data_ptr() % 16 == 0
    for value, part in enumerate(rows, 1):
        part.fill_(value)
    assert [part.unique().tolist() for part in rows] == [[value] for value in range(1, 8)]


class _Passes:
    """PromptPasses without a GPU. log: what happened to which host words: waited for, sent; tokens that a pass read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, object]] = []
        zeros, pools = torch.zeros, iter(range(1, 9))
        log = self.log

        class Event:
            def synchronize(self) -> None:
                log.append(("wait", id(self)))

            def record(self) -> None:
                log.append(("sent", id(self)))

        def capture(self: PromptPasses, bucket: Any) -> None:
            bucket.graph, bucket.logits = SimpleNamespace(replay=lambda: forward(bucket.batch, None)), zeros(16, 1)

        def forward(batch: Any, kv: object) -> torch.Tensor:
            log.append(("tokens", batch.token_ids.tolist()))
            return zeros(16, 1)

        monkeypatch.setattr(module.torch, "zeros", lambda *size, pin_memory=False, **more: zeros(*size, **more))
        monkeypatch.setattr(module.torch.cuda, "Event", Event)
        monkeypatch.setattr(module.torch.cuda, "graph_pool_handle", lambda: next(pools))
        monkeypatch.setattr(PromptPasses, "_capture", capture)
        model: Any = SimpleNamespace(device=torch.device("cpu"), forward=forward)
        kv: Any = None
        self.passes = PromptPasses(model, kv, spare_slot=5, use_graphs=True)


def test_words_of_a_pass_are_written_once_those_before_the_last_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _Passes(monkeypatch)
    prompts = [[turn, turn + 1] for turn in range(4)]
    for each in prompts:
        made.passes.run([PromptChunk(0, each)])
    assert [what for what, _ in made.log] == ["wait", "sent", "tokens"] * 4
    assert [found for what, found in made.log if what == "tokens"] == prompts
    waits = [which for what, which in made.log if what == "wait"]
    assert waits[:2] == waits[2:] == [which for what, which in made.log if what == "sent"][:2]
    assert len(set(waits)) == 2


def test_graphs_after_a_clear_have_a_pool_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses to record into one whose graphs are gone."""
    made = _Passes(monkeypatch)
    pool = made.passes._pool
    made.passes.clear()
    assert made.passes._pool != pool


@pytest.mark.parametrize(
    ("chunks", "sequences"),
    [
        ([PromptChunk(0, [7] * 32, 4096)], 1),
        ([PromptChunk(0, [7], 1024)], 1),
        ([PromptChunk(0, [7] * 32, 1023)], MAX_SEQUENCES),
        ([PromptChunk(0, [7] * 65, 4096)], MAX_SEQUENCES),
        ([PromptChunk(0, [7] * 16, 4096), PromptChunk(1, [7] * 16, 4096)], MAX_SEQUENCES),
    ],
)
def test_a_short_chunk_alone_behind_many_tokens_has_a_bucket_of_one_sequence(
    monkeypatch: pytest.MonkeyPatch, chunks: list[PromptChunk], sequences: int
) -> None:
    passes, batches = _Passes(monkeypatch).passes, list[Any]()
    forward = passes._model.forward
    monkeypatch.setattr(passes._model, "forward", lambda batch, kv: batches.append(batch) or forward(batch, kv))
    passes.run([PromptChunk(0, [7] * sum(len(chunk.token_ids) for chunk in chunks))])  # the same size, another bucket
    passes.run(chunks)
    rows = batches[-1].rows
    assert len(rows.sequences) == sequences
    assert len(rows.starts_q) == len(rows.starts_k) == sequences + 1
    assert rows.starts_k[len(chunks)] == sum(chunk.end for chunk in chunks)
    assert len(rows.last) == len(batches[0].rows.last)
