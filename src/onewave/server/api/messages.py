"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, cast

import pydantic_core
from fastapi import APIRouter, Request
from starlette.responses import Response

from onewave.engine.output import CompletionOutput, RequestOutput
from onewave.engine.params import SamplingParams
from onewave.engine.text.conversations import ChatLayout
from onewave.server import conversation
from onewave.server.answers.blocks import Block, BlockEvent, Blocks
from onewave.server.conversation import Talk, text_of
from onewave.server.http.errors import as_anthropic, as_api_error
from onewave.server.http.events import EventResponse, event, json_response, until_gone
from onewave.server.protocol import messages as protocol
from onewave.server.protocol.base import ERRORS, whole_or_streamed
from onewave.server.served import Served, answer_id, served_of
from onewave.server.turn import Delta, Turn, steps, usage_of, whole

router = APIRouter()

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages", responses=whole_or_streamed(protocol.MessageAnswer))
async def create_message(body: protocol.MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    served = served_of(request)
    name = served.model_of(body.model)
    params = SamplingParams(max_tokens=body.max_tokens, stop=body.stop_sequences, **body.given())
    turn = await conversation.turn_of(served, _talk(body, params), answer_id(request, "msg_"))
    head = {"id": turn.request_id, "type": "message", "role": "assistant", "model": name}
    if body.stream:
        return EventResponse(_events(served, turn, head))
    return json_response(await until_gone(request, _whole(served, turn, head)))


@router.post("/v1/messages/count_tokens", responses={200: {"model": protocol.CountAnswer}, **ERRORS})
async def count_tokens(body: protocol.CountRequest, request: Request) -> Response:
    """Count the tokens of a conversation's prompt."""
    served = served_of(request)
    served.model_of(body.model)
    return json_response({"input_tokens": await conversation.count_tokens(served, _talk(body, SamplingParams()))})


def _talk(body: protocol.CountRequest, params: SamplingParams) -> Talk:
    tools, variables = body.asked_tools, dict(body.chat_template_kwargs or {})
    if body.thinking is not None and body.thinking.type != "adaptive":
        variables.setdefault("enable_thinking", body.thinking.type == "enabled")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system)})
    for message in body.messages:
        messages += _as_dicts(message)
    # An assistant's last message is the beginning of the answer.
    open_end = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    asked = body if isinstance(body, protocol.MessagesRequest) else None
    return Talk(
        messages=messages,
        params=params,
        tools=tools.for_template(),
        wanted=tools.wanted(body.form),
        layout=ChatLayout(
            add_generation_prompt=not open_end, continue_final_message=open_end, chat_template_kwargs=variables
        ),
        priority=(asked.priority or 0) if asked is not None else 0,
        cache_salt=asked.cache_salt if asked is not None else None,
    )


def _as_dicts(message: protocol.InputMessage) -> list[dict[str, Any]]:
    """A message as chat templates read it: results of tools are messages of their own, before the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    text, thoughts, calls = "", "", list[dict[str, Any]]()
    for block in message.content:
        if isinstance(block, protocol.TextBlock):
            text += block.text
        elif isinstance(block, protocol.ThinkingBlock):
            thoughts += block.thinking
        elif isinstance(block, protocol.ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            assert isinstance(block, protocol.ToolResultBlock)
            content = ("Error: " if block.is_error else "") + text_of(block.content or "")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    said: dict[str, Any] = {"role": message.role, "content": text}
    if thoughts:
        said["reasoning_content"] = thoughts
    if calls:
        said["tool_calls"] = calls
    return results if results and len(said) == 2 and not text else [*results, said]


async def _whole(served: Served, turn: Turn, head: dict[str, Any]) -> dict[str, Any]:
    done = await whole(served, turn)
    blocks = Blocks()
    for _ in [*blocks.push(done.deltas[0].piece), *blocks.finish()]:
        pass
    content = [_block(block, whole=True) for block in blocks.all]
    return {**head, "content": content, **_end(done.deltas[0]), "usage": _usage(done.result)}


async def _events(served: Served, turn: Turn, head: dict[str, Any]) -> AsyncGenerator[bytes]:
    blocks, begun = Blocks(), False
    try:
        async with aclosing(steps(served, turn)) as found:
            async for step in found:
                if not begun:
                    begun = True
                    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
                    message = {**head, **empty, "usage": {**_usage(step.result), "output_tokens": 0}}
                    yield _event("message_start", message=message)
                for delta in step.deltas:
                    changes = [*blocks.push(delta.piece)]
                    if delta.finish_reason is not None:
                        changes += blocks.finish()
                    for change in changes:
                        for each in _of_block(change):
                            yield each
                    if delta.finish_reason is not None:
                        yield _event("message_delta", delta=_end(delta), usage=_usage(step.result))
                        yield _event("message_stop")
    except Exception as error:
        if not begun:
            raise
        yield event(as_anthropic(as_api_error(error)), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _of_block(found: BlockEvent) -> Iterator[bytes]:
    """The events of what becomes of a block."""
    block, index = found.block, found.block.index
    if found.what == "begin":
        yield _event("content_block_start", index=index, content_block=_block(block, whole=False))
    elif found.what == "delta":
        kind, key = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        yield _event("content_block_delta", index=index, delta={"type": kind, key: found.delta})
    else:
        if block.kind == "reasoning":  # nothing signs thoughts here, and clients wait for it
            yield _event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": ""})
        yield _event("content_block_stop", index=index)


def _block(block: Block, *, whole: bool) -> dict[str, Any]:
    text = block.text if whole else ""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; {} for what is cut off, too deep, or no JSON (NaN, 1e999)."""
    try:
        found: Any = pydantic_core.from_json(arguments or "{}")
        json.dumps(found, allow_nan=False)
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _end(delta: Delta) -> dict[str, Any]:
    output: CompletionOutput = delta.output
    if isinstance(output.stop_reason, str) and delta.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    return {"stop_reason": _REASONS[delta.finish_reason or "stop"], "stop_sequence": None}


def _usage(result: RequestOutput) -> dict[str, int]:
    usage = usage_of(result)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
