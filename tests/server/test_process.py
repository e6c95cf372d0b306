"""`onewave serve` as a process: how it begins, what SIGTERM, kill -9 and a crowd do to it."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.serving import tiny_directory

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "ab", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


class Process:
    """A server in a process of its own. log: what it wrote on stderr so far."""

    def __init__(self, directory: Path, *options: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", "onewave", "serve", str(directory), "--load-format", "dummy", "--port", "0"]
        command += ["--device", "cpu", *options]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        first = self.process.stdout.readline()
        found = re.search(r"http://\S+", first)
        assert found is not None, first + self.process.stderr.read()
        self.url = found[0]
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()
        self.post({**BODY, "max_tokens": 1})

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + COMPLETIONS, json=body, timeout=60)

    def num_known(self) -> float:
        """Answers that wait, run or have ended."""
        names = "num_requests_waiting|num_requests_running|request_success_total"
        metrics = httpx.get(self.url + "/metrics", timeout=60).text
        return sum(map(float, re.findall(rf"^onewave:(?:{names}){{.*}} (\S+)$", metrics, re.MULTILINE)))

    def wait(self) -> int:
        return self.process.wait(60)

    def memory(self) -> int:
        """Resident bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) * 1024


@contextmanager
def running(directory: Path, *options: str) -> Iterator[Process]:
    found = Process(directory, *options)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait(60)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("tiny"))


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """Events of a stream; an error is raised."""
    async with client.stream("POST", url + COMPLETIONS, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line and line != "data: [DONE]":
                found = json.loads(line[6:])
                assert "error" not in found, found
                yield found


async def ids_of(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> list[int]:
    return [i async for event in stream(client, url, body) for i in event["choices"][0]["token_ids"]]


def unlimited() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))


def test_sigterm_under_load_lets_what_runs_end_and_exits_0(directory: Path) -> None:
    with running(directory, "--log-json", "--log-requests", "--max-num-seqs", "4") as server:
        body = {**BODY, "return_token_ids": True}

        async def load() -> list[list[int]]:
            async with unlimited() as client:
                tasks = [asyncio.create_task(ids_of(client, server.url, body)) for _ in range(12)]
                while server.num_known() < 1 + 12:  # the first was to see whether it answers
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*tasks)

        for ids in asyncio.run(load()):
            assert len(ids) == 300
        assert server.wait() == 0
        lines = [json.loads(line) for line in server.log if line.startswith("{")]
        assert len([line for line in lines if line.get("status") == 200]) >= 12
        assert "Traceback" not in "".join(server.log)


@pytest.mark.slow
def test_a_client_that_never_reads_can_not_hold_up_the_end(directory: Path) -> None:
    with running(directory, "--drain-seconds", "1") as server:
        body = json.dumps({**BODY, "stream": True, "n": 64, "max_tokens": 500}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            connection.recv(10)
            time.sleep(1)
            assert server.post({**BODY, "max_tokens": 1}).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_without_a_traceback(directory: Path) -> None:
    with running(directory) as server:
        with httpx.stream(
            "POST", server.url + COMPLETIONS, json={**BODY, "n": 64, "stream": True}, timeout=60
        ) as answer:
            next(answer.iter_lines())
            server.process.send_signal(signal.SIGINT)
            with suppress(httpx.TransportError):  # once the first has come
                while httpx.get(server.url + "/health", timeout=60):
                    pass
            server.process.send_signal(signal.SIGINT)
            assert server.wait() == 0
        assert "Traceback" not in "".join(server.log)


@pytest.mark.slow
def test_after_kill_9_the_same_port_and_model_serve_again(directory: Path) -> None:
    with running(directory) as server:
        alone = server.post(BODY).json()["choices"][0]["text"]
        port = server.url.rsplit(":", 1)[1]
        with httpx.stream("POST", server.url + COMPLETIONS, json={**BODY, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
        assert server.wait() == -signal.SIGKILL
    with running(directory, "--port", port) as again:
        assert again.url.endswith(port)
        assert again.post(BODY).json()["choices"][0]["text"] == alone


@pytest.mark.slow
def test_a_crowd_of_streaming_clients_gets_every_token_once_and_memory_stays_flat(directory: Path) -> None:
    """200 clients for 60 s, twenty prompts among them; each answer must be the one that it gets alone. The KV cache is
    too small for what runs, so that prompts come from the cache and rows are preempted."""
    seconds, num_clients = 60.0, 200
    with running(directory, "--max-num-seqs", "32", "--kv-cache-memory-bytes", "500000") as server:
        bodies = [
            {
                **BODY,
                "prompt": f"client {i % 20} " + "x" * (i % 20 * 7),
                "max_tokens": 40 + i % 20,
                "return_token_ids": True,
            }
            for i in range(num_clients)
        ]
        alone = [server.post(body).json()["choices"][0]["token_ids"] for body in bodies[:20]]
        marks: list[int] = []

        async def client(http: httpx.AsyncClient, i: int, end: float) -> int:
            count = 0
            while time.monotonic() < end:
                assert await ids_of(http, server.url, bodies[i]) == alone[i % 20]
                count += 1
            return count

        async def look(end: float) -> None:
            while time.monotonic() < end:
                await asyncio.sleep(2)
                marks.append(server.memory())

        async def crowd() -> list[int | None]:
            end = time.monotonic() + seconds
            async with unlimited() as http:
                return await asyncio.gather(*[client(http, i, end) for i in range(num_clients)], look(end))

        counts = [count for count in asyncio.run(crowd()) if count is not None]
        print(f"{sum(counts)} answers, fewest {min(counts)}; memory {[mark >> 20 for mark in marks]} MiB")
        assert min(counts) > 0
        metrics = httpx.get(server.url + "/metrics", timeout=60).text
        for name in ("num_preemptions_total", "prefix_cache_hits_total"):
            assert float(re.findall(rf"^onewave:{name}{{.*}} (\S+)$", metrics, re.MULTILINE)[0]) > 0
        assert marks[-1] < marks[len(marks) // 3] * 1.05 + 8 * 2**20
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.slow
def test_a_body_of_100_megabytes_costs_no_memory(directory: Path) -> None:
    with running(directory) as server:
        before = server.memory()
        data = b'{"prompt": "' + b"a" * 100_000_000 + b'"}'
        chunks = (data[at : at + 65536] for at in range(0, len(data), 65536))
        for content in (data, chunks):
            answer = httpx.post(
                server.url + COMPLETIONS, content=content, headers={"content-type": "application/json"}, timeout=60
            )
            assert answer.status_code == 413
        assert server.memory() < before + 40 * 2**20
        assert server.post({**BODY, "max_tokens": 1}).status_code == 200
