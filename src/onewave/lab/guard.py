"""Middleware before every route: the Host check, the size limit, security headers, and errors as JSON.

A page of another site can make a browser send requests to a server on loopback. Three checks keep it out: the Host
header must be an address or a name that the server was started for (a rebound DNS name is neither); a request that
carries an Origin must come from the same host; and one that another site made, as the browser says in Sec-Fetch-Site,
may only open the page, as a link does. The last is for GET: from an <img> or a <script> it carries no Origin.
"""

import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

MAX_BYTES = 64 * 1024 * 1024
"""Most bytes of a request: a trace of some 500,000 tasks."""

CONTENT_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class TooLarge(Exception):
    """The body turned out longer than MAX_BYTES."""


def error_body(message: str) -> bytes:
    """The body of every answer that is not a success: {"error": one line}."""
    return json.dumps({"error": message}).encode()


class Guard:
    """Wrap an ASGI app. names: host names beside addresses and "localhost" that requests may be for."""

    def __init__(self, app: App, names: frozenset[str] = frozenset(), max_bytes: int = MAX_BYTES):
        self.app, self.max_bytes = app, max_bytes
        self.names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 403 (wrong host or origin) or 413 (too large)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = self._refusal(headers, scope["path"])
        if refusal is not None:
            await _answer(send, *refusal)
            return
        started = False
        seen = 0
        over = False

        async def limited() -> Message:
            nonlocal seen, over
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                over = True
                raise TooLarge
            return message

        async def with_headers(message: Message) -> None:
            nonlocal started
            # The app may answer the exception in its own way; the answer is ours.
            if over and not started:
                return
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        try:
            await self.app(scope, limited, with_headers)
        except TooLarge:
            if started:
                raise
        if over and not started:
            await _answer(send, 413, self._too_large())

    def _refusal(self, headers: dict[bytes, bytes], path: str) -> tuple[int, str] | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._knows(host):
            return 403, f"Host header {host[:60]!r}; allowed: an IP address or {', '.join(sorted(self.names))}"
        origin = headers.get(b"origin")
        foreign = origin is not None and _site(origin.decode("latin-1")) != host.lower()
        opened = path == "/" and headers.get(b"sec-fetch-mode") == b"navigate"
        if foreign or (headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site") and not opened):
            return 403, "request from another site; open the lab's own page"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 12 or int(length) > self.max_bytes:
            return 413, self._too_large()
        return None

    def _too_large(self) -> str:
        return f"request: too large; allowed: up to {self.max_bytes:,} bytes"

    def _knows(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _site(origin: str) -> str | None:
    """Host and port of an Origin header; None of a malformed one."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


async def _answer(send: Send, status: int, message: str) -> None:
    body = error_body(message)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
