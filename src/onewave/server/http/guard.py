"""Middleware before every endpoint: request ids, API keys, limits on bodies and headers, and a log line a request."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onewave.server.http.errors import ApiError, error_response
from onewave.server.options import ServeOptions

_log = logging.getLogger("onewave.server")
# Paths that need no key: what load balancers and scrapers ask for, and the page, which asks for the key itself.
_OPEN = frozenset({"/", "/health", "/version", "/metrics", "/openapi.json"})
_MAX_HEADER_LINES = 256
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Guard:
    """Wraps an ASGI app. static: the prefix of the page's files, which need no key."""

    def __init__(self, app: ASGIApp, options: ServeOptions, static: str = "/static/") -> None:
        self.app, self.options, self.static = app, options, static
        self._keys = [_digest(key.encode()) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401 (key), 413 (body) or 431 (headers); 408 where a body does not come."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        request_id = _request_id(headers)
        scope["state"]["request_id"] = request_id
        began, status = time.perf_counter(), 499

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # uvicorn leaves the body out
        refusal = self._refusal(scope["path"], headers)
        try:
            if refusal is None:
                await self.app(inner, self._limited(receive), with_id)
            else:
                await error_response(refusal, scope["path"])(scope, receive, with_id)
        finally:
            if self.options.log_requests:
                seconds = time.perf_counter() - began
                more = {"request_id": request_id, "status": status, "seconds": round(seconds, 6)}
                _log.info("%s %s %d %.3f s", scope["method"], scope["path"][:200], status, seconds, extra=more)

    def _refusal(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
        if len(headers) > _MAX_HEADER_LINES:
            return ApiError(431, f"{len(headers)} header lines; allowed: {_MAX_HEADER_LINES}", code="headers_too_large")
        if self._keys and path not in _OPEN and not path.startswith(self.static) and not self._has_key(headers):
            message = "no valid API key: send it as `Authorization: Bearer KEY`"
            return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self.options.max_body_bytes:
                return self._too_large()
        return None

    def _has_key(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Compare what was sent with every key, in the same time whichever fits and wherever they differ."""
        fits = False
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                value = value[7:].strip()
            elif name != b"x-api-key":  # Anthropic's clients
                continue
            sent = _digest(value)
            for key in self._keys:
                fits |= hmac.compare_digest(sent, key)
        return fits

    def _limited(self, receive: Receive) -> Receive:
        seen, whole = 0, False
        deadline = time.monotonic() + self.options.body_seconds

        async def limited() -> Message:
            nonlocal seen, whole
            if whole:  # from here on only the client's leaving is waited for
                return await receive()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the request's body did not come in time", code="body_too_slow") from None
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > self.options.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        allowed = f"{self.options.max_body_bytes:,} bytes"
        return ApiError(413, f"the request's body is too large; allowed: {allowed}", code="body_too_large")


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The caller's own, if it is printable and short, else a new one."""
    sent = next((value for name, value in headers if name == b"x-request-id"), b"")
    return sent.decode() if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
