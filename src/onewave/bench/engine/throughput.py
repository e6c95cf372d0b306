"""Tokens a second of many requests that are there from the beginning."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from onewave.base.errors import InvalidArgumentError
from onewave.bench.clock import Summary, summarize
from onewave.bench.engine.latency import Case, prompts_of
from onewave.bench.ledger import Measurement
from onewave.engine.llm import LLM
from onewave.engine.params import SamplingParams


@dataclass(frozen=True)
class Throughput:
    """`case.batch_size` requests of case.prompt tokens, each answered by case.generate. seconds: until all are."""

    case: Case
    max_num_seqs: int
    seconds: Summary

    @property
    def tokens_per_second(self) -> float:
        """Generated."""
        return self.case.batch_size * self.case.generate / self.seconds.p50

    def measurement(self, llm: LLM) -> Measurement:
        """The ledger's line."""
        extra = {
            "requests": self.case.batch_size,
            "prompt_tokens": self.case.prompt,
            "generated_tokens": self.case.generate,
            "max_num_seqs": self.max_num_seqs,
            "tokens_per_second": self.tokens_per_second,
            "dtype": str(llm.dtype).removeprefix("torch."),
            "quantization": llm.quantization,
            "decode_path": llm.decode_path,
        }
        return Measurement(llm.name, "throughput", "s", self.seconds, None, extra)


def measure_throughput(
    llm: LLM, case: Case, *, reps: int, warmup: int, show: Callable[[str], None] = lambda text: None
) -> Throughput:
    """Answer all requests at once, greedily and on after end-of-text, `reps` times; prompts are new each time. Raises
    InvalidArgumentError for a request that does not fit."""
    if case.prompt + case.generate > llm.max_model_len:
        got, allowed = f"{case.prompt + case.generate} tokens", f"up to max_model_len={llm.max_model_len}"
        raise InvalidArgumentError("bench throughput", got=got, allowed=allowed)
    params = SamplingParams(temperature=0.0, max_tokens=case.generate, ignore_eos=True, detokenize=False)
    seconds: list[float] = []
    for repetition in range(warmup + reps):
        show(f"repetition {repetition + 1} of {warmup + reps}")
        prompts = prompts_of(case, llm.config.vocab_size, repetition)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        seconds.append(time.perf_counter() - began)
    return Throughput(case, llm.runner.max_num_seqs, summarize(seconds[warmup:]))
