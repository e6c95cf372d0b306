"""Tokens a second of many requests that are there from the beginning: ours, and transformers' continuous batching."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.bench.clock import Summary, summarize
from onewave.bench.engine.latency import Case, prompts_of
from onewave.bench.engine.transformers_peer import random_transformers
from onewave.bench.ledger import Measurement
from onewave.engine.llm import LLM
from onewave.engine.params import SamplingParams
from onewave.engine.scheduler.load import EngineLoad, HostTime
from onewave.weights.fetch.sources import ModelLocation

_Show = Callable[[str], None]
# transformers takes nearly all memory for its cache: too much of a CPU's, which others use, too.
_CPU_SHARE = 0.1


@dataclass(frozen=True)
class Throughput:
    """`case.batch_size` requests of case.prompt tokens, each answered by case.generate. seconds: until all are.
    together: sequences that run at once; None: as many as the engine likes. host_us: what a decode step took of our
    host."""

    engine: str
    case: Case
    together: int | None
    seconds: Summary
    host_us: HostTime = field(default_factory=HostTime)

    @property
    def tokens_per_second(self) -> float:
        """Generated."""
        return self.case.batch_size * self.case.generate / self.seconds.p50

    def measurement(self, model: str, extra: dict[str, Any]) -> Measurement:
        own = {
            "engine": self.engine,
            "requests": self.case.batch_size,
            "prompt_tokens": self.case.prompt,
            "generated_tokens": self.case.generate,
            "max_num_seqs": self.together,
            "tokens_per_second": self.tokens_per_second,
            **self.host_us.facts,
        }
        return Measurement(model, "throughput", "s", self.seconds, None, own | extra)


def measure_throughput(llm: LLM, case: Case, *, reps: int, warmup: int, show: _Show = lambda text: None) -> Throughput:
    """Answer all requests at once, greedily and on after end-of-text, `reps` times; prompts are new each time. Raises
    InvalidArgumentError for a request that does not fit."""
    if case.prompt + case.generate > llm.max_model_len:
        got, allowed = f"{case.prompt + case.generate} tokens", f"up to max_model_len={llm.max_model_len}"
        raise InvalidArgumentError("bench throughput", got=got, allowed=allowed)
    params = SamplingParams(temperature=0.0, max_tokens=case.generate, ignore_eos=True, detokenize=False)
    loads: list[EngineLoad] = []

    def run(prompts: list[list[int]]) -> None:
        loads.append(llm.load or EngineLoad())
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)

    seconds = _timed(run, case, llm.config.vocab_size, (reps, warmup), lambda text: show(f"onewave, {text}"))
    host_us = (llm.load or EngineLoad()).host_us_since(loads[warmup])
    return Throughput("onewave", case, llm.runner.max_num_seqs, seconds, host_us)


def measure_transformers(
    location: ModelLocation, where: tuple[torch.device, torch.dtype], case: Case, *, reps: int, warmup: int, show: _Show
) -> Throughput:
    """The same with transformers' continuous batching (generate_batch) on random weights of the model's shape,
    which check_transformers lets pass. where: device and dtype."""
    device, dtype = where
    model = random_transformers(location, device, dtype)
    import transformers

    library: Any = transformers
    greedy = library.GenerationConfig(max_new_tokens=case.generate, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = library.ContinuousBatchingConfig(max_memory_percent=_CPU_SHARE if device.type == "cpu" else None)

    def run(prompts: list[list[int]]) -> None:
        options = {"continuous_batching_config": batching, "progress_bar": False, "persistent_manager": True}
        found = model.generate_batch(prompts, generation_config=greedy, **options)
        lengths = [len(output.generated_tokens) for output in found.values()]
        if lengths != [case.generate] * case.batch_size:
            got = f"{len(lengths)} answers of {min(lengths, default=0)} to {max(lengths, default=0)} tokens"
            raise UnsupportedError("transformers", got=got, allowed=f"{case.batch_size} of {case.generate}")

    seconds = _timed(run, case, model.config.vocab_size, (reps, warmup), lambda text: show(f"transformers, {text}"))
    return Throughput(f"transformers {transformers.__version__}", case, None, seconds)


def _timed(
    run: Callable[[list[list[int]]], None], case: Case, vocab_size: int, turns: tuple[int, int], show: _Show
) -> Summary:
    reps, warmup = turns
    seconds: list[float] = []
    for repetition in range(warmup + reps):
        show(f"repetition {repetition + 1} of {warmup + reps}")
        prompts = prompts_of(case, vocab_size, repetition)
        began = time.perf_counter()
        run(prompts)
        seconds.append(time.perf_counter() - began)
    return summarize(seconds[warmup:])
