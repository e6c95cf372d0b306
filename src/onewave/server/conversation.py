"""From a conversation, its tools and the wanted form of the answer to the turn that runs: what all chat APIs share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError
from onewave.engine.params import SamplingParams
from onewave.engine.text.conversations import ChatLayout
from onewave.server.answers.described import describe_tools
from onewave.server.answers.plan import Wanted, plan_answer
from onewave.server.served import Served
from onewave.server.turn import Turn


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation to answer.

    messages: as chat templates read them, with tool calls' arguments as objects. params: without a form. tools: for the
    template. wanted: what the answer is to be. shows_control: whether control tokens are to be in the text; None: where
    the answer's form has some. layout: the template's other variables.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    wanted: Wanted = field(default_factory=Wanted)
    shows_control: bool | None = None
    layout: ChatLayout = field(default_factory=lambda: ChatLayout(add_generation_prompt=True))
    priority: int = 0
    cache_salt: str | None = None


async def turn_of(served: Served, talk: Talk, request_id: str) -> Turn:
    """What runs for a conversation. Raises InvalidArgumentError, UnsupportedError, TokenizerError."""
    style = served.style
    messages, layout = list(talk.messages), talk.layout
    if not style.reads_tools:
        messages = describe_tools(messages, talk.tools)
    elif talk.tools:
        layout = replace(layout, tools=list(talk.tools))
    job = await served.engine.prepare_chat(cast("Any", messages), talk.params, layout)
    plan = plan_answer(style, job.prompt or "", talk.wanted)
    params, grammar = job.params, None
    if plan.form is not None:
        compile_form = served.engine.llm.compile_form
        if talk.wanted.form is not None:  # alone: an error names what the caller wrote
            grammar = await asyncio.to_thread(compile_form, talk.wanted.form)
        grammar = await asyncio.to_thread(compile_form, plan.form)
        params = replace(params, structured_outputs=plan.form)
    if talk.shows_control is None and plan.shows_control:
        params = replace(params, skip_special_tokens=False)
    job = job._replace(params=params, grammar=grammar, priority=talk.priority, cache_salt=talk.cache_salt)
    return Turn(job, request_id, plan.make_reader)


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose earlier calls have their arguments as objects, as templates write them down themselves.

    Raises InvalidArgumentError for arguments that are no JSON object."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [{**call, "function": _with_object(call["function"])} for call in calls]}


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        got = f"{function['name']!r} with arguments that are no JSON object"
        raise InvalidArgumentError("messages: tool_calls", got=got, allowed="a JSON object, as text")
    return {**function, "arguments": cast("dict[str, Any]", arguments)}
