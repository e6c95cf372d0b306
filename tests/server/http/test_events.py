"""Fate of requests with clients that go, steps that fail, and readers that are slow."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kit.serving import Serving
from onewave.engine.engine import Engine

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "temperature": 0, "ignore_eos": True,
}  # fmt: skip


class Gate:
    """Holds an engine's steps: each needs a permit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.permits, self.waiting = threading.Semaphore(0), threading.Event()
        real = Engine.step

        def step(engine: Engine) -> bool:
            self.waiting.set()
            assert self.permits.acquire(timeout=120)
            self.waiting.clear()
            return real(engine)

        monkeypatch.setattr(Engine, "step", step)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_idle(serving: Serving) -> bool:
    """Whether the engine has nothing to do, asked between two steps."""
    answer: list[bool] = []
    serving.llm.run_between_steps(lambda engine: answer.append(engine is not None and not engine.has_work))
    until(lambda: bool(answer))
    return answer[0]


@pytest.mark.parametrize("body", [{**BODY, "stream": True}, BODY, {**BODY, "stream": True, "n": 3}])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_client_that_goes_frees_its_slots_after_the_step_under_way(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], num_steps: int
) -> None:
    gate = Gate(monkeypatch)

    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            task = asyncio.create_task(client.post(serving.url + CHAT, json=body, timeout=60))
            for _ in range(num_steps):
                gate.permits.release()
            while not (gate.waiting.is_set() and serving.served.engine.num_requests == 1):
                await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(leave())
    until(lambda: serving.served.engine.num_requests == 0)
    gate.permits.release()  # the step under way
    assert is_idle(serving)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_goes_leaves_no_request_behind_that_another_one_follows(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    gate, body = Gate(monkeypatch), json.dumps({**BODY, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with serving.connect() as connection:
        first, second = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, f"{head}\r\n".encode()
        connection.sendall(first + second if at_once else first)
        until(gate.waiting.is_set)
        if not at_once:
            connection.sendall(second)
    until(lambda: serving.served.engine.num_requests == 0)
    gate.permits.release()
    assert is_idle(serving)


def test_a_step_that_raises_ends_its_requests_with_the_reason_and_the_next_one_is_answered(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left, begun = Engine._step, [5], threading.Event()

    def failing(engine: Engine) -> bool:
        left[0] -= 1
        if left[0] == 0:
            assert begun.wait(60)
            raise RuntimeError("the device fell off")
        return real(engine)

    monkeypatch.setattr(Engine, "_step", failing)
    lines: list[str] = []
    with httpx.stream("POST", serving.url + CHAT, json={**BODY, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            begun.set()
            lines += [line.removeprefix("data: ")] if line else []
    error, reason = json.loads(lines[-2])["error"], "a step of this request failed: RuntimeError: the device fell off"
    assert (error["type"], error["message"], lines[-1]) == ("server_error", reason, "[DONE]")
    left[0] = 2  # in the first nothing has begun yet
    whole = serving.post(CHAT, BODY)
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, reason)
    assert serving.post(CHAT, {**BODY, "max_tokens": 3}).status_code == 200


def test_a_client_that_reads_late_gets_every_token(serving: Serving) -> None:
    whole = serving.post(CHAT, {**BODY, "return_token_ids": True}).json()["choices"][0]
    with httpx.stream(
        "POST", serving.url + CHAT, json={**BODY, "stream": True, "return_token_ids": True}, timeout=60
    ) as answer:
        until(lambda: serving.served.engine.num_requests == 0)
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line and not line.endswith("[DONE]")]
    assert [i for e in events for i in e["choices"][0].get("token_ids", [])] == whole["token_ids"]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == whole["message"]["content"]


@pytest.mark.parametrize(("version", "chunked"), [("1.1", True), ("1.0", False)])
def test_a_stream_is_cut_into_chunks_for_clients_that_know_them(serving: Serving, version: str, chunked: bool) -> None:
    body = json.dumps({**BODY, "max_tokens": 5, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    answer = serving.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    headers, _, rest = answer.partition(b"\r\n\r\n")
    assert (b"chunked" in headers.lower()) == chunked
    if chunked:
        whole = b""
        while size := int(rest.split(b"\r\n", 1)[0], 16):
            rest = rest.partition(b"\r\n")[2]
            whole, rest = whole + rest[:size], rest[size + 2 :]
        rest = whole
    events = rest.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: {") for event in events[:-2])
