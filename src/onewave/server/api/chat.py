"""/v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from onewave.base.errors import InvalidArgumentError
from onewave.engine.text.conversations import ChatLayout
from onewave.server import conversation
from onewave.server.answers.pieces import CallPart, Piece
from onewave.server.conversation import Talk, template_variables, with_objects
from onewave.server.http.events import EventResponse, event, guarded, json_response, until_gone
from onewave.server.logprobs import chat_logprobs, prompt_logprobs
from onewave.server.protocol.base import whole_or_streamed
from onewave.server.protocol.chat import ChatAnswer, ChatMessage, ChatRequest
from onewave.server.served import Served, answer_id, served_of
from onewave.server.turn import Delta, Turn, steps, usage_of, whole

router = APIRouter()


@router.post("/v1/chat/completions", responses=whole_or_streamed(ChatAnswer))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    served = served_of(request)
    name = served.model_of(body.model)
    turn = await turn_of(served, body, answer_id(request, "chatcmpl-"))
    head = {"id": turn.request_id, "created": int(time.time()), "model": name}
    if body.stream:
        return EventResponse(guarded(_chunks(served, body, turn, head)))
    return json_response(await until_gone(request, _answer(served, body, turn, head)))


async def turn_of(served: Served, body: ChatRequest, request_id: str) -> Turn:
    """Return the turn that runs a request. Raises InvalidArgumentError, TokenizerError."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgumentError("top_logprobs", got=str(body.top_logprobs), allowed="with logprobs=true")
    params = body.sampling_params(max_tokens=body.token_limit, logprobs=body.num_logprobs, structured_outputs=None)
    layout = ChatLayout(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=template_variables(body.reasoning_effort, body.verbosity, body.chat_template_kwargs),
    )
    tools = body.asked_tools
    talk = Talk(
        messages=as_conversation(body.messages),
        params=params,
        tools=tools.for_template(),
        wanted=tools.wanted(body.form),
        shows_control=None if body.skip_special_tokens is None else not body.skip_special_tokens,
        layout=layout,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    return await conversation.turn_of(served, talk, request_id)


def as_conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates read them."""
    return [_as_dict(message) for message in messages]


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    if fields["role"] == "developer":  # OpenAI's newer word
        fields["role"] = "system"
    if message.content is None:
        fields["content"] = ""
    return with_objects(fields)


async def _answer(served: Served, body: ChatRequest, turn: Turn, head: dict[str, Any]) -> dict[str, Any]:
    done = await whole(served, turn)
    answer: dict[str, Any] = {**head, "object": "chat.completion", "choices": []}
    for delta in done.deltas:
        message: dict[str, Any] = {"role": "assistant", "content": delta.piece.content, "refusal": None}
        message |= _beside_content(delta.piece)
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
        answer["choices"].append(_choice(served, body, delta, message=message))
    answer["usage"] = usage_of(done.result)
    if body.return_token_ids:
        answer["prompt_token_ids"] = done.result.prompt_token_ids
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(done.result.prompt_logprobs)
    return answer


async def _chunks(served: Served, body: ChatRequest, turn: Turn, head: dict[str, Any]) -> AsyncGenerator[bytes]:
    head = {**head, "object": "chat.completion.chunk"}
    last: Any = None
    begun = False
    async with aclosing(steps(served, turn)) as found:
        async for step in found:
            last = step.result
            usage: dict[str, Any] = {}
            if body.include_usage or body.usage_in_chunks:
                known = usage_of(step.result) if body.usage_in_chunks else None
                usage = {"usage": known}
            if not begun:
                begun = True
                for index in range(turn.job.params.n):
                    role = {"role": "assistant", "content": "", "refusal": None}
                    choice = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
                    more = {"prompt_token_ids": step.result.prompt_token_ids} if body.return_token_ids else {}
                    yield event({**head, "choices": [choice], **usage, **more})
            for delta in step.deltas:
                content = {"content": delta.piece.content} if delta.piece.content else {}
                said = {**content, **_beside_content(delta.piece, streamed=True)}
                wanted = body.logprobs or body.return_token_ids
                if said or delta.finish_reason or (wanted and delta.output.token_ids):
                    yield event({**head, "choices": [_choice(served, body, delta, delta=said)], **usage})
    if body.include_usage:
        yield event({**head, "choices": [], "usage": usage_of(last)})


def _choice(served: Served, body: ChatRequest, found: Delta, **said: Any) -> dict[str, Any]:
    output = found.output
    choice: dict[str, Any] = {
        "index": output.index,
        **said,
        "logprobs": chat_logprobs(served, output.logprobs, body.top_logprobs or 0),
        "finish_reason": found.finish_reason,
    }
    if output.stop_reason is not None:
        choice["stop_reason"] = output.stop_reason
    if body.return_token_ids:
        choice["token_ids"] = output.token_ids
    return choice


def _beside_content(piece: Piece, *, streamed: bool = False) -> dict[str, Any]:
    """A message's fields beside its content."""
    fields: dict[str, Any] = {}
    if piece.reasoning:
        fields["reasoning_content"] = piece.reasoning
    if piece.calls:
        fields["tool_calls"] = [_call(part, streamed=streamed) for part in piece.calls]
    return fields


def _call(part: CallPart, *, streamed: bool) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": part.arguments}
    call: dict[str, Any] = {"index": part.index} if streamed else {}
    if part.name is not None:
        call |= {"id": part.call_id, "type": "function"}
        function = {"name": part.name, **function}
    return {**call, "function": function}
