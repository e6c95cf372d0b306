"""Sixty calls with the official `anthropic` client, each with what must hold of its answer, for any served model."""

from typing import Any

import anthropic

from kit.serving import WEATHER

TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object", "additionalProperties": False}},
]
HI: Any = {"role": "user", "content": "Say héllo 😀"}
PARTS: list[Any] = [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]
CALLED: list[Any] = [
    HI,
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern", "days": 2}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sun."}]},
            {"type": "text", "text": "And tomorrow?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
# Fields that make a prompt of a request.
PROMPT = ("model", "messages", "system", "tools", "tool_choice", "thinking")
FORCED: dict[str, Any] = {"tools": TOOLS, "max_tokens": 120}
# Requests, and the kinds that the answer's blocks may have.
ASKED: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"text"}),
    ({"system": "Be brief."}, {"text"}),
    ({"system": PARTS}, {"text"}),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"text"},
    ),
    ({"messages": [HI, {"role": "assistant", "content": "Hello"}, HI]}, {"text"}),
    ({"messages": [HI, {"role": "assistant", "content": "Well"}]}, {"text"}),
    ({"stop_sequences": ["e", "a"]}, {"text"}),
    ({"max_tokens": 1}, {"text"}),
    ({"metadata": {"user_id": "someone"}, "service_tier": "auto"}, {"text"}),
    ({"extra_body": {"temperature": 0}}, {"text"}),
    ({"extra_body": {"temperature": 0.7, "top_p": 0.5, "top_k": 4, "seed": 3}}, {"text"}),
    ({"extra_body": {"priority": -1, "cache_salt": "salt", "seed": 4}}, {"text"}),
    ({"tools": TOOLS}, {"text", "tool_use"}),
    ({"tools": TOOLS, "tool_choice": {"type": "none"}}, {"text"}),
    ({**FORCED, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, {"tool_use"}),
    ({**FORCED, "tool_choice": {"type": "tool", "name": "weather"}}, {"tool_use"}),
    ({"messages": CALLED, "tools": TOOLS}, {"text", "tool_use"}),
    ({**FORCED, "messages": CALLED, "tool_choice": {"type": "tool", "name": "now"}}, {"tool_use"}),
    ({"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}, "max_tokens": 200}, {"text"}),
    ({"thinking": {"type": "disabled"}}, {"text"}),
]


def run_all(client: anthropic.Anthropic, model: str) -> int:
    """Make every call; return their number."""
    for asked, kinds in ASKED:
        given = {"model": model, "messages": [HI], **asked}
        counted = client.messages.count_tokens(**{key: given[key] for key in PROMPT if key in given})
        given = {"max_tokens": 8, "extra_body": {"seed": 1}, **given}
        whole = client.messages.create(**given)
        with client.messages.stream(**given) as stream:
            events = [event.type for event in stream]
            streamed = stream.get_final_message()
        assert events[0] == "message_start"
        assert events[-1] == "message_stop"
        for message in (whole, streamed):
            assert {block.type for block in message.content} <= kinds, asked
            assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens
            assert message.usage.output_tokens <= given["max_tokens"]
            assert (message.stop_reason == "stop_sequence") == (message.stop_sequence is not None)
        assert _said(whole) == _said(streamed), asked
        if kinds == {"tool_use"}:
            assert whole.stop_reason == "tool_use"
            assert {call.name for call in whole.content} <= {"weather", "now"}
    return 3 * len(ASKED)


def _said(message: anthropic.types.Message) -> tuple[Any, ...]:
    """All that two answers of one seed have in common."""
    blocks = [{**block.to_dict(), "id": None} for block in message.content]
    return blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens
