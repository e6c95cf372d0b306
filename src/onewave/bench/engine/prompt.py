"""The time to the first token, and the same with PyTorch's attention in the place of the engine's own, in turns.

The GPU's time and the host's are those of the passes alone, between events on the stream and around the calls that
launch them. With PyTorch's attention prompts run one by one and without graphs; weights, products and cache are the
same. Beside it stands what the attention of all layers takes by itself, so that a difference can be held against it.
"""

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onewave.base.errors import UnsupportedError
from onewave.bench.clock import Summary, recorded, summarize, time_in_rounds
from onewave.bench.engine.latency import Case, facts_of, prompts_of, seconds_and_tokens
from onewave.bench.ledger import Measurement
from onewave.engine.llm import LLM
from onewave.engine.params import SamplingParams
from onewave.ops.attention import attention

ATTENTIONS: Mapping[str, SDPBackend | None] = {
    "onewave": None, "torch cuDNN": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION,
}  # fmt: skip
"""Ours, and kernels that PyTorch's scaled_dot_product_attention is held to."""


@dataclass(frozen=True)
class PromptResult:
    """`batch` prompts of so many tokens at once. attention: one of ATTENTIONS, or a peer. seconds: to the first token
    of all. gpu, host: of the passes, median seconds. alone: the attention of all layers by itself, of one prompt of
    random numbers, median seconds; None for a peer."""

    attention: str
    batch: int
    tokens: int
    seconds: Summary
    gpu: float
    host: float
    alone: float | None

    def measurement(self, llm: LLM) -> Measurement:
        extra = {
            "attention": self.attention,
            "batch": self.batch,
            "prompt_tokens": self.tokens,
            "gpu_ms": self.gpu * 1e3,
            "host_ms": self.host * 1e3,
            "attention_ms": None if self.alone is None else self.alone * 1e3,
            **facts_of(llm),
        }
        return Measurement(llm.name, "prompt", "ms", self.seconds.scaled(1e3), None, extra)


def measure_prompts(
    llm: LLM,
    sizes: Sequence[tuple[int, int]],
    *,
    reps: int,
    warmup: int,
    show: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[PromptResult]:
    """Time prompts of each (batch, tokens) `reps` times with each attention, in an order drawn anew for each round.

    show: is told what runs; note: why what can't be tried is left out. Raises UnsupportedError without a CUDA GPU.
    """
    if llm.device.type != "cuda":
        raise UnsupportedError("bench prompt", got=str(llm.device), allowed="a CUDA GPU")
    draw = random.Random(0)
    for batch, tokens in sizes:
        show(f"{batch} x {tokens} tokens, attention by itself")
        alone, missing = _alone(llm, tokens, rounds=reps)
        if tokens > llm.runner.limits.max_tokens:
            missing.append(
                f"attention of PyTorch left out: it has no mask for chunks of {llm.runner.limits.max_tokens}"
            )
            alone = {name: seconds for name, seconds in alone.items() if ATTENTIONS[name] is None}
        for why in missing:
            note(f"{tokens} tokens, {why}")
        case = Case(batch, tokens, 1, f"pp{tokens}")
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in alone}
        for repetition in range(warmup + reps):
            # Engines take turns, so that the stage is the size.
            show(f"{batch} x {tokens} tokens: {repetition + 1} of {warmup + reps}")
            prompts = prompts_of(case, llm.config.vocab_size, repetition)
            for name in draw.sample(list(alone), len(alone)):
                with _in_its_place(llm, name), _timed_passes(llm) as passes:
                    seconds, _ = seconds_and_tokens(case, llm.generate(prompts, params))
                if repetition >= warmup:
                    samples[name].append((seconds, *passes.seconds()))
        for name, each in samples.items():
            seconds, gpu, host = (list(column) for column in zip(*each, strict=True))
            medians = statistics.median(gpu), statistics.median(host)
            yield PromptResult(name, batch, tokens, summarize(seconds), *medians, alone[name])


class _Passes:
    """Events around each pass, and the host's seconds in the calls that launch them."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self._run = run
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host = 0.0

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        begin.record()
        out = self._run(*args, **named)
        end.record()
        self._host += time.perf_counter() - started
        self._events.append((begin, end))
        return out

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of the GPU and of the host."""
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._events) * 1e-3, self._host


@contextmanager
def _timed_passes(llm: LLM) -> Generator[_Passes]:
    """Meanwhile each pass of prompts is timed."""
    passes = _Passes(llm.runner.prefill)
    llm.runner.prefill = passes  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        del llm.runner.prefill


@contextmanager
def _in_its_place(llm: LLM, name: str) -> Generator[None]:
    """Meanwhile the engine's prompts have that attention."""
    model = llm.runner.model
    before, model.prefill_backend = model.prefill_backend, _backend(name)
    try:
        with _held_to(name):
            yield
    finally:
        model.prefill_backend = before


def _backend(name: str) -> str:
    return "auto" if ATTENTIONS[name] is None else "torch"


def _held_to(name: str) -> AbstractContextManager[object]:
    # PyTorch fails then where it would have made way for another kernel.
    kernel = ATTENTIONS[name]
    return nullcontext() if kernel is None else sdpa_kernel(kernel)  # pyright: ignore[reportUnknownVariableType]


def _alone(llm: LLM, tokens: int, *, rounds: int) -> tuple[dict[str, float], list[str]]:
    """Seconds of all layers' attention by itself, by name, and what is said of those that fail."""
    config, device = llm.config, llm.device
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (torch.randn(1, n, tokens, config.head_dim, device=device, dtype=llm.dtype) for n in heads)
    total: dict[str, float] = {}
    notes: dict[str, str] = {}
    for window, layers in Counter(config.layer_windows).items():

        def call(name: str, window: int | None = window) -> None:
            with _held_to(name):
                attention(q, k, v, causal=True, window=window, backend=_backend(name))

        runs: dict[str, tuple[Callable[[], object], int]] = {}
        for name in ATTENTIONS:
            try:
                runs[name] = (recorded([lambda name=name: call(name)], device), 1)
            except RuntimeError as error:
                notes[name] = f"{name}: {' '.join(str(error).split())[:160]}"
        for name, summary in time_in_rounds(runs, device, rounds=rounds).items():
            total[name] = total.get(name, 0.0) + layers * summary.p50
    return {name: seconds for name, seconds in total.items() if name not in notes}, list(notes.values())
