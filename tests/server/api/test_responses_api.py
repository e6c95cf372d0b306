"""/v1/responses through OpenAI's own client."""

import json
from typing import Any

import pytest

from kit.serving import CITY, Serving

jsonschema: Any = pytest.importorskip("jsonschema")

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
QUIET = {"reasoning": {"effort": "none"}}


@pytest.fixture
def client(qwen: Serving) -> Any:
    # Imported here: whoever collects these tests would wait for it.
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0)


def events_of(client: Any, **asked: Any) -> tuple[list[Any], Any]:
    """The events of a stream, their numbers checked, and the answer that the client makes of them."""
    with client.responses.stream(model="tiny", **asked) as stream:
        events = list(stream)
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.id, item.status) for item in done] == [(item.id, item.status) for item in events[-1].response.output]
    return events, events[-1].response


def test_a_text_is_the_same_whole_and_streamed(client: Any) -> None:
    asked = {"input": "Hi", "instructions": "Be short.", "max_output_tokens": 24, "extra_body": {"seed": 1}, **QUIET}
    whole = client.responses.create(model="tiny", **asked)
    events, streamed = events_of(client, **asked)
    assert whole.output_text
    assert streamed.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert whole.status in ("completed", "incomplete")
    assert (whole.incomplete_details is None) == (whole.status == "completed")
    assert events[-1].type == f"response.{whole.status}"
    usage = whole.usage
    assert usage.total_tokens == streamed.usage.total_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_forced_calls_are_items_whose_arguments_are_streamed(client: Any, choice: Any) -> None:
    asked = {"input": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "tool_choice": choice, **QUIET}
    asked |= {"extra_body": {"seed": 3}, "parallel_tool_calls": False}
    whole = client.responses.create(model="tiny", **asked)
    events, streamed = events_of(client, **asked)
    assert [item.type for item in whole.output] == ["function_call"] == [item.type for item in streamed.output]
    call = whole.output[0]
    jsonschema.validate(json.loads(call.arguments), CITY)
    assert (call.name, call.arguments) == (streamed.output[0].name, streamed.output[0].arguments)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == call.arguments


def test_a_conversation_goes_on_with_the_items_that_were_given(client: Any, qwen: Serving) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "parallel_tool_calls": False, **QUIET}
    first = client.responses.create(input="Hi", tool_choice="required", **asked)
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}
    talk = [{"role": "user", "content": "Hi"}, *[item.to_dict() for item in first.output], result]
    second = client.responses.create(input=talk, max_output_tokens=2, **asked)
    calls = [
        {"type": "function", "function": {"name": item.name, "arguments": json.loads(item.arguments)}}
        for item in first.output
        if item.type == "function_call"
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "Sun."},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    ids = qwen.llm.tokenizer.encode_chat(messages, tools=tools, enable_thinking=False)
    assert second.usage.input_tokens == len(ids)


def test_thoughts_and_forms(client: Any) -> None:
    form = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    found = client.responses.create(model="tiny", input="Hi", text=form, max_output_tokens=80, **QUIET)
    jsonschema.validate(json.loads(found.output_text), CITY)
    # A prompt that ends within a thought.
    opened = {"chat_template_kwargs": {"enable_thinking": True}, "seed": 5}
    events, streamed = events_of(client, input="Hi", max_output_tokens=5, extra_body=opened)
    assert (streamed.status, events[-1].type) == ("incomplete", "response.incomplete")
    assert streamed.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in streamed.output] == ["reasoning"]
    assert streamed.output[0].content[0].text
    assert streamed.usage.output_tokens_details.reasoning_tokens == 5


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "An item should have type message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "'input_text'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": "required"}, "given without tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "Invalid type"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"model": "other"}, "not served"),
    ],
)
def test_what_the_server_can_not_do_is_refused(qwen: Serving, body: dict[str, Any], said: str) -> None:
    answer = qwen.post(PATH, {"input": "Hi", **body})
    assert (answer.status_code in (400, 404), said in answer.json()["error"]["message"]) == (True, True), answer.text
