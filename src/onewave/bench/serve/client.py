"""The least of an HTTP client that a load needs: connections that are used again, answers as server-sent events.

General clients take so long for an event that with 64 streams they would measure themselves.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from onewave.base.errors import InvalidArgumentError, OnewaveError, shown

_MAX_HEAD_BYTES = 64 * 1024
_MAX_MESSAGE = 300
_MODELS = "/v1/models"


class RequestFailed(OnewaveError):
    """A request that the server refused, or whose connection broke."""


class _Connection(NamedTuple):
    """One to a server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(frozen=True)
class Endpoint:
    """Where a server is. base: the path before /v1. timeout: seconds that a whole request may take. idle: connections
    whose last answer has been read; None: each request has one of its own."""

    host: str
    port: int
    base: str
    tls: bool
    api_key: str | None = None
    timeout: float = 600.0
    idle: list[_Connection] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None, *, timeout: float = 600.0) -> "Endpoint":
        """Parse http[s]://host[:port][/path], with /v1 at its end or without. Raises InvalidArgumentError."""
        allowed = "http://HOST:PORT, or https://"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise InvalidArgumentError("url", got=shown(url), allowed=allowed) from None
        beside = parts.query or parts.fragment or parts.username
        if parts.scheme not in ("http", "https") or not host or beside or not url.isprintable():
            raise InvalidArgumentError("url", got=shown(url), allowed=allowed)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidArgumentError("api_key", got="not printable ASCII", allowed="the server's key")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), base, tls, api_key, timeout)

    @asynccontextmanager
    async def kept_open(self) -> "AsyncGenerator[Endpoint]":
        """Yield the same with connections that are used again, until the end."""
        kept = replace(self, idle=[])
        try:
            yield kept
        finally:
            for connection in kept.idle or ():
                connection.writer.close()

    async def first_model(self) -> str:
        """Return the name of the first model that is served. Raises RequestFailed."""
        found = self._json(_MODELS, await self._whole("GET", _MODELS, None))
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise RequestFailed(self._at(_MODELS), got="no model", next="Name one with --model.") from None

    async def text(self, path: str) -> str:
        """Return the text at a path. Raises RequestFailed."""
        return (await self._whole("GET", path, None)).decode("utf-8", "replace")

    async def post(self, path: str, body: Any) -> Any:
        """Return the JSON that answers a JSON body. Raises RequestFailed."""
        return self._json(path, await self._whole("POST", path, body))

    async def events(self, path: str, body: Any) -> AsyncGenerator[bytes]:
        """The data of each event that answers a JSON body, as it comes. body: to be written as JSON, or written.
        Raises RequestFailed."""
        buffer = b""
        async for part in self._parts("POST", path, body):
            buffer += part
            if b"\r" in buffer:
                buffer = buffer.replace(b"\r\n", b"\n")
            *whole, buffer = buffer.split(b"\n\n")
            for each in whole:
                for line in each.split(b"\n"):
                    if line.startswith(b"data:"):
                        yield line[5:].strip()

    async def _whole(self, method: str, path: str, body: Any) -> bytes:
        return b"".join([part async for part in self._parts(method, path, body)])

    def _json(self, path: str, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise RequestFailed(self._at(path), got="an answer that is no JSON") from None

    async def _parts(self, method: str, path: str, body: Any) -> AsyncGenerator[bytes]:
        """The parts of a good answer's body, as they come."""
        connection: _Connection | None = None
        request = self._request(method, path, body)
        try:
            connection, head = await self._ask(request)
            status, headers = _parsed(head)
            if status != 200:
                text = b"".join([part async for part in _body(connection.reader, headers)])
                raise RequestFailed(self._at(path), got=f"status {status}: {message_of(text)}")
            async for part in _body(connection.reader, headers):
                yield part
            if self.idle is not None and headers.get("connection", "").lower() != "close":
                self.idle.append(connection)
                connection = None
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            got = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise RequestFailed(self._at(path), got=got, next="Is the server there?") from error
        finally:
            if connection is not None:
                connection.writer.close()

    async def _ask(self, request: bytes) -> tuple[_Connection, bytes]:
        """Send a request, on an idle connection where one still lives; return it and the answer's head."""
        while self.idle:
            with suppress(ConnectionError, EOFError):  # closed meanwhile
                return await _sent(self.idle.pop(), request)
        context = ssl.create_default_context() if self.tls else None
        opened = await asyncio.open_connection(self.host, self.port, ssl=context, limit=_MAX_HEAD_BYTES)
        return await _sent(_Connection(*opened), request)

    def _request(self, method: str, path: str, body: Any) -> bytes:
        content = b"" if body is None else body if isinstance(body, bytes) else to_json(body)
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += ["Connection: close"] if self.idle is None else []
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + content

    def _at(self, path: str) -> str:
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}{self.base}{path}"


def to_json(body: Any) -> bytes:
    return json.dumps(body).encode()


async def _sent(connection: _Connection, request: bytes) -> tuple[_Connection, bytes]:
    try:
        connection.writer.write(request)
        return connection, await connection.reader.readuntil(b"\r\n\r\n")
    except BaseException:
        connection.writer.close()
        raise


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers, names in lower case. Raises ValueError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("no answer in HTTP/1")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncGenerator[bytes]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
            pass
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(_MAX_HEAD_BYTES):
            yield part


def message_of(text: bytes) -> str:
    try:
        found = json.loads(text)
        return str(found["error"]["message"])[:_MAX_MESSAGE]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text.decode("utf-8", "replace")[:_MAX_MESSAGE]
