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
        """Start it with a request's first byte, unless its headers have come whole."""
        before: Any = self.cycle
        super().data_received(data)
        if self._deadline is None and self.cycle is before and (before is None or before.response_complete):
            self._watch()

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
    """A cycle's `send`, with a short way for a streamed body: h11 takes longer for a head, or a part, than its token
    took. A head waits for the first part and leaves with it; h11 is told of it then."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send, self._chunked = cycle, cycle.send, False
        self._head: Any = None
        self._untold: list[tuple[bytes, bytes]] | None = None

    async def __call__(self, message: Any) -> None:
        """Send a message as uvicorn does."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._chunked = self._streams(message)
            self._head = message if self._chunked and self._stays_open else None  # or another's that was held
            if self._head is not None:
                return
        body = message.get("body") if message.get("more_body") else None
        if body and self._chunked and not (cycle.disconnected or cycle.flow.write_paused):
            part = b"%x\r\n%b\r\n" % (len(body), body)
            cycle.transport.write(part if self._head is None else self._begin(self._head) + part)
            return
        self._tell_h11()
        if self._head is not None:
            head, self._head = self._head, None
            await self._send(head)
        await self._send(message)

    def _begin(self, head: Any) -> bytes:
        """A head as h11 writes it. h11 is told when it has left."""
        cycle = self._cycle
        self._head, self._untold = None, [*cycle.default_headers, *head["headers"]]
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        asyncio.get_running_loop().call_soon(self._tell_h11)
        lines = [b"HTTP/1.1 200 OK", *map(b": ".join, self._untold), b"Transfer-Encoding: chunked", b"", b""]
        return b"\r\n".join(lines)

    def _tell_h11(self) -> None:
        """Have h11 know what has left without it."""
        headers, self._untold = self._untold, None
        if headers is not None and not self._cycle.disconnected:
            self._cycle.conn.send(h11.Response(status_code=200, headers=headers, reason=b"OK"))

    def _streams(self, start: Any) -> bool:
        """Whether the answer's body goes out in chunks, as h11 decides."""
        scope = self._cycle.scope
        if scope["http_version"] != "1.1" or scope["method"] == "HEAD" or start["status"] != 200:
            return False
        return all(name.lower() != b"content-length" for name, _ in start["headers"])

    @property
    def _stays_open(self) -> bool:
        """Whether nothing in the request asks for the connection's end, of which a head would tell."""
        headers = self._cycle.scope["headers"]
        return not any(name == b"connection" and b"close" in value.lower() for name, value in headers)
