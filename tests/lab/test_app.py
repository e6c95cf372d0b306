"""Every route: what it answers, and that whatever is wrong with a request comes back as one line of JSON."""

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the lab's server needs onewave[lab]")

from onewave.lab.app import GETS, POSTS, STATIC, make_app
from onewave.lab.guard import MAX_BYTES


def refused(response, status=400):
    """The message of a refusal; checks that it is one line of JSON without anything of Python's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    message = response.json()["error"]
    assert len(message.splitlines()) == 1
    assert "Traceback" not in response.text
    assert 'File "' not in response.text
    return message


def test_the_page_and_all_it_loads_are_served(client):
    page = client.get("/")
    assert page.status_code == 200
    assert "<title>onewave tile lab</title>" in page.text
    for file in STATIC.rglob("*"):
        if file.is_file():
            found = client.get(f"/static/{file.relative_to(STATIC).as_posix()}")
            assert found.status_code == 200, file
            assert found.content == file.read_bytes()
            if file.suffix == ".js":
                assert found.headers["content-type"].startswith("text/javascript")


def test_nothing_is_loaded_from_another_host():
    allowed = ("http://www.w3.org/2000/svg", "https://ui.perfetto.dev")
    for file in STATIC.rglob("*"):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            for name in allowed:
                text = text.replace(name, "")
            assert "http://" not in text, file
            assert "https://" not in text, file
            assert "//cdn" not in text, file


@pytest.mark.parametrize("path", GETS)
def test_every_question_has_an_answer_without_any_field(client, path):
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    assert isinstance(answer.json(), dict)


OUT_OF_RANGE: dict[str, list[dict[str, str]]] = {
    "game": [
        *({"m": size} for size in ("0", "1000000000", "-3", "3.5", "٣", "9" * 5000)),
        {"m": "64", "n": "64", "k": "64"},
        {"slots": "1"},
        {"policy": "<script>"},
        {"unit": ""},
    ],
    "orders": [{"n": "1e9"}],
    "chain": [
        {"rows": "0"},
        {"workers": "1000000000"},
        {"rows": "32", "cols": "32", "inner": "32"},
        {"order": "explicit:/etc/passwd"},
        {"sync": "telepathy"},
        {"cache": "1"},
    ],
    "chain-matrix": [{"rows": "16", "cols": "16", "inner": "16"}],
    "chain-orders": [{"inner": "32"}],
    "staircase": [{"max_m": "1000000000"}],
    "sample-trace": [
        {"program": "notation", "sizes": "/etc/passwd"},
        *({"sizes": sizes} for sizes in ("65536,65536,65536", "1,2,3,4,5,6,7,8,9")),
        {"program": "attention", "sizes": "1"},
    ],
}


@pytest.mark.parametrize(("name", "query"), [(name, query) for name in OUT_OF_RANGE for query in OUT_OF_RANGE[name]])
def test_a_field_out_of_range_is_refused_with_its_name(client, name, query):
    refused(client.get(f"/api/{name}", params=query))


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe\x00", b"[" * 100_000, b"1" * 10_000],
    ids=["empty", "open", "list", "null", "text", "bytes", "deep", "digits"],
)
def test_a_body_that_is_no_object_is_refused(client, path, body):
    assert "allowed: a JSON object" in refused(client.post(path, content=body))


WRONG_ORDERS: list[Any] = [3, "x", [None]] + [
    [place] for place in ([0], [3, 0], [-1, 0], ["0", "0"], [0.0, 1], [True, False], [10**30, 0])
]


@pytest.mark.parametrize("order", [*WRONG_ORDERS, [[0, 0], [0, 0]]], ids=str)
def test_a_path_that_does_not_fit_its_grid_is_refused(client, order):
    refused(client.post("/api/best", json={"m": 3, "n": 3, "order": order}))


TASKS = {"task": [0], "worker": [0], "wait_start": [0], "start": [1], "end": [2], "name": ["x"], "phase": ["p"]}
TRACE = {"format": "onewave-trace", "version": 1, "source": "measured", "unit": "us", "workers": 1, "tasks": TASKS}


@pytest.mark.parametrize(
    "trace",
    [
        None,
        [],
        {},
        TRACE | {"version": 2},
        TRACE | {"unit": "weeks"},
        TRACE | {"unit": "\ud800"},
        TRACE | {"workers": 10**9},
        TRACE | {"workers": "one"},
        TRACE | {"tasks": []},
        TRACE | {"tasks": TASKS | {"worker": [7]}},
        TRACE | {"tasks": TASKS | {"end": [0]}},
        TRACE | {"tasks": TASKS | {"end": ["2"]}},
        TRACE | {"tasks": TASKS | {"end": []}},
        TRACE | {"tasks": TASKS | {"start": [float("nan")]}},
        TRACE | {"report": {"levels": 3}},
        TRACE | {"report": {"levels": [], "energy_mj": {"memory": 10**400}}},
    ],
    ids=lambda trace: json.dumps(trace)[:40],
)
def test_a_malformed_trace_is_refused(client, trace):
    body = json.dumps({"trace": trace})
    for path in ("/api/trace", "/api/perfetto"):
        refused(client.post(path, content=body))
    refused(client.post("/api/compare", content=json.dumps({"a": trace, "b": trace})))


def test_a_trace_comes_back_as_it_was_sent(client):
    back = client.post("/api/trace", json={"trace": TRACE}).json()
    assert {key: back[key] for key in TRACE} == TRACE


def test_a_trace_becomes_slices_for_perfetto(client):
    events = client.post("/api/perfetto", json={"trace": TRACE}).json()["traceEvents"]
    slices = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert slices == {"wait": (0, 1), "x": (1, 1)}


def test_two_traces_are_compared_phase_by_phase(client):
    slower = TRACE | {"tasks": TASKS | {"end": [4]}}
    row = client.post("/api/compare", json={"a": TRACE, "b": slower}).json()["phases"][0]
    assert (row["phase"], row["a_busy"], row["b_busy"], row["busy_ratio"]) == ("p", 1, 3, 3)


def test_what_is_not_the_page_is_not_found(client):
    outside = ("../app.py", "..%2fapp.py", "%2e%2e/%2e%2e/app.py", "..%5capp.py", "/etc/passwd", "%00", "js")
    for path in (*(f"/static/{name}" for name in outside), "/etc/passwd", "/docs", "/openapi.json", "/api/nothing"):
        refused(client.get(path), 404)


def test_another_method_is_refused(client):
    refused(client.post("/api/game"), 405)
    refused(client.get("/api/best"), 405)


def test_a_mistake_of_ours_shows_no_stack_trace(client, monkeypatch):
    from onewave.lab import app

    def broken(given):
        raise RuntimeError("secret detail")

    monkeypatch.setitem(app.GETS, "/api/broken", broken)
    from starlette.testclient import TestClient

    own = TestClient(app.make_app(), base_url="http://127.0.0.1", raise_server_exceptions=False)
    message = refused(own.get("/api/broken"), 500)
    assert "secret" not in message


def test_a_body_too_large_is_refused_before_it_is_read(client):
    message = refused(client.post("/api/trace", content=b"x", headers={"content-length": str(MAX_BYTES + 1)}), 413)
    assert f"{MAX_BYTES:,}" in message


def test_a_misspelt_field_is_refused_and_not_passed_over(client):
    answer = client.get("/api/game", params={"m": 3, "rows": 4})
    assert answer.status_code == 400
    assert answer.json() == {"error": "field: 'rows'; allowed: k, m, n, policy, slots, unit"}
    answer = client.post("/api/best", json={"m": 3, "oder": []})
    assert answer.status_code == 400


def test_a_client_that_leaves_while_it_sends_ends_its_request_quietly():
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/trace",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-length", b"500")],
    }

    async def receive():
        return messages.pop(0)

    async def send(message):
        del message

    asyncio.run(make_app()(scope, receive, send))
    assert messages == []
