"""A tiny model behind the server's app: a token a byte, so that one character takes several tokens."""

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kit.models.dummy import write_config
from kit.models.tiny_tokenizers import bytes_directory
from onewave.base.sockets import bind
from onewave.engine.aio import AsyncLLM, Limits
from onewave.engine.llm import LLM
from onewave.server.app import make_app
from onewave.server.http.connection import Connection
from onewave.server.options import ServeOptions
from onewave.server.served import Served

VOCAB = 260
NAME = "tiny"
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zürich"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""A schema that tools and forms of answers are asked for."""
_DAYS: dict[str, Any] = {"days": {"type": "integer", "minimum": 1, "maximum": 9}}
WEATHER: dict[str, Any] = CITY | {"properties": CITY["properties"] | _DAYS, "required": ["city", "days"]}
"""The same with a number."""
CHANGES = {"vocab_size": VOCAB, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257}


def tiny_directory(directory: Path, *, positions: int = 512, chat_template: str | None = None) -> Path:
    """A model of two layers, for load_format="dummy", with a tokenizer of single bytes and a chat template."""
    path = write_config(bytes_directory(directory), **CHANGES | {"max_position_embeddings": positions})
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return path


def tiny_llm(directory: Path, *, positions: int = 512, chat_template: str | None = None, **options: Any) -> LLM:
    """Load it."""
    path = tiny_directory(directory, positions=positions, chat_template=chat_template)
    return LLM(path, device="cpu", load_format="dummy", **options)


@dataclass(frozen=True)
class Serving:
    """A server that listens. url: without a path."""

    served: Served
    url: str

    @property
    def llm(self) -> LLM:
        """Its model."""
        return self.served.engine.llm

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request, as httpx does, with patience for a busy machine."""
        return httpx.request(method, self.url + path, timeout=60, **more)

    def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        """Send a body as JSON; the model's name may be left out."""
        return self.ask("POST", path, json=body, **more)

    def connect(self) -> socket.socket:
        """A connection, for bytes that no client would send."""
        return socket.create_connection(("127.0.0.1", int(self.url.rsplit(":", 1)[1])), timeout=60)

    def raw(self, data: bytes) -> bytes:
        """Send bytes; return all that comes until the server closes the connection."""
        found = b""
        with self.connect() as connection:
            with suppress(ConnectionError):  # closed amid what it refuses
                connection.sendall(data)
            with suppress(ConnectionError):
                while part := connection.recv(65536):
                    found += part
        return found

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream but the last, which says that it is done."""
        with httpx.stream("POST", self.url + path, json={**body, "stream": True}, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            found = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert found[-1] == "[DONE]"
        return [json.loads(line) for line in found[:-1]]


@contextmanager
def serve_in_thread(llm: LLM, options: ServeOptions | None = None, limits: Limits | None = None) -> Iterator[Serving]:
    """Serve an LLM on a free port of this machine by an event loop in a thread. The LLM outlives it."""
    served = Served(AsyncLLM(llm, limits), options or ServeOptions(model_names=(NAME,)))
    listening: socket.socket = bind("127.0.0.1", 0, what="address")
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    http = Connection.with_limits(served.options)
    server = uvicorn.Server(uvicorn.Config(make_app(served), http=http, ws="none", log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield Serving(served, url)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


class _Given(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.request.recv(65536)
        answers: list[bytes] = self.server.answers  # type: ignore[attr-defined]
        self.wfile.write(answers.pop(0) if len(answers) > 1 else answers[0])


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """The URL of a server that answers its requests with some bytes in turn, and all that follow with the last."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Given) as server:
        server.answers = [*answers]  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
