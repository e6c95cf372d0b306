"""From a conversation, its tools and the wanted form of the answer to the turn that runs: what all chat APIs share."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError
from onewave.engine.params import SamplingParams
from onewave.engine.text.conversations import ChatLayout, is_template
from onewave.server.answers.described import describe_tools
from onewave.server.answers.plan import Function, Wanted, arguments_form, plan_answer
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
    """Return the turn that runs a conversation. Raises InvalidArgumentError, UnsupportedError, TokenizerError."""
    messages, layout = with_tools(served, talk.messages, talk.tools, talk.layout)
    job = await served.engine.prepare_chat(messages, talk.params, layout)
    served.check_context(job)
    begun = str(messages[-1]["content"]) if layout.continue_final_message else ""
    plan = plan_answer(served.style, job.prompt or "", talk.wanted, begun)
    params, grammar = job.params, None
    if plan.form is not None:
        compile_form = served.engine.llm.compile_form
        if talk.wanted.form is not None:  # alone: an error names what the caller wrote
            grammar = await asyncio.to_thread(compile_form, talk.wanted.form)
        try:
            grammar = await asyncio.to_thread(compile_form, plan.form)
        except InvalidArgumentError:
            for function in talk.wanted.functions:
                await asyncio.to_thread(_check_arguments, served, function)
            raise
        params = replace(params, structured_outputs=plan.form)
    if talk.shows_control is None and plan.shows_control:
        params = replace(params, skip_special_tokens=False)
    job = job._replace(params=params, grammar=grammar, priority=talk.priority, cache_salt=talk.cache_salt)
    return Turn(job, request_id, plan.make_reader)


def _check_arguments(served: Served, function: Function) -> None:
    """Raise InvalidArgumentError, with the function's name, for parameters that have no grammar."""
    try:
        served.engine.llm.compile_form(arguments_form(function))
    except InvalidArgumentError as error:
        raise InvalidArgumentError("tools", got=f"{function.name!r}: {error.got}") from error


async def count_tokens(served: Served, talk: Talk) -> int:
    """The tokens of a conversation's prompt. Raises as turn_of."""
    messages, layout = with_tools(served, talk.messages, talk.tools, talk.layout)
    _, ids = await asyncio.to_thread(served.tokenizer.lay_out_chat, messages, layout)
    return len(ids)


def with_tools(
    served: Served, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], layout: ChatLayout
) -> tuple[Any, ChatLayout]:
    """A conversation and the template's variables, with tools in either of them. Raises InvalidArgumentError for a
    template that the request brings, unless the server trusts them: nothing ends one that computes for ever."""
    template = layout.variables().get("chat_template")
    brought = template is not None and (not isinstance(template, str) or is_template(template))
    if brought and not served.options.trust_request_chat_template:
        allowed = "the name of one of the model's templates; one of its own where the server trusts callers"
        raise InvalidArgumentError(
            "chat_template", got="a template", allowed=allowed, next="Start it with --trust-request-chat-template."
        )
    if not served.style.reads_tools:
        return describe_tools(messages, tools), layout
    return messages, replace(layout, tools=list(tools)) if tools else layout


def template_variables(effort: str | None, verbosity: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A chat template's variables. effort: of reasoning; "none" is the usual switch against thoughts."""
    said: dict[str, Any] = {} if verbosity is None else {"verbosity": verbosity}
    if effort is not None:
        said |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**said, **(given or {})}


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


def text_of(content: str | Sequence[Any]) -> str:
    """The text of a message's content. content: or its parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
