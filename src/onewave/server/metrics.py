"""Prometheus metrics under vLLM's names, so that its dashboards read them: `onewave:...`, or on request `vllm:...`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from onewave.engine.aio import AsyncLLM
from onewave.engine.llm import Job
from onewave.engine.output import RequestOutput
from onewave.engine.params import SamplingParams
from onewave.engine.scheduler.load import EngineLoad

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
# vLLM's begin at 10 ms: a small model's tokens come faster.
_BETWEEN_TOKENS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
_WHOLE = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Buckets:
    """A histogram that every token passes through: counted here, and made Prometheus' own when it is read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Take a value, as often as it came."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, values up to it) of each bucket, and the sum of all values."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


class Metrics:
    """All metrics of one engine, set on the event loop. between: seconds from token to token. first: seconds to a
    request's first one."""

    def __init__(self, engine: AsyncLLM, model_name: str, *, vllm_names: bool) -> None:
        self._engine = engine
        self.between = Buckets(_BETWEEN_TOKENS)
        self._registry = CollectorRegistry()
        self._prefix = "vllm:" if vllm_names else "onewave:"
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry.register(cast("Any", self))
        tokens = _one_two_five(engine.llm.max_model_len)
        self._ended = self._make(
            Counter, "request_success", "Requests that ended, by reason.", more=["finished_reason"]
        )
        self._of_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._of_answer = self._histogram("request_generation_tokens", "Generated tokens of a request.", tokens)
        self._n = self._histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._limit = self._histogram("request_params_max_tokens", "max_tokens of a request.", tokens)
        self.first = self._histogram("time_to_first_token_seconds", "Until the first token.", _FIRST_TOKEN)
        mean = "Between two tokens, the mean of a request."
        self._mean = self._histogram("request_time_per_output_token_seconds", mean, _BETWEEN_TOKENS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _WHOLE)
        self._longest = self._histogram("request_max_num_generation_tokens", "Of a request's longest answer.", tokens)
        self._computed = self._histogram("request_prefill_kv_computed_tokens", "Prompt tokens that ran.", tokens)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival until the prompt runs.", _WHOLE)
        self._prefill = self._histogram("request_prefill_time_seconds", "From then to the first token.", _WHOLE)
        self._inference = self._histogram("request_inference_time_seconds", "From then to the end.", _WHOLE)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end.", _WHOLE)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics counted here, as Prometheus' registry asks for them."""
        totals, load, runner = self._engine.totals, self._engine.llm.load or EngineLoad(), self._engine.llm.runner
        for kind, name, what, value in (
            (CounterMetricFamily, "prompt_tokens", "Prompt tokens.", totals.prompt),
            (CounterMetricFamily, "generation_tokens", "Generated tokens.", totals.generated),
            (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens looked for in the cache.", totals.prompt),
            (CounterMetricFamily, "prefix_cache_hits", "Those that were there.", totals.cached),
            (CounterMetricFamily, "prompt_tokens_cached", "Prompt tokens that did not run.", totals.cached),
            (CounterMetricFamily, "num_preemptions", "Sequences that gave way to others.", load.num_preempted),
            (CounterMetricFamily, "decode_steps", "Steps in which sequences decoded.", load.decode_steps),
            (GaugeMetricFamily, "num_requests_running", "Sequences that run.", load.num_running),
            (GaugeMetricFamily, "num_requests_waiting", "Sequences that wait.", load.num_waiting),
            (GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", load.used_blocks),
        ):
            yield self._family(kind, name, what, {(): value})
        sizes = {"block_size": str(runner.block_size), "cache_dtype": self._engine.llm.kv_cache_dtype}
        sizes["num_gpu_blocks"] = str(runner.num_blocks)
        yield self._family(GaugeMetricFamily, "cache_config_info", "The KV cache.", {tuple(sizes.values()): 1}, *sizes)
        sources = {"local_compute": totals.prompt - totals.cached, "local_cache_hit": totals.cached}
        came_from = "Prompt tokens, by where their keys and values came from."
        wall, cpu = "What those steps took of the host, by part.", "What the engine's thread computed of it."
        waits = "Sequences that wait: for a slot or KV blocks."
        for kind, name, what, label, found in (
            (
                CounterMetricFamily,
                "prompt_tokens_by_source",
                came_from,
                "source",
                sources | {"external_kv_transfer": 0},
            ),
            (CounterMetricFamily, "decode_host_seconds", wall, "part", load.host_seconds.wall),
            (CounterMetricFamily, "decode_host_cpu_seconds", cpu, "part", load.host_seconds.cpu),
            (GaugeMetricFamily, "num_requests_waiting_by_reason", waits, "reason", {"capacity": load.num_waiting}),
        ):
            yield self._family(kind, name, what, {(part,): value for part, value in found.items()}, label)
        steps = Buckets(_STEP_TOKENS)
        for tokens, count in load.steps.items():
            steps.add(tokens, count)
        for name, what, found in (
            ("inter_token_latency_seconds", "Between two tokens.", self.between),
            ("iteration_tokens_total", "Tokens of a step, of prompts or rows.", steps),
        ):
            histogram = HistogramMetricFamily(self._prefix + name, what, labels=list(self._labels))
            histogram.add_metric(list(self._labels.values()), *found.cumulative())
            yield histogram

    def _family(self, kind: Any, name: str, what: str, found: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        """A metric with the values found, each by those of the labels beside the usual ones."""
        family = kind(self._prefix + name, what, labels=[*self._labels, *labels])
        for of_labels, value in found.items():
            family.add_metric([*self._labels.values(), *of_labels], value)
        return family

    def watch(self, job: Job) -> RequestWatch:
        return RequestWatch(self, job.params)

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return self._make(Histogram, name, what, buckets=tuple(buckets))

    def _make(self, kind: Any, name: str, what: str, *, more: Sequence[str] = (), **options: Any) -> Any:
        labels = [*self._labels, *more]
        made = kind(self._prefix + name, what, labels, registry=self._registry, **options)
        return made if more else made.labels(**self._labels)

    def note_end(self, params: SamplingParams, result: RequestOutput | None, longest: int) -> None:
        """Take a request that has ended; None: before its first token. longest: tokens of its longest answer."""
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._limit.observe(params.max_tokens)
        if result is None or not result.finished:  # its client went, or a step failed
            self._ended.labels(**self._labels, finished_reason="abort").inc(
                1 if result is None else len(result.outputs)
            )
            return
        times = result.metrics
        self._of_prompt.observe(times.num_prompt_tokens)
        self._of_answer.observe(times.num_generation_tokens)
        self._longest.observe(longest)
        self._computed.observe(times.num_prompt_tokens - (result.num_cached_tokens or 0))
        for output in result.outputs:
            self._ended.labels(**self._labels, finished_reason=output.finish_reason).inc()
        if times.finished_time is not None:
            self._whole.observe(times.finished_time - times.arrival_time)
            began, first = times.first_scheduled_time, times.first_token_time
            if began is not None and first is not None:
                self._queue.observe(began - times.arrival_time)
                self._prefill.observe(first - began)
                self._inference.observe(times.finished_time - began)
                self._decode.observe(times.finished_time - first)
        if times.tokens_per_second:
            self._mean.observe(len(result.outputs) / times.tokens_per_second)


class RequestWatch:
    """One request's way into the metrics; `end` is called once, however it ends."""

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics, self._params = metrics, params
        self._num_tokens = 0
        self._last = 0.0
        self._tokens_of: dict[int, int] = {}
        self._newest: RequestOutput | None = None

    def step(self, result: RequestOutput) -> None:
        """Take what a step brought."""
        metrics, now, times = self._metrics, time.perf_counter(), result.metrics
        new = times.num_generation_tokens - self._num_tokens
        counts = self._tokens_of
        before = len(counts)
        for output in result.outputs:
            if output.token_ids:
                counts[output.index] = counts.get(output.index, 0) + len(output.token_ids)
        begun = len(counts) - before
        later = new - begun
        if self._newest is None:
            if times.time_to_first_token is not None:
                metrics.first.observe(times.time_to_first_token)
            if later > 0 and times.tokens_per_second:  # an answer that comes whole
                metrics.between.add(len(result.outputs) / times.tokens_per_second, later)
        elif later > 0:
            # Samples of one request come side by side; a slow reader's step holds several tokens of each.
            metrics.between.add((now - self._last) * min(1.0, len(result.outputs) / new), later)
        self._num_tokens, self._last, self._newest = self._num_tokens + new, now, result

    def end(self) -> None:
        """Take the end, or that its caller left."""
        self._metrics.note_end(self._params, self._newest, max(self._tokens_of.values(), default=0))


def _one_two_five(highest: int) -> list[float]:
    """1, 2, 5, 10, ... up to a number."""
    steps = [float(digit * 10**power) for power in range(12) for digit in (1, 2, 5)]
    return [step for step in steps if step <= highest]
