"""A model behind a running server, as `onewave chat --url` talks to it."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from onewave.base.errors import InvalidArgumentError, OnewaveError, shown
from onewave.bench.serve.client import Endpoint, message_of

if TYPE_CHECKING:
    from onewave.engine.params import SamplingParams

_TIMEOUT_S = 600
_MAX_ERROR_BYTES = 65536
# Errors of connections and of JSON.
_BROKEN = (OSError, http.client.HTTPException, ValueError, OverflowError, RecursionError)
# Fields that mean nothing to a server, or are sent another way.
_OWN_FIELDS = ("n", "detokenize", "logprobs", "prompt_logprobs", "structured_outputs")


@dataclass(frozen=True)
class Said:
    """The next part of an answer. num_tokens: of all of it, as far as is known. finish_reason: with the last."""

    delta: str
    num_tokens: int
    finish_reason: str | None


class RemoteModel:
    """Answers conversations through a server with OpenAI's API. name: None is the server's first model.

    Raises InvalidArgumentError for what is no address, OnewaveError where the server refuses or can't be reached.
    """

    def __init__(
        self, url: str, *, api_key: str | None, name: str | None, params: SamplingParams, layout: Mapping[str, Any]
    ) -> None:
        self._at = Endpoint.parse(url, api_key, timeout=_TIMEOUT_S)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._params, self._layout = _changed(params), dict(layout)
        listed = self._ask("GET", "/v1/models", None)
        data = listed.get("data")
        entries = cast("list[dict[str, Any]]", data) if isinstance(data, list) else []
        models = {str(one.get("id")): one for one in entries if isinstance(one, dict)}  # pyright: ignore[reportUnnecessaryIsInstance] (what a server says)
        if not models or (name is not None and name not in models):
            allowed = ", ".join(models) or "nothing: the server lists no model"
            raise InvalidArgumentError("model", got=shown(name), allowed=allowed)
        self.name = next(iter(models)) if name is None else name
        room = models[self.name].get("max_model_len")
        self.max_model_len = room if isinstance(room, int) else None
        self._stats = ""

    def stream(self, messages: list[dict[str, str]]) -> Generator[Said]:
        """Answer, part by part. Closing the iterator closes the connection, which ends the answer."""
        body = {"model": self.name, "messages": messages, "stream": True, **self._params, **self._layout}
        body["stream_options"] = {"include_usage": True}
        if "max_tokens" in body and (room := self.room(messages)) is not None:
            body["max_tokens"] = max(1, min(body["max_tokens"], room))  # servers refuse more than there is room for
        usage: dict[str, int] = {}
        began, first, parts = time.perf_counter(), None, 0
        connection = self._connect()
        try:
            answer = self._send(connection, "POST", "/v1/chat/completions", body)
            for line in answer:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise OnewaveError(self.name, got=message_of(data))
                usage = _counts(event.get("usage")) or usage
                for choice in event.get("choices", ()):
                    text = choice.get("delta", {}).get("content") or ""
                    parts += bool(text)
                    first = first or (time.perf_counter() if text else None)
                    yield Said(text, usage.get("completion_tokens", parts), choice.get("finish_reason"))
        except (*_BROKEN, AttributeError, TypeError) as error:
            raise self._broken(error) from error
        finally:
            connection.close()
        self._stats = _stats_line(began, first, usage)

    def room(self, messages: list[dict[str, str]]) -> int | None:
        """Tokens that an answer could have; None where the server does not count."""
        if self.max_model_len is None:
            return None
        layout = {name: value for name, value in self._layout.items() if name in ("tools", "chat_template")}
        try:
            counted = self._ask("POST", "/tokenize", {"model": self.name, "messages": messages, **layout})
            return self.max_model_len - int(counted["count"])
        except (OnewaveError, KeyError, TypeError, ValueError):  # the answer's own request says what is wrong
            return None

    def stats(self) -> str:
        """A line about the last whole answer."""
        return self._stats

    def _connect(self) -> http.client.HTTPConnection:
        at = self._at
        if at.tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(at.host, at.port, timeout=at.timeout, context=context)
        return http.client.HTTPConnection(at.host, at.port, timeout=at.timeout)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        """The answer, if it is a good one."""
        content = None if body is None else json.dumps(body)
        connection.request(method, self._at.base + path, content, self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            got = f"status {answer.status}: {message_of(answer.read(_MAX_ERROR_BYTES))}"
            raise OnewaveError(f"{self._at.host}{path}", got=got)
        return answer

    def _ask(self, method: str, path: str, body: Any) -> dict[str, Any]:
        connection = self._connect()
        try:
            found = json.loads(self._send(connection, method, path, body).read())
        except _BROKEN as error:
            raise self._broken(error) from error
        finally:
            connection.close()
        if not isinstance(found, dict):
            raise OnewaveError(f"{self._at.host}{path}", got="an answer that is not OpenAI's")
        return cast("dict[str, Any]", found)

    def _broken(self, error: Exception) -> OnewaveError:
        got = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return OnewaveError(f"{self._at.host}:{self._at.port}", got=got, next="Is a server with OpenAI's API there?")


def _changed(params: SamplingParams) -> dict[str, Any]:
    """The fields of a request: those that are not SamplingParams' defaults, and the temperature."""
    body: dict[str, Any] = {"temperature": params.temperature}
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name not in _OWN_FIELDS and value not in (None, (), field.default):
            body[field.name] = value  # a tuple is a list in JSON
    if params.structured_outputs is not None:
        found = asdict(params.structured_outputs)  # type: ignore[arg-type] # a dataclass once it is made
        body["structured_outputs"] = {name: value for name, value in found.items() if value not in (None, False)}
    return body


def _counts(usage: Any) -> dict[str, int]:
    """Return the token counts of a usage. Raises AttributeError, TypeError, ValueError."""
    found: dict[str, Any] = {} if usage is None else {**usage, **(usage.get("prompt_tokens_details") or {})}
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return {name: int(found[name]) for name in names if found.get(name) is not None}


def _stats_line(began: float, first: float | None, usage: dict[str, int]) -> str:
    end = time.perf_counter()
    parts = [] if first is None else [f"first token after {first - began:.3f} s"]
    generated = usage.get("completion_tokens", 0)
    if first is not None and generated > 1:
        parts.append(f"{(generated - 1) / max(end - first, 1e-9):.1f} tokens/s")
    cached = usage.get("cached_tokens", 0)
    parts.append(f"{usage.get('prompt_tokens', 0)} prompt ({cached} cached) and {generated} generated tokens")
    return ", ".join(parts)
