"""Requests that OpenAI's API refuses, and this server too, before anything runs."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kit.serving import NAME, Serving
from onewave.engine.text.tokenizer import Tokenizer
from onewave.server.conversation import template_variables
from onewave.server.http import bodies

USER = [{"role": "user", "content": "Hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/messages": {"model": NAME, "messages": USER},
    "/v1/responses": {"input": "Hi"},
}


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_may_outgrow_the_context_is_refused_and_one_that_fills_it_is_not(
    serving: Serving, path: str
) -> None:
    name = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    refused = serving.post(path, {**PATHS[path], name: 600})
    assert refused.status_code == 400
    assert "room for" in refused.json()["error"]["message"]
    if path == "/v1/completions":
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        body = {"prompt": [1] * 500, "ignore_eos": True}
        assert serving.post(path, {**body, "max_tokens": 12}).json()["usage"]["completion_tokens"] == 12
        assert serving.post(path, {**body, "max_tokens": 13}).status_code == 400


@pytest.mark.parametrize(("bias", "status"), [(-100, 200), (100, 200), (100.5, 400), (-101, 400)])
def test_a_bias_is_between_a_hundred_below_and_above(serving: Serving, bias: float, status: int) -> None:
    answer = serving.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "logit_bias": {"7": bias}})
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"].startswith("logit_bias")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_far_beyond_the_context_is_refused_by_its_beginning(
    serving: Serving, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    plain = Tokenizer.encode_plain

    def noting(self: Tokenizer, text: str, **more: Any) -> list[int]:
        seen.append(len(text))
        return plain(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode_plain", noting)
    long = "ab " * 700_000
    body = {"prompt": long} if path == "/v1/completions" else {"messages": [{"role": "user", "content": long}]}
    refused = serving.post(path, body)
    assert refused.status_code == 400
    assert "over" in refused.json()["error"]["message"]
    assert seen
    assert max(seen) < 100 * serving.llm.max_model_len


@pytest.mark.parametrize("token_id", [-1, 260, 2**31, 2**70])
def test_a_token_id_beyond_the_vocabulary_is_refused_however_large(serving: Serving, token_id: int) -> None:
    refused = serving.post("/v1/completions", {"prompt": [1, token_id, 2]})
    assert refused.status_code == 400
    assert f"prompt token id: {token_id}; allowed: 0..259" in refused.json()["error"]["message"]


def test_pydantics_parser_reads_bodies_and_the_json_module_what_it_refuses(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [0]

    def counted(body: bytes) -> Any:
        read[0] += 1
        return json.loads(body)

    monkeypatch.setattr(bodies, "json", SimpleNamespace(loads=counted))
    body = json.dumps({"prompt": [1, 2], "max_tokens": 1})
    for content, status, readings in ((body.encode(), 200, 0), (body.encode("utf-16"), 200, 1), (b"{", 400, 2)):
        headers = {"content-type": "application/json"}
        answer = serving.ask("POST", "/v1/completions", content=content, headers=headers)
        assert (answer.status_code, read[0]) == (status, readings)


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/metrics", 200), ("/v1/models", 200), ("/no", 404)])
def test_head_is_answered_as_get_without_a_body(serving: Serving, path: str, status: int) -> None:
    answer = serving.ask("HEAD", path)
    assert (answer.status_code, answer.content) == (status, b"")
    assert int(answer.headers["content-length"]) > 0


def test_effort_and_verbosity_are_the_template_s_to_read(plain: Serving) -> None:
    found = template_variables("none", "low", {"a": 1})
    assert found == {"verbosity": "low", "reasoning_effort": "none", "enable_thinking": False, "a": 1}
    answer = plain.post("/v1/chat/completions", {"messages": USER, "max_tokens": 2, "verbosity": "high"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a", "b", ""]}, "prompt.2: String should have at least 1 character"),
        ("/v1/completions", {"prompt": [[1]] * 129}, "prompt: List should have at most 128 items"),
        ("/v1/completions", {"prompt": "a", "stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"\u0663": 1}}, "logit_bias token id"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
         "unknown field messages.0.content.0.b:"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages.0.content.0.type: Input should be 'text'"),
        ("/v1/chat/completions", {"messages": USER, "tool_choice": {"type": "function", "name": "f"}},
         "unknown field tool_choice.name:"),
        ("/v1/chat/completions", {"messages": USER, "stream_options": {"str": 1}}, "unknown field stream_options.str:"),
        ("/detokenize", {"tokens": [1, 300, 260]}, "tokens: 300; allowed: 0..259"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_where_it_is(serving: Serving, path: str, body: dict[str, Any], param: str) -> None:
    refused = serving.post(path, body)
    assert refused.status_code == 400
    assert param in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input.0.message.content.0.type"),
        ("/v1/messages", {"model": NAME, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages.0.content.0"),
    ],
)  # fmt: skip
def test_an_image_in_a_list_is_refused_and_not_the_list(
    serving: Serving, path: str, body: dict[str, Any], place: str
) -> None:
    error = serving.post(path, body).json()["error"]
    assert error["param"] == place
    assert error["message"].startswith(f"{place}: Input")
    assert "valid string" not in error["message"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (b'{"prompt": "\xe9"}', {}, 400, "no JSON in UTF-8"),
        (b"[" * 100_000, {}, 400, "no JSON in UTF-8"),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}, 415, "text/plain; allowed: application/json"),
        (b"\x1f\x8b\x08", {"content-encoding": "gzip"}, 415, "content-encoding: gzip"),
    ],
)
def test_a_body_that_can_not_be_read_is_told_why(
    serving: Serving, body: bytes, headers: dict[str, str], status: int, said: str
) -> None:
    sent = {"content-type": "application/json", **headers}
    refused = serving.ask("POST", "/v1/completions", content=body, headers=sent)
    assert refused.status_code == status
    assert said in refused.json()["error"]["message"]
