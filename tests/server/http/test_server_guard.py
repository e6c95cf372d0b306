"""Keys, limits and malformed requests: one clear answer each, and the server goes on."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kit.serving import NAME, Serving, serve_in_thread, tiny_llm
from onewave.engine.aio import Limits
from onewave.engine.llm import LLM
from onewave.server.options import ServeOptions

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_llm(tmp_path_factory.mktemp("tiny"), max_num_seqs=2) as model:
        yield model


@pytest.fixture(scope="module")
def strict(llm: LLM) -> Iterator[Serving]:
    """A server with keys and small limits."""
    origins = ("https://page.example",)
    options = ServeOptions(model_names=(NAME,), api_keys=KEYS, max_body_bytes=100_000, cors_origins=origins)
    with serve_in_thread(llm, options) as found:
        yield found


def key(value: str = KEYS[1]) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


@pytest.mark.parametrize(
    "headers", [{}, key("wrong"), key(KEYS[0] + "x"), {"x-api-key": ""}, {"authorization": KEYS[0]}]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/tokenize", "/nowhere"])
def test_without_a_key_nothing_is_answered_but_401(strict: Serving, headers: dict[str, str], path: str) -> None:
    answer = strict.ask("POST", path, json=BODY, headers=headers)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["error"]["type"] == "authentication_error"


def test_every_key_lets_in_and_health_needs_none(strict: Serving) -> None:
    for headers in (key(KEYS[0]), key(KEYS[1]), {"x-api-key": KEYS[0]}):
        assert strict.post(CHAT, BODY, headers=headers).status_code == 200
    for path in ("/health", "/version", "/metrics"):
        assert strict.ask("GET", path).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(strict: Serving, streamed: bool) -> None:
    data = b'{"messages": "' + b"a" * 200_000
    content = (data[at : at + 10_000] for at in range(0, len(data), 10_000)) if streamed else data
    answer = strict.ask("POST", CHAT, content=content, headers={**key(), "content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (413, "invalid_request_error", "body_too_large")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b'{"messages": }', b'"text"', b"[1, 2]", b"null", b"\xff\xfe{}", b'{"messages": "\xc3\x28"}',
        b"[" * 50_000, b'{"a":' * 20_000, gzip.compress(b"{}", mtime=0),
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "a"}]}',
        b'{"seed": ' + b"9" * 5000 + b"}", b'{"\\ud800": 1}',
    ],
)  # fmt: skip
def test_a_malformed_body_is_an_error_of_the_caller(strict: Serving, data: bytes) -> None:
    answer = strict.ask("POST", CHAT, content=data, headers={**key(), "content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("num_lines", [300, 10_000])
def test_thousands_of_header_lines_are_refused(strict: Serving, num_lines: int) -> None:
    lines = b"".join(b"x-%d: y\r\n" % i for i in range(num_lines))
    found = strict.raw(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n" + lines + b"\r\n")
    assert found.split(b" ", 2)[1] in (b"431", b"400")
    assert b'"invalid_request_error"' in found


# The limit that is not tried is one that no request here reaches.
def test_headers_that_come_too_slowly_end_the_connection(llm: LLM) -> None:
    with serve_in_thread(llm, ServeOptions(model_names=(NAME,), header_seconds=0.2, body_seconds=600)) as serving:
        assert serving.raw(b"GET /health HT") == b""
        assert serving.raw(b"") == b""


def test_a_body_that_comes_too_slowly_is_cut_off(llm: LLM) -> None:
    headers = b"host: a\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 100\r\n"
    with serve_in_thread(llm, ServeOptions(model_names=(NAME,), header_seconds=600, body_seconds=0.2)) as serving:
        found = serving.raw(b"POST /v1/chat/completions HTTP/1.1\r\n" + headers + b"\r\n{")
        assert found.startswith(b"HTTP/1.1 408")
        assert b'"code": "body_too_slow"' in found


def test_nonsense_on_the_wire_is_answered_with_400(strict: Serving) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"):
        found = strict.raw(data + b"\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 400")
        json.loads(found.split(b"\r\n\r\n", 1)[1])
    assert strict.ask("GET", "/health").status_code == 200


def test_a_request_id_is_the_caller_s_or_a_new_one(strict: Serving) -> None:
    answer = strict.post(CHAT, BODY, headers={**key(), "x-request-id": "mine-1"})
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine-1", "chatcmpl-mine-1")
    made = [strict.ask("GET", "/health", headers={"x-request-id": "a" * 200}).headers["x-request-id"] for _ in "ab"]
    assert len({*made}) == 2


def test_pages_of_other_sites_are_let_in_by_name_only(strict: Serving, serving: Serving) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = strict.ask("OPTIONS", CHAT, headers={"origin": "https://page.example", **ask})
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    for other, origin in ((strict, "https://other.example"), (serving, "https://page.example")):
        answer = other.ask("OPTIONS", CHAT, headers={"origin": origin, **ask})
        assert "access-control-allow-origin" not in answer.headers


def test_one_request_too_many_is_asked_to_come_again(llm: LLM) -> None:
    with serve_in_thread(llm, limits=Limits(max_requests=2)) as found:
        answer = found.post("/v1/completions", {"prompt": ["a", "b", "c"]})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert found.post("/v1/completions", {"prompt": ["a", "b"]}).status_code == 200


def test_wrong_paths_and_methods_are_answered_in_the_same_shape(serving: Serving) -> None:
    assert serving.ask("GET", "/nowhere").json()["error"]["type"] == "not_found_error"
    answer = serving.ask("GET", CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "Method Not Allowed"
