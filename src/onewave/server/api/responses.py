"""/v1/responses: OpenAI's newer API, stateless. The client sends the whole conversation each time."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from onewave.engine.output import RequestOutput
from onewave.engine.params import SamplingParams
from onewave.engine.text.conversations import ChatLayout
from onewave.server import conversation
from onewave.server.answers.blocks import Block, BlockEvent, Blocks
from onewave.server.conversation import Talk, template_variables, text_of, with_objects
from onewave.server.http.errors import as_api_error
from onewave.server.http.events import EventResponse, event, json_response, until_gone
from onewave.server.protocol import responses as protocol
from onewave.server.protocol.base import whole_or_streamed
from onewave.server.served import Served, answer_id, served_of
from onewave.server.turn import Turn, steps, usage_of, whole

router = APIRouter()


@router.post("/v1/responses", responses=whole_or_streamed(protocol.ResponseAnswer))
async def create_response(body: protocol.ResponsesRequest, request: Request) -> Response:
    """Answer a conversation with items: thoughts, messages, calls."""
    served = served_of(request)
    name = served.model_of(body.model)
    turn = await conversation.turn_of(served, _talk(body), answer_id(request, "resp_"))
    answer = _Answer(served, _head(body, name, turn.request_id))
    if body.stream:
        return EventResponse(_events(served, turn, answer))
    return json_response(await until_gone(request, _whole(served, turn, answer)))


def _talk(body: protocol.ResponsesRequest) -> Talk:
    tools, effort = body.asked_tools, None if body.reasoning is None else body.reasoning.effort
    verbosity = None if body.text is None else body.text.verbosity
    return Talk(
        messages=_messages(body),
        params=SamplingParams(max_tokens=body.max_output_tokens, **body.given("min_p")),
        tools=tools.for_template(),
        wanted=tools.wanted(body.form),
        layout=ChatLayout(chat_template_kwargs=template_variables(effort, verbosity, body.chat_template_kwargs)),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )


def _messages(body: protocol.ResponsesRequest) -> list[dict[str, Any]]:
    """The items as messages of a chat template. Thoughts and calls join the assistant's message that they belong to."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [protocol.Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for item in items:
        if isinstance(item, protocol.Message):
            role = "system" if item.role == "developer" else item.role
            _join(messages, role, {"content": text_of(item.content)})
        elif isinstance(item, protocol.FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, protocol.FunctionCall):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _join(messages, "assistant", {"tool_calls": [call]})
        else:
            assert isinstance(item, protocol.ReasoningItem)
            thought = "".join(part.text for part in item.content or ())
            if thought:
                messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    return [with_objects(message) for message in messages]


def _join(messages: list[dict[str, Any]], role: str, more: dict[str, Any]) -> None:
    """Add to the assistant's last message what it does not have yet, or begin a message."""
    last = messages[-1] if messages and role == "assistant" else {}
    if last.get("role") == "assistant" and "tool_calls" in more:
        last["tool_calls"] = last.get("tool_calls", []) + more["tool_calls"]
    elif last.get("role") == "assistant" and not last["content"] and "tool_calls" not in last:
        last.update(more)
    else:
        messages.append({"role": role, "content": "", **more})


def _head(body: protocol.ResponsesRequest, name: str, response_id: str) -> dict[str, Any]:
    """The answer's fields that say what was asked."""
    asked = body.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None, **asked.get("reasoning", {})},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **asked.get("text", {})},
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": [{"strict": False, "parameters": None, **tool} for tool in asked.get("tools", ())],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


class _Answer:
    """One answer and the events that make it."""

    def __init__(self, served: Served, head: dict[str, Any]) -> None:
        self._served, self.fields, self.blocks = served, head, Blocks()
        self._numbers = count()
        self._cut = False

    def event(self, kind: str, **fields: Any) -> bytes:
        """An event with its number."""
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def of_response(self, kind: str) -> bytes:
        """An event that shows the answer so far."""
        return self.event(f"response.{kind}", response=self.fields)

    def of_block(self, found: BlockEvent) -> Iterator[bytes]:
        """The events of what becomes of a block."""
        block = found.block
        place: dict[str, Any] = {"item_id": _item_id(block), "output_index": block.index}
        part = {**place, "content_index": 0}
        stem = {"text": "response.output_text", "reasoning": "response.reasoning_text"}.get(block.kind)
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        item = {"output_index": block.index, "item": self._item(block, done=found.what == "end")}
        if found.what == "begin":
            yield self.event("response.output_item.added", **item)
            if stem is not None:
                yield self.event("response.content_part.added", **part, part=_part(block, ""))
        elif found.what == "delta":
            if stem is None:
                yield self.event("response.function_call_arguments.delta", **place, delta=found.delta)
            else:
                yield self.event(f"{stem}.delta", **part, delta=found.delta, **logprobs)
        else:
            if stem is None:
                said = {"name": block.name, "arguments": block.text}
                yield self.event("response.function_call_arguments.done", **place, **said)
            else:
                yield self.event(f"{stem}.done", **part, text=block.text, **logprobs)
                yield self.event("response.content_part.done", **part, part=_part(block, block.text))
            yield self.event("response.output_item.done", **item)

    def finish(self, reason: str | None) -> list[BlockEvent]:
        """Take why it ended; end the block that is open."""
        self._cut = reason == "length"
        return [*self.blocks.finish()]

    def end(self, result: RequestOutput) -> str:
        """Fill in how it ended; return the word for that."""
        status = "incomplete" if self._cut else "completed"
        output = [self._item(block, done=True) for block in self.blocks.all]
        usage = usage_of(result)
        thoughts = "".join(block.text for block in self.blocks.all if block.kind == "reasoning")
        num_thoughts = len(self._served.tokenizer.encode(thoughts, add_special_tokens=False)) if thoughts else 0
        self.fields |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "output": output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": min(num_thoughts, usage["completion_tokens"])},
                "total_tokens": usage["total_tokens"],
            },
        }
        return status

    def _item(self, block: Block, *, done: bool) -> dict[str, Any]:
        """A block as an item; the last one of an answer that was cut is incomplete."""
        cut = self._cut and block is self.blocks.all[-1]
        item: dict[str, Any] = {"id": _item_id(block), "status": "in_progress"}
        if done:
            item["status"] = "incomplete" if cut else "completed"
        parts = [_part(block, block.text)] if done else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        if block.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": parts}
        return {**item, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}


async def _whole(served: Served, turn: Turn, answer: _Answer) -> dict[str, Any]:
    done = await whole(served, turn)
    for _ in answer.blocks.push(done.deltas[0].piece):
        pass
    answer.finish(done.deltas[0].finish_reason)
    answer.end(done.result)
    return answer.fields


async def _events(served: Served, turn: Turn, answer: _Answer) -> AsyncGenerator[bytes]:
    begun = False
    try:
        async with aclosing(steps(served, turn)) as found:
            async for step in found:
                if not begun:
                    begun = True
                    yield answer.of_response("created")
                    yield answer.of_response("in_progress")
                for delta in step.deltas:
                    changes = [*answer.blocks.push(delta.piece)]
                    if delta.finish_reason is not None:
                        changes += answer.finish(delta.finish_reason)
                    for change in changes:
                        for each in answer.of_block(change):
                            yield each
                    if delta.finish_reason is not None:
                        yield answer.of_response(answer.end(step.result))
    except Exception as error:
        if not begun:
            raise
        said = {"code": "server_error", "message": as_api_error(error).message}
        answer.fields |= {"status": "failed", "error": said}
        yield answer.of_response("failed")


def _item_id(block: Block) -> str:
    return {"reasoning": "rs_", "text": "msg_", "call": "fc_"}[block.kind] + block.block_id


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
