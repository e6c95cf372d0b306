"""/v1/messages through Anthropic's own client."""

import json
from typing import Any

import pytest

from kit.serving import CITY, Serving
from onewave.server.api.messages import _input

jsonschema: Any = pytest.importorskip("jsonschema")

USER = [{"role": "user", "content": "Hi"}]
TOOL: dict[str, Any] = {"name": "weather", "description": "Weather.", "input_schema": CITY}
QUIET: dict[str, Any] = {"thinking": {"type": "disabled"}}


@pytest.fixture
def client(qwen: Serving) -> Any:
    # Imported here: whoever collects these tests would wait two seconds for it.
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=qwen.url, api_key="none", max_retries=0)


def ask(client: Any, **asked: Any) -> Any:
    """The answer, which is the same whole and streamed."""
    asked = {"model": "tiny", "max_tokens": 24, "messages": USER, "extra_body": {"seed": 1}, **QUIET, **asked}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(final.content)
    ids = {"id": None}
    assert [block.to_dict() | ids for block in final.content] == [block.to_dict() | ids for block in whole.content]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    return whole


def test_a_text_ends_for_the_reason_that_is_said(client: Any) -> None:
    whole = ask(client)
    assert (whole.stop_reason, whole.content[0].type) == ("max_tokens", "text")
    text = whole.content[0].text
    stop = next(letter for letter in text[3:] if letter.isascii() and letter.strip())
    ended = ask(client, stop_sequences=[stop])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    assert ended.content == [] or text.startswith(ended.content[0].text)


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
def test_forced_calls_are_tool_use_blocks(client: Any, qwen: Serving, choice: dict[str, Any]) -> None:
    whole = ask(client, tools=[TOOL], tool_choice=choice, max_tokens=200)
    assert (whole.stop_reason, [block.type for block in whole.content]) == ("tool_use", ["tool_use"])
    jsonschema.validate(whole.content[0].input, CITY)
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": [{"type": "text", "text": "Sun."}]}
    talk = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, whole.content[0].to_dict()]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    counted = client.messages.count_tokens(
        model="tiny", messages=talk, tools=[TOOL], system=[{"type": "text", "text": "Short."}], **QUIET
    )
    called = {"type": "function", "function": {"name": "weather", "arguments": whole.content[0].input}}
    messages: list[Any] = [
        {"role": "system", "content": "Short."},
        *USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [called]},
        {"role": "tool", "content": "Sun."},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "weather", "description": "Weather.", "parameters": CITY}
    tools = [{"type": "function", "function": function}]
    ids = qwen.llm.tokenizer.encode_chat(messages, tools=tools, enable_thinking=False)
    assert counted.input_tokens == len(ids)
    again = client.messages.create(model="tiny", messages=talk, tools=[TOOL], system="Short.", max_tokens=1, **QUIET)
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == len(ids)


def test_thoughts_are_blocks_and_a_begun_answer_goes_on(client: Any) -> None:
    begun = [*USER, {"role": "assistant", "content": "<think>\nSo"}]
    thought = ask(client, messages=begun, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in thought.content] == ["thinking"]
    whole = ask(client, messages=[*USER, {"role": "assistant", "content": "Well"}])
    assert [block.type for block in whole.content] == ["text"]


def test_a_form_is_kept_to(client: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}}
    whole = ask(client, output_config=form, max_tokens=90)
    jsonschema.validate(json.loads(whole.content[0].text), CITY)
    assert whole.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ({"model": "other"}, "NotFoundError", "not served"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "BadRequestError", "image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "BadRequestError", "tools.0"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "BadRequestError", "allowed: weather"),
        ({"extra_body": {"container": "c"}}, "BadRequestError", "container"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "BadRequestError", "Invalid"),
    ],
)
def test_errors_are_anthropics(client: Any, asked: dict[str, Any], kind: str, said: str) -> None:
    import anthropic

    asked = {"model": "tiny", "max_tokens": 4, "messages": USER, **asked}
    for call in (client.messages.create, lambda **asked: client.messages.create(stream=True, **asked)):
        with pytest.raises(getattr(anthropic, kind), match=said) as raised:
            call(**asked)
        body = raised.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] in ("invalid_request_error", "not_found_error")


def test_the_input_of_a_call_that_is_no_json_is_empty() -> None:
    for arguments in ('{"a": 1', '{"a": NaN}', '{"a": 1e999}', "[1]", f'{{"a": {"[" * 2000}{"]" * 2000}}}'):
        assert _input(arguments) == {}
    assert _input('{"a": 1e30}') == {"a": 1e30}
