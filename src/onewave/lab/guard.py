"""Middleware before every route: the Host check, the size limit, security headers, and errors as JSON.

A page of another site can make a browser send requests to a server on loopback. Three checks keep it out: the Host
header must be an address or a name that the server was started for (a rebound DNS name is neither); a request that
carries an Origin must come from the same host; and one that another site made, as the browser says in Sec-Fetch-Site,
may only open the page, as a link does. The last is for GET: from an <img> or a <script> it carries no Origin.
"""

import ipaddress
import json
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


class TooLarge(Exception):
    """The body turned out longer than it may be; its text is the answer's."""


def json_response(value: Any, status: int = 200) -> Response:
    """An answer; one that is no success is {"error": one line}."""
    # In ASCII, unlike JSONResponse: what was sent, half a surrogate pair too, may stand in an answer.
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")


class Guard:
    """Wrap an ASGI app. names: host names beside addresses and "localhost" that requests may be for."""

    def __init__(self, app: ASGIApp, names: frozenset[str] = frozenset(), max_bytes: int = MAX_BYTES):
        self.app, self.max_bytes = app, max_bytes
        self.names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 403 (wrong host or origin) or 413 (too large)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise TooLarge(self._too_large())
            return message

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        refusal = self._refusal(dict(scope["headers"]), scope["path"])
        if refusal is None:
            await self.app(scope, limited, with_headers)
        else:
            status, message = refusal
            await json_response({"error": message}, status)(scope, receive, with_headers)

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
