"""AsyncLLM: an LLM for asyncio, where many requests wait and none has a thread.

The engine's thread leaves each request's newest state in the request's `_Stream` and wakes the event loop once a step,
however many requests had news. A reader that is slow finds the newest state only: its next output holds all the tokens
since the one before. Nothing queues up, no token is lost, and no reader holds another up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from functools import reduce
from os import PathLike
from typing import Any, NamedTuple, TypeVar

from onewave.base.errors import BusyError, InvalidArgumentError, StoppingError, shown
from onewave.engine.arguments import Limits, flag, whole
from onewave.engine.engine import Engine
from onewave.engine.llm import LLM, Job, raise_failures
from onewave.engine.output import RequestOutput
from onewave.engine.params import SamplingParams
from onewave.engine.prompts import ParamsLike, PromptLike, RawPrompt, parse_params, parse_prompts
from onewave.engine.request import Reader, Request, RequestState
from onewave.engine.text.conversations import ChatLayout, Conversation, num_characters

_Result = TypeVar("_Result")

# Text up to which encoding takes less than a hand-over to another thread is worth, in characters.
_SHORT_PROMPT = 4096
_MAX_NAMED = 8
_MAX_FAILED_STEPS = 3
_log = logging.getLogger("onewave")


class Totals(NamedTuple):
    """Tokens of requests: of prompts that have run, of those found in the cache, and generated."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def plus(self, other: Totals) -> Totals:
        """Both."""
        return Totals(*map(int.__add__, self, other))


class AsyncLLM:
    """An LLM's requests as asynchronous iterators. Its methods are called on an event loop.

    llm: closed by `close`.
    """

    def __init__(self, llm: LLM, limits: Limits | None = None) -> None:
        self.llm, self.limits = llm, limits or Limits()
        self._hub: _Hub | None = None
        self._streams: set[_Stream] = set()
        self._ended = Totals()
        self._stopping = False
        self._idle: asyncio.Event | None = None
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    def load(cls, model: str | PathLike[str], limits: Limits | None = None, **options: Any) -> AsyncLLM:
        """Load a model. options: LLM's. Raises as LLM."""
        return cls(LLM(model, **options), limits)

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._streams)

    @property
    def totals(self) -> Totals:
        """Tokens so far, of requests that run and of those that were given up too."""
        return reduce(Totals.plus, (stream.totals for stream in self._streams), self._ended)

    @property
    def stopping(self) -> bool:
        """Whether new requests are refused, as `drain` or `close` was called."""
        return self._stopping

    @property
    def stalled(self) -> bool:
        """Whether the step under way takes longer than it may."""
        return self.llm.step_seconds > self.limits.step_seconds

    @property
    def failing(self) -> bool:
        """Whether one step after another has raised: the device may be lost."""
        return self.llm.failed_steps >= _MAX_FAILED_STEPS

    async def generate(
        self,
        prompt: PromptLike,
        params: ParamsLike | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        delta: bool = False,
    ) -> AsyncGenerator[RequestOutput]:
        """Continue a prompt, text or token ids. Yields what LLM.stream yields; a slow reader gets several tokens at
        once.

        Closing the iterator, or cancelling the task that reads it, ends the request after the step under way.
        delta: outputs hold only what is new since the one before: text, token ids, log-probabilities.
        Raises as LLM.generate, BusyError and StoppingError.
        """
        raw = parse_prompts(prompt)
        if len(raw) != 1:
            raise InvalidArgumentError("prompt", got=f"{len(raw)} prompts", allowed="one; generate each")
        whole("priority", priority, -(2**31), 2**31 - 1)
        flag("delta", delta)
        for name, text in (("request_id", request_id), ("cache_salt", cache_salt)):
            if text is not None and not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
                raise InvalidArgumentError(name, got=shown(text), allowed="text, or None")
        job = await self.prepare(raw[0], parse_params(params, 1)[0])
        job = job._replace(priority=priority, cache_salt=cache_salt)
        async with aclosing(self.run(job, request_id=request_id, delta=delta)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(self, prompt: RawPrompt, params: SamplingParams, *, add_special_tokens: bool = True) -> Job:
        """Encode and check a prompt; a long one in another thread. Raises InvalidArgumentError, TokenizerError."""

        def prepare() -> Job:
            return self.llm.prepare(prompt, params, add_special_tokens=add_special_tokens)

        return await _beside(prepare, 0 if prompt.token_ids is not None else len(prompt.text or ""), params)

    async def prepare_chat(self, conversation: Conversation, params: SamplingParams, layout: ChatLayout) -> Job:
        """Lay a conversation out, encode and check it, as `prepare`."""
        length = num_characters(conversation)
        return await _beside(lambda: self.llm.prepare_chat(conversation, params, layout), length, params)

    async def run(
        self, job: Job, *, request_id: str | None = None, delta: bool = False
    ) -> AsyncGenerator[RequestOutput]:
        """Run what `prepare` has made; yields and raises as `generate`."""
        stream = self._begin(job, request_id, streaming=True)
        try:
            async for state in stream.states():
                yield stream.begun_request.output(state, delta=delta)
            raise_failures([stream.begun_request])
            yield stream.begun_request.output(delta=delta)
        finally:
            self._end(stream)

    async def complete(self, job: Job, *, request_id: str | None = None) -> RequestOutput:
        """Run what `prepare` has made; return it at the end, as one delta. The loop sleeps until then. Raises as
        `generate`."""
        stream = self._begin(job, request_id, streaming=False)
        try:
            async for _ in stream.states():
                pass
            raise_failures([stream.begun_request])
            return stream.begun_request.output(delta=True)
        finally:
            self._end(stream)

    def refuse_new(self) -> None:
        """Refuse new requests from here on."""
        self._stopping = True

    async def drain(self) -> None:
        """Refuse new requests and return when those that wait or run have ended."""
        self.refuse_new()
        if self._streams:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    async def close(self) -> None:
        """End what runs and free the model."""
        self.refuse_new()
        await asyncio.to_thread(self.llm.close)

    async def run_between_steps(self, work: Callable[[Engine], _Result]) -> _Result:
        """Have the engine's thread do some work between two steps; return its result or raise its error."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Result] = loop.create_future()

        def settle(result: _Result | None, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_exception(error) if error is not None else answer.set_result(result)  # type: ignore[arg-type]

        def job(engine: Engine | None) -> None:
            try:
                if engine is None:
                    raise StoppingError("engine", got="closed")
                result, error = work(engine), None
            except Exception as raised:
                result, error = None, raised
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(settle, result, error)

        self.llm.run_between_steps(job)
        return await answer

    def check_room(self, num_requests: int = 1) -> None:
        """Raise BusyError or StoppingError unless so many requests can come."""
        if self._stopping:
            raise StoppingError("request", got="sent while the engine is stopping", next="Send it to another server.")
        if len(self._streams) + num_requests > self.limits.max_requests:
            got = f"{len(self._streams)} wait or run"
            raise BusyError("requests", got=got, allowed=f"{self.limits.max_requests}", next="Send it again later.")

    def _begin(self, job: Job, request_id: str | None, *, streaming: bool) -> _Stream:
        self.check_room()
        loop = asyncio.get_running_loop()
        hub = self._hub
        if hub is None or hub.loop is not loop:
            hub = self._hub = _Hub(loop)
        stream = _Stream(hub, request_id)
        self._streams.add(stream)
        if self._watchdog is None or self._watchdog.done() or self._watchdog.get_loop() is not loop:
            self._watchdog = loop.create_task(self._watch(), name="onewave watchdog")
        self.llm.submit(job, Reader(streaming, stream, hub.wake), stream.begin)
        return stream

    def _end(self, stream: _Stream) -> None:
        if not stream.ended:
            # Behind the job that begins it, so that there is something to end.
            self.llm.run_between_steps(stream.abort)
        self._ended = self._ended.plus(stream.totals)
        self._streams.discard(stream)
        if not self._streams:
            if self._idle is not None:
                self._idle.set()
            watchdog, self._watchdog = self._watchdog, None
            if watchdog is not None:
                with suppress(RuntimeError):  # its loop, which may be another than this one, has been closed
                    watchdog.get_loop().call_soon_threadsafe(watchdog.cancel)

    async def _watch(self) -> None:
        """Report each step that takes too long, once, for as long as there are requests."""
        limit, reported = self.limits.step_seconds, False
        while True:
            await asyncio.sleep(min(limit / 4, 1.0))
            if self.stalled and not reported:
                named = sorted(stream.name for stream in self._streams)
                more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
                _log.warning(
                    "a step has taken %.1f s (limit %.1f s) with requests %s%s; the engine's thread is at:\n%s",
                    self.llm.step_seconds, limit, ", ".join(named[:_MAX_NAMED]), more, self.llm.step_traceback(),
                )  # fmt: skip
            reported = self.stalled


async def _beside(work: Callable[[], _Result], length: int, params: SamplingParams) -> _Result:
    """Do some work here if it is short, else in another thread: with a grammar to compile it may take long."""
    short = length <= _SHORT_PROMPT and params.form is None
    return work() if short else await asyncio.to_thread(work)


class _Hub:
    """One event loop's streams with news. `changed` and `wake` are the engine's thread's, `_deliver` the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.changed: deque[_Stream] = deque()
        self._woken = False

    def wake(self) -> None:
        """Have the loop look at `changed`, unless it is about to."""
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop has been closed
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what changes from here on wakes the loop again
        while self.changed:
            self.changed.popleft().notify()


class _Stream:
    """One request's news: written by the engine's thread, read by one task on the loop.

    ended: whether the request is over, or was never begun; it has no further states then.
    """

    def __init__(self, hub: _Hub, request_id: str | None) -> None:
        self.ended = False
        self._hub = hub
        self._request_id = request_id
        self._request: Request | None = None
        self._error: BaseException | None = None
        self._newest: RequestState | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def begun_request(self) -> Request:
        """The request, once a state of it has come."""
        assert self._request is not None
        return self._request

    @property
    def name(self) -> str:
        """How the log calls it."""
        return self._request_id or (self._request.request_id if self._request else "(waiting)")

    @property
    def totals(self) -> Totals:
        """Its tokens so far."""
        request = self._request
        generated = 0 if request is None else sum(len(sample.token_ids) for sample in request.samples)
        if request is None or not generated:
            return Totals()
        return Totals(len(request.prompt_token_ids), request.num_cached_tokens or 0, generated)

    def begin(self, made: Request | BaseException) -> None:
        """Take the request, or what kept it from being made. In the engine's thread."""
        if isinstance(made, Request):
            made.request_id = self._request_id or made.request_id
            self._request = made
        else:
            self._error = made
            self.put(None)
            self._hub.wake()

    def put(self, item: RequestState | None, /) -> None:
        """Take a state, or None at the end. In the engine's thread, before the hub's wake."""
        if item is None:
            self.ended = True
        else:
            self._newest = item
        self._hub.changed.append(self)

    def abort(self, engine: Engine | None) -> None:
        """End the request. In the engine's thread."""
        if self._request is not None and engine is not None:
            engine.abort(self._request)

    def notify(self) -> None:
        """Wake the task that waits for news."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def states(self) -> AsyncIterator[RequestState]:
        """States before the last one, each the newest when it is asked for."""
        seen: RequestState | None = None
        while True:
            newest = self._newest
            if self.ended:
                if self._error is not None:
                    raise self._error
                return
            if newest is not None and newest is not seen:
                seen = newest
                yield newest
                continue
            self._waiter = self._hub.loop.create_future()
            await self._waiter
