"""Server-sent events, and what happens when a client goes away before its answer.

An answer, streamed or not, runs beside a watch on the connection: once the client has gone the answer's task is
cancelled, which ends its requests after the step under way.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onewave.server.http.errors import ClientGone, as_api_error

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

_log = logging.getLogger("onewave.server")
# U+0085, U+2028 and U+2029 in UTF-8.
_LINE_ENDS = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")
DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """As compact JSON in UTF-8, on one line even for clients that end lines at U+0085, U+2028 and U+2029."""
    try:
        data = pydantic_core.to_json(value)
    except pydantic_core.PydanticSerializationError:  # half a surrogate pair, from a caller's JSON
        data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    # They stand in strings alone.
    return _LINE_ENDS.sub(_escaped, data)


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event. name: its type, where a client looks at that."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, to_json(value))


def json_response(value: Any) -> Response:
    """A success."""
    return Response(to_json(value), media_type="application/json")


async def until_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what some work gives; cancel it and raise ClientGone once the client has closed its connection."""
    return await _beside_watch(request.receive, work)


async def guarded(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Pass events on, then DONE; an error after the first one becomes an event, as the status has been sent."""
    begun = False
    try:
        async with aclosing(events):
            async for each in events:
                begun = True
                yield each
    except Exception as error:
        if not begun:
            raise
        found = as_api_error(error)
        if found.status == 500:
            _log.error("an answer was cut off: %s", found.message, exc_info=error)
        yield event(found.body())
    yield DONE


async def merged(sources: Sequence[AsyncGenerator[_Item]]) -> AsyncGenerator[tuple[int, _Item]]:
    """Items of several generators as they come, each with its generator's index; an error of one ends all."""
    if len(sources) == 1:  # by far the most: neither task nor queue
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield 0, item
        return
    ready: asyncio.Queue[tuple[int, _Item] | BaseException | None] = asyncio.Queue(maxsize=len(sources))

    async def drain(index: int, source: AsyncGenerator[_Item]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await ready.put((index, item))
            await ready.put(None)
        except Exception as error:
            await ready.put(error)

    tasks = [asyncio.create_task(drain(index, source)) for index, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            found = await ready.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        await _cancel(tasks)


async def together(works: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Results of works that run together; an error of one ends all."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


class EventResponse(Response):
    """A stream of events. Its head waits for the first one: an error before that is an answer with a status of its
    own."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.background: BackgroundTask | None = None
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes."""
        with suppress(ClientGone):
            await _beside_watch(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events):
            first = await anext(self._events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for each in self._events:
                # Waits where the client does not read: its request's next event holds more then.
                await send({"type": "http.response.body", "body": each, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _beside_watch(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do some work in the caller's task: one of its own would begin later."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        await _cancel([watching])


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
