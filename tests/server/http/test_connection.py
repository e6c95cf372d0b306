"""Bytes on the wire: what is no request, what is too much of one, and what stands beside it."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kit.serving import NAME, Serving, serve_in_thread
from onewave.server.http.connection import Connection
from onewave.server.options import ServeOptions

GET = b"GET /version HTTP/1.1\r\nHost: a\r\n"
LAST = GET + b"Connection: close\r\n\r\n"
BODY = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}'
STREAMED = BODY[:-1] + b', "stream": true}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"9\r\n%b\r\n%x\r\n%b\r\n0\r\n" % (BODY[:9], len(BODY) - 9, BODY[9:])
EXPECT = b"Expect: 100-continue\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\n"


def post(headers: bytes = LENGTH, body: bytes = BODY, *, version: bytes = b"1.1") -> bytes:
    line = b"POST /v1/chat/completions HTTP/%b\r\nHost: a\r\nContent-Type: application/json\r\n" % version
    return line + headers + b"\r\n" + body


def statuses(found: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", found)]


@pytest.fixture(scope="module")
def small(serving: Serving) -> Iterator[Serving]:
    """A server with small limits."""
    options = ServeOptions(model_names=(NAME,), max_body_bytes=1024, max_header_bytes=2048)
    with serve_in_thread(serving.llm, options) as found:
        yield found


@pytest.mark.parametrize(
    "data",
    [
        # Lengths that a proxy may take for others.
        post(LENGTH + CHUNKED, CHUNKS + b"\r\n"), post(CHUNKED + LENGTH, CHUNKS + b"\r\n"), post(LENGTH * 2),
        post(LENGTH + b"Content-Length: 3\r\n"), post(b"Content-Length: 65, 65\r\n"), post(b"Content-Length: +65\r\n"),
        post(b"Content-Length: -1\r\n"), post(b"Content-Length: %d\r\n" % (2**64 + len(BODY))),
        post(b"Transfer-Encoding: gzip, chunked\r\n", CHUNKS + b"\r\n"), post(b"Transfer-Encoding: identity\r\n"),
        post(CHUNKED * 2, CHUNKS + b"\r\n"), post(b"Transfer-Encoding : chunked\r\n", CHUNKS + b"\r\n"),
        post(CHUNKED, CHUNKS + b"\r\n", version=b"1.0"), post(b"Transfer-Encoding:\r\n chunked\r\n", CHUNKS + b"\r\n"),
        post(CHUNKED, b"1" + b"0" * 16 + CHUNKS), post(CHUNKED, b"-" + CHUNKS), post(CHUNKED, b"0x" + CHUNKS),
        post(CHUNKED, b"2;\n{}\r\n0\r\n\r\n"), post(CHUNKED, b"2\r\n{}0\r\n\r\n"), post(CHUNKED, b"2\n{}\n0\n\n"),
        # Heads.
        GET.replace(b"\r\n", b"\n") + b"\n", GET + b"A: b\rc\r\n\r\n", GET + b"A: b\0\r\n\r\n",
        GET + b"A: b\r\n c\r\n\r\n",
        GET + b"A : b\r\n\r\n", GET + b": b\r\n\r\n", GET + b"A\r\n\r\n", b"GET /version HTTP/1.1\r\n\r\n",
        GET + b"Host: b\r\n\r\n", GET.replace(b"1.1", b"2.0") + b"\r\n", GET.replace(b"1.1", b"0.9") + b"\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"BREW" + GET[3:] + b"\r\n",
        b"GET /\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_request_ends_the_connection(serving: Serving, data: bytes) -> None:
    found = serving.raw(data + LAST)
    assert statuses(found) == [400]
    assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_a_target_without_a_path_is_named(serving: Serving) -> None:
    found = serving.raw(b"GET http://a" + LAST[12:])
    message = json.loads(found.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert message == "no valid HTTP request: target b'http://a'; supported: a path, or a URL with one"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (GET + b"\r\n" + post() + post(CHUNKED, CHUNKS + b"\r\n") + b"HEAD /nowhere" + GET[12:] + b"\r\n" + LAST,
         [200, 200, 200, 404, 200]),
        (post(LENGTH + UPGRADE) + post(CHUNKED + UPGRADE, CHUNKS + b"\r\n") + GET + UPGRADE + b"\r\n" + LAST,
         [200] * 4),
        (LAST + LAST, [200]),
        ((GET + b"\r\n") * 100, [200] * 64),
        (b"\r\n" + post(LENGTH + EXPECT) + LAST, [100, 200, 200]),
        (post(LENGTH + EXPECT, version=b"1.0"), [200]),
        (b"GET http://a/version" + GET[12:] + b"Connection: close \t\r\n\r\n", [200]),
        # Answers that are due come before the end.
        (post() + GET + b"\r\n\x16\x03\x01\r\n\r\n", [200, 200]),
        (GET + b"\r\n" + post() + post(CHUNKED, b"z\r\n"), [200, 200]),
    ],
)  # fmt: skip
def test_requests_that_follow_each_other_are_answered_in_turn(
    serving: Serving, data: bytes, expected: list[int]
) -> None:
    found = serving.raw(data)
    assert statuses(found) == expected
    assert b"connection: close\r\n" in found.lower()


def test_streams_follow_each_other_on_a_connection(serving: Serving) -> None:
    found = serving.raw(post(b"Content-Length: %d\r\n" % len(STREAMED), STREAMED) * 2 + LAST)
    assert statuses(found) == [200] * 3
    assert found.count(b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1") == 2


def test_headers_end_before_the_body_and_before_their_last_spaces(serving: Serving) -> None:
    trailer, spaces = b"X-Request-Id: one\r\n\r\n", b"X-Request-Id: two \t\r\n\r\n"
    found = serving.raw(post(CHUNKED, CHUNKS + trailer) + GET + spaces + LAST)
    assert statuses(found) == [200] * 3
    assert b"one" not in found
    assert b"x-request-id: two\r\n" in found


@pytest.mark.parametrize("data", [b"A: %b\r\n" % (b"b" * 2048), b"A: b\r\n" * 400, b"A: " + b"b" * 4096])
def test_a_head_beyond_the_limit_is_refused_whole_or_not(small: Serving, data: bytes) -> None:
    for end in (b"", b"\r\n"):
        found = small.raw(GET + data + end)
        assert statuses(found) == [431]
        assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert statuses(small.raw(b"GET /" + b"a" * 2048 + LAST[12:])) == [431]
    assert statuses(small.raw(GET + b"A: %b\r\n" % (b"b" * 1900) + b"Connection: close\r\n\r\n")) == [200]


@pytest.mark.parametrize("data", [b"0\r\nA: " + b"b" * 4096, b"0\r\n" + b"A: b\r\n" * 800, b"1;" + b"b" * 4096])
def test_trailers_and_what_stands_beside_chunks_have_the_same_limit(small: Serving, data: bytes) -> None:
    with small.connect() as connection, connection.makefile("rb") as answers:
        connection.sendall(post(CHUNKED + EXPECT, b""))
        assert statuses(answers.readline() + answers.readline()) == [100]
        connection.sendall(data)
        assert statuses(answers.readline()) == [431]


@pytest.mark.parametrize("expect", [b"", EXPECT])
def test_a_body_that_was_refused_unread_is_passed_over(small: Serving, expect: bytes) -> None:
    with small.connect() as connection, connection.makefile("rb") as answers:
        connection.sendall(post(b"Content-Length: 300000\r\n" + expect, b""))
        assert statuses(answers.readline()) == [413]
        connection.sendall(b" " * 300_000 + LAST)
        assert statuses(answers.read()) == [200]


class _Wire(asyncio.Transport):
    """Takes what is written."""

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_a_head_has_its_own_seconds_and_an_idle_connection_has_others() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})
        answered.set()

    async def talk() -> None:
        config = uvicorn.Config(app, timeout_keep_alive=10_000)
        connection: Any = Connection.with_limits(ServeOptions(header_seconds=1000))(config, ServerState(), {})
        connection.connection_made(_Wire())
        data = post(b"Content-Length: 2\r\n", b"")
        for _ in range(2):
            first = connection.timeout_keep_alive_task
            connection.data_received(data[:9])
            head = connection.timeout_keep_alive_task
            assert head.when() - asyncio.get_running_loop().time() <= 1000
            connection.data_received(data[9:-2])
            assert connection.timeout_keep_alive_task is head
            connection.data_received(b"\r\n")
            connection.data_received(b"{}")
            assert head.cancelled()
            assert connection.timeout_keep_alive_task is None
            await answered.wait()
            answered.clear()
            assert connection.timeout_keep_alive_task.when() - asyncio.get_running_loop().time() > 1000
        assert first.cancelled()
        connection.connection_lost(None)

    answered = asyncio.Event()
    asyncio.run(talk())
