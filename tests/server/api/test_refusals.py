"""What OpenAI's API refuses, and this server too, before anything runs."""

from typing import Any

import httpx
import pytest

from kit.serving import NAME, Serving
from onewave.engine.text.tokenizer import Tokenizer
from onewave.server.conversation import template_variables

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


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/metrics", 200), ("/v1/models", 200), ("/no", 404)])
def test_head_is_answered_as_get_without_a_body(serving: Serving, path: str, status: int) -> None:
    answer = httpx.head(serving.url + path)
    assert (answer.status_code, answer.content) == (status, b"")
    assert int(answer.headers["content-length"]) > 0


def test_effort_and_verbosity_are_the_template_s_to_read(plain: Serving) -> None:
    found = template_variables("none", "low", {"a": 1})
    assert found == {"verbosity": "low", "reasoning_effort": "none", "enable_thinking": False, "a": 1}
    answer = plain.post("/v1/chat/completions", {"messages": USER, "max_tokens": 2, "verbosity": "high"})
    assert answer.status_code == 200
