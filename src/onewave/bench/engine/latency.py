"""Speed of the engine as its users meet it: LLM.generate on token-id prompts, timed by the metrics it returns.

Tests are named as llama-bench names them. pp512: the time to the first token of a 512-token prompt, as tokens a second.
tg128: 128 tokens generated after a prompt of one token; tg128@d4096 after one of 4096. A batch's prompts are prefilled
one after another and decoded together, so pp ends with the last prompt's first token and tg begins there.

Bytes read by a decode step: every weight that a step multiplies by, once, and the keys and values that its attention
looks at, averaged over the steps. Weights are counted as they lie in memory, packed or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary, summarize
from onewave.bench.ledger import Measurement
from onewave.engine.llm import LLM
from onewave.engine.params import SamplingParams
from onewave.wave.weights.pack import StreamMatrix

if TYPE_CHECKING:
    from onewave.engine.output import RequestOutput
    from onewave.models.config.model_config import ModelConfig
    from onewave.models.llama import LlamaWeights
    from onewave.wave.weights.pack import WeightStream

_PROMPT_SEED = 0


@dataclass(frozen=True)
class Case:
    """One test. prompt: tokens of each prompt. generate: tokens generated after it; 1 makes it a prefill test."""

    batch_size: int
    prompt: int
    generate: int
    name: str

    @property
    def is_prefill(self) -> bool:
        return self.generate == 1


@dataclass(frozen=True)
class Result:
    """One test's samples.

    tokens_per_second: all sequences together. step_ms: milliseconds a decode step, or all prefills. step_bytes: read by
    a decode step; None for a prefill. ceiling: the device's read bandwidth in the same run. decode_path: how the engine
    decoded (wave, graph or eager), which also says where a prefill's weights lie. compact: whether that was with
    compact weights.
    """

    case: Case
    tokens_per_second: Summary
    step_ms: Summary
    step_bytes: float | None
    ceiling: Ceiling | None
    decode_path: str = "eager"
    compact: bool = False

    @property
    def gigabytes_per_second(self) -> float | None:
        """10^9 bytes read a second of decoding, at the median step."""
        return None if self.step_bytes is None else self.step_bytes * 1e-9 / (self.step_ms.p50 * 1e-3)

    @property
    def ceiling_share(self) -> float | None:
        """That over the read ceiling."""
        rate = self.gigabytes_per_second
        return None if rate is None or self.ceiling is None else rate / self.ceiling.value


def cases(
    batch_sizes: Sequence[int], input_lens: Sequence[int], output_lens: Sequence[int], depths: Sequence[int]
) -> list[Case]:
    """All tests of the lists' values: pp for each input length, tg for each output length and depth; 0 leaves one out.

    Raises InvalidArgumentError.
    """
    if 1 in output_lens:
        raise InvalidArgumentError("--output-len", got="1", allowed="0, or from 2: the first token is prefill's")
    found: list[Case] = []
    for batch in batch_sizes:
        found += [Case(batch, length, 1, f"pp{length}") for length in input_lens if length]
        found += [
            Case(batch, max(depth, 1), length, f"tg{length}" + (f"@d{depth}" if depth else ""))
            for depth in depths
            for length in output_lens
            if length
        ]
    if not found:
        raise InvalidArgumentError("nothing to measure", next="Give an --input-len or an --output-len above 0.")
    return found


def expected_seconds(llm: LLM, tests: Sequence[Case], *, repetitions: int) -> float:
    """At most about how long so many repetitions of every test will take, from a short request."""
    _check_lengths(llm, tests)
    generate = min(3, max(case.generate for case in tests))
    prompt = max(1, min(16, max(case.prompt for case in tests), llm.max_model_len - generate))
    probe = Case(1, prompt, generate, "probe")
    _run(llm, probe, 0)  # warms up
    output = _run(llm, probe, 1)
    first, _ = seconds_and_tokens(replace(probe, generate=1), output)
    rest, _ = seconds_and_tokens(probe, output) if generate > 1 else (0.0, 0)
    a_token, a_step = first / prompt, rest / max(1, generate - 1)
    once = [case.batch_size * (case.prompt * a_token + (case.generate - 1) * a_step) for case in tests]
    return repetitions * sum(once)


def _run(llm: LLM, case: Case, repetition: int) -> list[RequestOutput]:
    prompts = prompts_of(case, llm.config.vocab_size, repetition)
    params = SamplingParams(temperature=0.0, max_tokens=case.generate, ignore_eos=True, detokenize=False)
    return llm.generate(prompts, params)


def measure(
    llm: LLM,
    tests: Sequence[Case],
    *,
    reps: int,
    warmup: int,
    ceiling: Ceiling | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Run every test `warmup` + `reps` times and yield its result. show: is told what runs."""
    _check_lengths(llm, tests)
    for case in tests:
        samples: list[tuple[float, float]] = []
        for repetition in range(warmup + reps):
            show(f"{case.name} batch {case.batch_size}: {repetition + 1} of {warmup + reps}")
            outputs = _run(llm, case, repetition)
            if repetition >= warmup:
                samples.append(seconds_and_tokens(case, outputs))
        steps = 1 if case.is_prefill else case.generate - 1
        yield Result(
            case=case,
            tokens_per_second=summarize([tokens / seconds for seconds, tokens in samples]),
            step_ms=summarize([seconds * 1e3 / steps for seconds, _ in samples]),
            step_bytes=None if case.is_prefill else _step_bytes(llm, case),
            ceiling=ceiling,
            decode_path=llm.decode_path,
            compact=llm.compact,
        )


def measurement(result: Result, llm: LLM, *, threads: int) -> Measurement:
    """The ledger's line of one result. threads: of the CPU kernels."""
    case = result.case
    extra = {
        "test": case.name,
        "batch_size": case.batch_size,
        "prompt_tokens": case.prompt,
        "generated_tokens": case.generate,
        **facts_of(llm),
        "compact": result.compact,
        "threads": threads if llm.device.type == "cpu" else None,
        "cuda_graphs": result.decode_path == "graph",
        "tokens_per_second_p50": result.tokens_per_second.p50,
        "bytes_per_step": result.step_bytes,
        "gigabytes_per_second": result.gigabytes_per_second,
        "ceiling_share": result.ceiling_share,
    }
    metric = "prefill" if case.is_prefill else "decode_step"
    return Measurement(llm.name, metric, "ms", result.step_ms, None if case.is_prefill else result.ceiling, extra)


def facts_of(llm: LLM) -> dict[str, Any]:
    """An engine's facts in a line of the ledger."""
    facts = {"dtype": str(llm.dtype).removeprefix("torch."), "quantization": llm.quantization}
    return facts | {"kv_cache_dtype": llm.kv_cache_dtype, "decode_path": llm.decode_path}


def decode_weight_bytes(weights: LlamaWeights, *, unpacked: bool = False, stream: WeightStream | None = None) -> int:
    """Bytes of weights that one decode step reads: all but an embedding that is not the output head too.

    unpacked: matrices in a stream count as what they are unpacked to, as plain operators read them. stream: what the
    wave reads; a head that is the embedding lies there once more.
    """

    def size(part: Any) -> int:
        return part.shape.numel() * weights.norm.itemsize if unpacked and hasattr(part, "stream") else part.nbytes

    head = weights.head
    if stream is not None and not unpacked and isinstance(head, Tensor):
        head = StreamMatrix(stream, "head", *head.shape)
    total = weights.norm.nbytes + size(head)
    for layer in weights.layers:
        parts = (getattr(layer, name) for name in layer.__dataclass_fields__)
        total += sum(size(part) for part in parts if part is not None)
    return total


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token adds to the cache, all layers together."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def kv_bytes_read(config: ModelConfig, dtype: torch.dtype, length: int) -> int:
    """Bytes of keys and values that a step reads for a sequence of that many tokens: of some layers, a window's."""
    per_layer = kv_bytes_per_token(config, dtype) // config.num_layers
    return per_layer * sum(length if window is None else min(length, window) for window in config.layer_windows)


def _step_bytes(llm: LLM, case: Case) -> float:
    """Bytes a decode step reads, averaged over the steps of a test."""
    # Step i feeds the token at index prompt + i and attends to it and everything before.
    lengths = range(case.prompt + 1, case.prompt + case.generate)
    kv = sum(kv_bytes_read(llm.config, llm.runner.model.kv_format.dtype, length) for length in lengths) / len(lengths)
    return decode_weight_bytes(llm.runner.model.weights, stream=llm.runner.stream) + case.batch_size * kv


def seconds_and_tokens(case: Case, outputs: Sequence[RequestOutput]) -> tuple[float, float]:
    """Seconds of the phase that a test measures, and the tokens it went through."""
    metrics = [output.metrics for output in outputs]
    prefilled = max(m.first_token_time for m in metrics if m.first_token_time is not None)
    if case.is_prefill:
        return prefilled - min(m.arrival_time for m in metrics), case.batch_size * case.prompt
    ended = max(m.finished_time for m in metrics if m.finished_time is not None)
    return ended - prefilled, case.batch_size * (case.generate - 1)


def prompts_of(case: Case, vocab_size: int, repetition: int) -> list[list[int]]:
    """Random token ids, the same in every run and different in every repetition."""
    rng = random.Random(f"{_PROMPT_SEED} {repetition} {case.prompt}")
    return [[rng.randrange(vocab_size) for _ in range(case.prompt)] for _ in range(case.batch_size)]


def _check_lengths(llm: LLM, tests: Sequence[Case]) -> None:
    for case in tests:
        if case.prompt + case.generate > llm.max_model_len:
            got, allowed = f"{case.prompt + case.generate} tokens", f"up to max_model_len={llm.max_model_len}"
            raise InvalidArgumentError(f"test {case.name}", got=got, allowed=allowed)
