"""Run a load on a server, and what came of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onewave.base.errors import OnewaveError
from onewave.bench.clock import summarize
from onewave.bench.ledger import Measurement
from onewave.bench.serve.client import Endpoint, RequestFailed, to_json
from onewave.bench.serve.workload import Conversation, Workload
from onewave.engine.scheduler.load import EngineLoad, HostTime

_STEPS = re.compile(r"^\w+:decode_steps_total\{.*\} (\S+)$", re.MULTILINE)
_HOST_SECONDS = re.compile(r'^\w+:decode_host_(cpu_)?seconds_total\{.*part="(\w+)".*\} (\S+)$', re.MULTILINE)
_FIELDS_OF_TEXT = ("content", "reasoning_content", "tool_calls")


@dataclass(frozen=True)
class Level:
    """How much at once: so many clients, each of which asks again once it is answered, or conversations that begin at
    random, `rate` of them a second on average."""

    clients: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return (
            f"{self.rate:g}/s" if self.rate is not None else f"{self.clients} client{'' if self.clients == 1 else 's'}"
        )


@dataclass(frozen=True)
class Limits:
    """Latency limits of a good answer, in seconds; None: no limit. token: of the mean time between tokens."""

    first: float | None = None
    token: float | None = None
    whole: float | None = None

    def hold(self, answer: Answer) -> bool:
        """Whether an answer came in time."""
        pairs = ((self.first, answer.first), (self.token, answer.per_token), (self.whole, answer.whole))
        return answer.error is None and all(most is None or found <= most for most, found in pairs)


@dataclass
class Answer:
    """One request. begun: when it was sent. times: when each delta came. Tokens are the server's count; cached_tokens:
    of the prompt, where it says so. error: why there is no answer, or not all of it."""

    begun: float
    times: list[float] = field(default_factory=list[float])
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.begun if self.times else float("inf")

    @property
    def whole(self) -> float:
        """Seconds to the last one."""
        return self.times[-1] - self.begun if self.times else float("inf")

    @property
    def per_token(self) -> float:
        """Seconds a token after the first one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.times and self.tokens > 1 else 0.0


@dataclass(frozen=True)
class LevelResult:
    """All answers of a level. seconds: from the first request to the last token. good: answers within the limits.
    host_us: what a decode step took of the server's host; empty where the server does not say."""

    level: Level
    workload: Workload
    answers: list[Answer]
    seconds: float
    good: int
    host_us: HostTime = field(default_factory=HostTime)

    @property
    def done(self) -> list[Answer]:
        """Those without an error."""
        return [answer for answer in self.answers if answer.error is None]

    @property
    def tokens_per_second(self) -> float:
        """Generated."""
        return sum(answer.tokens for answer in self.done) / self.seconds

    @property
    def cached_share(self) -> float | None:
        """The share of prompt tokens that were cached; None where the server does not say."""
        known = [(a.cached_tokens, a.prompt_tokens) for a in self.done if a.cached_tokens is not None]
        total = sum(prompt for _, prompt in known)
        return sum(cached for cached, _ in known) / total if total else None

    def samples(self) -> dict[str, list[float]]:
        """Milliseconds by metric: to the first token, the same where most of the prompt was cached, between deltas, a
        token, and to the last one."""
        gaps = [1e3 * (b - a) for one in self.done for a, b in zip(one.times, one.times[1:], strict=False)]
        return {
            "ttft": [1e3 * answer.first for answer in self.done],
            "ttft_cached": [1e3 * a.first for a in self.done if 2 * (a.cached_tokens or 0) > a.prompt_tokens],
            "inter_token": gaps,
            "per_token": [1e3 * answer.per_token for answer in self.done if answer.tokens > 1],
            "end_to_end": [1e3 * answer.whole for answer in self.done],
        }

    def measurements(self) -> Iterator[Measurement]:
        work = self.workload
        extra: dict[str, Any] = {
            "clients": self.level.clients,
            "rate": self.level.rate,
            "api": work.api,
            "data": work.data,
            "input_len": work.input_len,
            "output_len": work.output_len,
            "shared_len": work.shared_len if work.data == "shared-prefix" else None,
            "turns": work.turns if work.data == "multi-turn" else None,
            "requests": len(self.answers),
            "failed": len(self.answers) - len(self.done),
            "tokens_per_second": self.tokens_per_second,
            "good_per_second": self.good / self.seconds,
            "cached_share": self.cached_share,
            **self.host_us.facts,
        }
        for metric, samples in self.samples().items():
            if samples:
                tail = {f"p{at}": percentile(samples, at) for at in (90, 99)}
                yield Measurement(work.model, metric, "ms", summarize(samples), None, extra | tail)


def percentile(samples: list[float], at: float) -> float:
    """Interpolated linearly. samples: not empty."""
    return float(np.percentile(samples, at))


async def run_level(
    endpoint: Endpoint,
    workload: Workload,
    level: Level,
    *,
    count: int,
    limits: Limits,
    show: Callable[[str], None] = lambda text: None,
) -> LevelResult:
    """Have `count` conversations. Raises OnewaveError where not one request was answered."""
    waiting, total = workload.conversations(count, level.name), count * workload.num_turns
    answers: list[Answer] = []

    async def converse(first: Conversation) -> None:
        talk: Conversation | None = first
        while talk is not None:
            answer = await ask(endpoint, workload, talk)
            answers.append(answer)
            show(f"{level.name}, answers: {len(answers)} of {total}")
            talk = talk.after(answer.text) if answer.error is None else None

    async def client() -> None:
        for conversation in waiting:
            await converse(conversation)

    async with endpoint.kept_open() as endpoint:  # as clients' libraries do
        before = await _host_times(endpoint)
        began = time.perf_counter()
        if level.rate is None:
            await asyncio.gather(*(client() for _ in range(level.clients or 1)))
        else:
            draw, tasks = random.Random(f"{workload.seed} arrivals"), list[asyncio.Task[None]]()
            at = began
            for conversation in waiting:
                at += draw.expovariate(level.rate)
                await asyncio.sleep(max(0.0, at - time.perf_counter()))
                tasks.append(asyncio.create_task(converse(conversation)))
            await asyncio.gather(*tasks)
        host_us = (await _host_times(endpoint)).host_us_since(before)
    done = [answer for answer in answers if answer.error is None]
    if not done:
        raise OnewaveError("bench serve", got=answers[0].error if answers else "no request")
    seconds = max(answer.times[-1] for answer in done) - began
    return LevelResult(level, workload, answers, seconds, sum(limits.hold(answer) for answer in answers), host_us)


async def _host_times(endpoint: Endpoint) -> EngineLoad:
    """Return the decode steps and their host time so far, by onewave's own metrics; empty where the server has none."""
    try:
        text = await endpoint.text("/metrics")
    except RequestFailed:
        return EngineLoad()
    steps = sum(int(float(number)) for number in _STEPS.findall(text))
    found = _HOST_SECONDS.findall(text)
    wall, cpu = ({part: float(s) for kind, part, s in found if bool(kind) is of_cpu} for of_cpu in (False, True))
    return EngineLoad(decode_steps=steps, host_seconds=HostTime(wall, cpu))


async def ask(endpoint: Endpoint, workload: Workload, talk: Conversation) -> Answer:
    """Make one request; its failure is in the answer."""
    body = to_json(talk.body())  # first: of 4,096 ids that takes the client 0.2 ms and more
    answer = Answer(time.perf_counter())
    try:
        async with asyncio.timeout(endpoint.timeout), aclosing(endpoint.events(workload.path, body)) as events:
            async for data in events:
                now = time.perf_counter()
                if data != b"[DONE]":
                    _take(answer, json.loads(data), now)
        if answer.error is None and not (answer.times and answer.tokens):
            answer.error = "a stream without a token, or without its usage"
    except TimeoutError:
        answer.error = f"no end after {endpoint.timeout:g} s"
    except RequestFailed as error:
        answer.error = str(error)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        answer.error = f"an event that is not OpenAI's ({error!r})"
    return answer


def _take(answer: Answer, found: dict[str, Any], now: float) -> None:
    """Note an event of either API."""
    if "error" in found:
        answer.error = str(found["error"])
        return
    for choice in found.get("choices", ()):
        delta: dict[str, Any] = choice.get("delta") or {"content": choice.get("text")}
        ends = choice.get("finish_reason") is not None
        # The first one in chat only names the role. A completion's stand for tokens, with a text or without, but the
        # last one, which may only say that the answer has ended.
        says = any(delta.get(name) for name in _FIELDS_OF_TEXT) or ("text" in choice and not ends)
        if says or (ends and not answer.text):
            answer.times.append(now)
            answer.text += delta.get("content") or ""
    if usage := found.get("usage"):
        answer.prompt_tokens, answer.tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        answer.cached_tokens = None if cached is None else int(cached)
