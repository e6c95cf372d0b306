"""A connection: uvicorn's over httptools, with limits on a request's head and what RFC 9112 asks for beside."""

import asyncio
import json
from collections import deque
from functools import partial
from itertools import chain
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from onewave.server.http.errors import ApiError
from onewave.server.options import ServeOptions

# Requests of one connection. uvicorn parses all that has come at once: thirty bytes become kilobytes of objects.
_MAX_PIPELINED = 64


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which itself takes heads and trailers of any size, however slowly they come.

    From the connection's begin, or a later request's first byte, a head has `header_seconds` to come.
    """

    options = ServeOptions()

    @classmethod
    def with_limits(cls, options: ServeOptions) -> "type[Connection]":
        """The class for a server's options, as uvicorn takes a class."""
        return type("Connection", (cls,), {"options": options})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._due = deque[RequestResponseCycle]()  # requests whose answers have not ended, the oldest first
        self._num_pending = 0  # bytes of a head, a chunk's size or trailers, which are not whole
        self._refused = False
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request; uvicorn tells the newest."""
        for cycle in self._due:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the clock with a request's first byte, unless its head has come whole."""
        if self._refused:
            return
        self._num_pending += len(data)
        try:
            self.parser.feed_data(data)
            self._check_size(self._num_pending)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback raised: uvicorn's for what follows alone
            target = f"target {self.url!r}; supported: a path, or a URL with one" if cause else str(error)
            self._refuse(cause if isinstance(cause, ApiError) else _invalid(target))
        except ApiError as error:
            self._refuse(error)
        if not self._due and self.timeout_keep_alive_task is not self._deadline:
            self._watch()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header without the spaces behind it."""
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Stop the clock and begin a request. Raises ApiError."""
        version, method = self.parser.get_http_version(), self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            return
        self._check_head(version, method)
        super().on_headers_complete()
        self._unset_keepalive_if_required()
        self._num_pending = 0
        self.headers = []  # trailers go there, not into the request's
        cycle: Any = self.cycle
        self._due.append(cycle)
        self.flow.resume_reading()  # paused by uvicorn behind another request: that its client has gone is to be read
        if version == "1.0":
            cycle.chunked_encoding = cycle.waiting_for_100_continue = False
            cycle.send = partial(_send_until_close, cycle, cycle.send)  # its task has not begun

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._num_pending = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        self._due.popleft()
        super().on_response_complete()

    def _watch(self) -> None:
        """Have a head come in time; the timer is uvicorn's for idle connections."""
        self._unset_keepalive_if_required()
        self._deadline = self.loop.call_later(self.options.header_seconds, self.timeout_keep_alive_handler)
        self.timeout_keep_alive_task = self._deadline

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > (allowed := self.options.max_header_bytes):
            raise ApiError(431, f"headers are too large; allowed: {allowed:,} bytes", code="headers_too_large")

    def _check_head(self, version: str, method: bytes) -> None:
        self._check_size(sum(map(len, chain([self.url], *self.headers))) + 4 * len(self.headers))
        if version not in ("1.0", "1.1") or method == b"CONNECT":
            raise _invalid(f"{method.decode()} in HTTP/{version}; supported: HTTP/1.1 and 1.0, no CONNECT")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise _invalid(f"{len(hosts)} Host headers; allowed: one")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise _invalid(f"Transfer-Encoding {codings} in HTTP/{version}; supported: chunked in HTTP/1.1")
        if len(self._due) == _MAX_PIPELINED:
            raise _invalid(f"more than {_MAX_PIPELINED} requests before an answer")

    def _should_upgrade(self) -> bool:
        """Have uvicorn begin no request that asks for another protocol."""
        return True

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read such a request again as if it did not ask: httptools ends at its body. rest: what came behind its
        head."""
        fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.data_received(line + fields + b"\r\n" + rest)

    def _refuse(self, error: ApiError) -> None:
        """Read no more, answer with an error and close; where answers are due, only close, behind them."""
        self._refused, due = True, self._due
        if len(due) > 1 and due[-1].more_body:  # for ever
            self.pipeline.popleft()
            due.pop()
        if due and not due[-1].more_body:
            due[-1].keep_alive = False
            return
        if not (due and due[0].response_started):
            body = json.dumps(error.body()).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


def _invalid(reason: str) -> ApiError:
    return ApiError(400, f"no valid HTTP request: {reason}", code="invalid_http")


async def _send_until_close(cycle: RequestResponseCycle, send: Any, message: Any) -> None:
    """Send a message to a client of HTTP/1.0, which knows no chunks: uvicorn takes any length that it was told."""
    if message["type"] == "http.response.body":
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)
