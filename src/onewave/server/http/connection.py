"""A connection: uvicorn's, with a time limit on a request's headers, so that slow senders hold none open."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from onewave.server.http.errors import ApiError
from onewave.server.options import ServeOptions


class Connection(H11Protocol):
    """uvicorn's connection in h11, which itself limits the bytes of headers.

    From the connection's begin, or a later request's first byte, headers have `header_seconds` to come.
    """

    header_seconds = 10.0

    @classmethod
    def with_limits(cls, options: ServeOptions) -> "type[Connection]":
        """The class for a server's options, as uvicorn takes a class."""
        return type("Connection", (cls,), {"header_seconds": options.header_seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start it with a request's first byte."""
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):  # pyright: ignore[reportUnnecessaryComparison] (of none so far)
            self._watch()
        super().data_received(data)

    def handle_events(self) -> None:
        """Stop it where headers have come."""
        before: Any = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._unwatch()
            cycle: Any = self.cycle
            cycle.send = _Send(cycle)  # its task has not begun

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has headers beyond the limit, and close."""
        body = json.dumps(ApiError(400, f"{msg} Or its headers are too large.", code="invalid_http").body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        self._unwatch()
        self._deadline = self.loop.call_later(self.header_seconds, self._too_slow)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()


class _Send:
    """A cycle's `send`, with a short way for parts of a streamed body: h11 takes longer for one than its token took."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send, self._chunked = cycle, cycle.send, False

    async def __call__(self, message: Any) -> None:
        """Send a message as uvicorn does."""
        cycle = self._cycle
        body = message.get("body") if message.get("more_body") else None
        if body and self._chunked and not (cycle.disconnected or cycle.flow.write_paused):
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        await self._send(message)
        if message["type"] == "http.response.start":
            self._chunked = self._streams(message)

    def _streams(self, start: Any) -> bool:
        """Whether the answer's body goes out in chunks, as h11 decides."""
        scope = self._cycle.scope
        if scope["http_version"] != "1.1" or scope["method"] == "HEAD" or start["status"] in (204, 304):
            return False
        return all(name.lower() != b"content-length" for name, _ in start["headers"])
