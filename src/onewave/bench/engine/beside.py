"""The longest time between two tokens of a stream while a prompt arrives beside it, and the same without one."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Thread

from onewave.bench.clock import Summary, summarize
from onewave.bench.engine.latency import Case, facts_of, prompts_of
from onewave.bench.ledger import Measurement
from onewave.engine.llm import LLM
from onewave.engine.params import SamplingParams

STREAM_PROMPT = 64
"""Tokens of the stream's own prompt."""
_BEFORE = 16
"""Tokens that the stream has when the prompt arrives: its steps are steady by then."""


@dataclass(frozen=True)
class GapResult:
    """A prompt of so many tokens beside a stream. gap: longest between two of the stream's tokens from the prompt's
    arrival to the one after its answer, seconds. first: to that answer, its first token. alone: the longest gap of as
    many tokens without a prompt. same_tokens: whether the stream gave the same tokens as alone, in all repetitions."""

    tokens: int
    gap: Summary
    first: Summary
    alone: Summary
    same_tokens: bool

    def measurement(self, llm: LLM) -> Measurement:
        extra = {
            "prompt_tokens": self.tokens,
            "first_token_ms": self.first.p50 * 1e3,
            "gap_alone_ms": self.alone.p50 * 1e3,
            "same_tokens": self.same_tokens,
            "max_num_batched_tokens": llm.runner.limits.max_tokens,
            **facts_of(llm),
        }
        return Measurement(llm.name, "gap_beside_prompt", "ms", self.gap.scaled(1e3), None, extra)


def stream_tokens(longest: int) -> int:
    """Tokens of the stream: more than chunks of such a prompt, so that it goes on beside the last one."""
    return 2 * _BEFORE + longest // 256


def measure_gaps(
    llm: LLM, lengths: Sequence[int], *, reps: int, warmup: int, show: Callable[[str], None] = lambda text: None
) -> Iterator[GapResult]:
    """Time a stream's gaps beside prompts of each length. llm: of at least two sequences, without prefix caching."""
    for tokens in lengths:
        samples: list[tuple[float, float, float]] = []
        same = True
        count = stream_tokens(tokens)
        for repetition in range(warmup + reps):
            show(f"a stream beside {tokens} tokens: {repetition + 1} of {warmup + reps}")
            own, beside = (
                prompts_of(Case(1, length, 1, ""), llm.config.vocab_size, repetition)[0]
                for length in (STREAM_PROMPT, tokens)
            )
            expected, times = _stream(llm, own, count)
            alone = max(later - earlier for earlier, later in pairwise(times[_BEFORE - 1 :]))
            span: list[float] = []

            def answer(beside: list[int] = beside, span: list[float] = span) -> None:
                span.append(time.perf_counter())
                llm.generate(beside, _params(1))
                span.append(time.perf_counter())

            arriving = Thread(target=answer)
            found, times = _stream(llm, own, count, arriving)
            arriving.join()
            arrived, answered = span
            gaps = [b - a for a, b in pairwise(times) if b > arrived and a < answered]
            same &= found == expected
            if repetition >= warmup:
                samples.append((max(gaps), answered - arrived, alone))
        gap, first, alone_gap = (summarize(list(column)) for column in zip(*samples, strict=True))
        yield GapResult(tokens, gap, first, alone_gap, same)


def _params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)


def _stream(llm: LLM, prompt: list[int], count: int, beside: Thread | None = None) -> tuple[list[int], list[float]]:
    """The tokens of a stream, and when each came. beside: begins after the first _BEFORE tokens."""
    times: list[float] = []
    tokens: list[int] = []
    for output in llm.stream(prompt, _params(count)):
        new = len(output.outputs[0].token_ids) - len(tokens)
        times += [time.perf_counter()] * new
        tokens = list(output.outputs[0].token_ids)
        if beside is not None and len(tokens) >= _BEFORE and beside.ident is None:
            beside.start()
    return tokens, times
