"""/v1/chat/completions: answers whole and streamed."""

from typing import Any

import pytest

from kit.serving import NAME, Serving

ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hé 😀?"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True,
    "seed": 3,
}  # fmt: skip
PATH = "/v1/chat/completions"


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1.0}, {"logprobs": True, "top_logprobs": 2}])
def test_a_stream_joins_to_the_whole_answer(serving: Serving, more: dict[str, Any]) -> None:
    body = {**ASKED, **more, "return_token_ids": True}
    whole = serving.post(PATH, body).json()
    chunks = serving.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [i for part in parts for i in part.get("token_ids", [])] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            found = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert found == choice["logprobs"]["content"]
            pieces = serving.llm.tokenizer.pieces
            assert [bytes(entry["bytes"]) for entry in found] == [pieces[i] for i in choice["token_ids"]]
            assert all(len(entry["top_logprobs"]) == 2 for entry in found)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"magic": 1}, "magic"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_field_that_is_unknown_or_wrong_is_refused_by_name(serving: Serving, more: Any, named: str) -> None:
    answer = serving.post(PATH, {**ASKED, **more})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert named in str(error["param"])
    assert named in error["message"]
    assert ("unknown field" in error["message"]) is ("magic" in more)


def test_fields_that_are_null_or_change_no_answer_are_taken(serving: Serving) -> None:
    plain = serving.post(PATH, ASKED).json()["choices"]
    more = {"magic": None, "tools": None, "user": "someone", "metadata": {"a": "b"}, "store": False}
    assert serving.post(PATH, {**ASKED, **more}).json()["choices"] == plain


def test_another_model_is_not_found(serving: Serving) -> None:
    answer = serving.post(PATH, {**ASKED, "model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}),
        ("/v1/chat/completions", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        ("/v1/messages", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}, "max_tokens": 2, "model": NAME}),
        ("/v1/messages/count_tokens", {"chat_template_kwargs": {"chat_template": ["{{ 1 }}"]}, "model": NAME}),
        ("/tokenize", {"chat_template": "{{ 1 }}"}),
    ],
)
def test_a_request_brings_no_template_of_its_own_unless_it_is_trusted(
    serving: Serving, qwen: Serving, path: str, body: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **body}
    refused = serving.post(path, body)
    assert refused.status_code == 400
    assert "Start it with --trust-request-chat-template." in refused.json()["error"]["message"]
    assert "--trust" not in qwen.post(path, body).text
