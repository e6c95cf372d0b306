"""The conversations that LLM.chat takes, and how they become a prompt. No torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, shown
from onewave.engine.arguments import flag

Message = Mapping[str, Any]
Conversation = Sequence[Message]
# Names that a template is called with besides, or that have an argument of their own.
_NOT_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message", "self")


@dataclass(frozen=True, kw_only=True)
class ChatLayout:
    """How a conversation becomes a prompt: LLM.chat's arguments beside the messages, checked.

    add_generation_prompt: end with the head of an answer. continue_final_message: end within the last message instead.
    tools: JSON schemas of the functions that the model may call. chat_template: Jinja source, or the name of one of the
    model's templates. chat_template_kwargs: further variables for it. Raises InvalidArgumentError.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        flag("add_generation_prompt", self.add_generation_prompt)
        if flag("continue_final_message", self.continue_final_message) and self.add_generation_prompt:
            raise InvalidArgumentError(
                "continue_final_message",
                got="True with add_generation_prompt",
                allowed="one of the two",
                next="Pass add_generation_prompt=False.",
            )
        if self.tools is not None:
            check_tools(self.tools)
        _check_variables(self.chat_template_kwargs)
        if self.tools is not None and "tools" in (self.chat_template_kwargs or {}):
            raise InvalidArgumentError("tools", got="given twice", allowed="once: tools= or chat_template_kwargs")

    def variables(self) -> dict[str, Any]:
        """The variables of the template, and the template itself where one is named."""
        named = {"tools": self.tools, "chat_template": self.chat_template}
        return {**(self.chat_template_kwargs or {}), **{k: v for k, v in named.items() if v is not None}}


def check_tools(tools: object) -> list[Mapping[str, Any]]:
    """Pass on a list of JSON schemas. Raises InvalidArgumentError."""
    allowed = 'a list of {"type": "function", "function": {...}}'
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InvalidArgumentError("tools", got=shown(cast("object", tools)), allowed=allowed)
    for tool in cast("Sequence[object]", tools):
        if not isinstance(tool, Mapping):
            raise InvalidArgumentError("tools", got=f"a list with {shown(tool)}", allowed=allowed)
    return list(cast("Sequence[Mapping[str, Any]]", tools))


def is_template(text: str) -> bool:
    """Whether a text can be a chat template: one that writes or decides nothing would lose the messages."""
    return re.search(r"\{[{%]", text) is not None


def parse_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Take one conversation or several. Raises InvalidArgumentError for anything else, nothing at all included."""
    given = cast("object", messages)
    allowed = 'a list of {"role": ..., "content": ...}, or a list of such lists'
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise InvalidArgumentError("messages", got=type(cast("object", given)).__name__, allowed=allowed)
    if not given:
        raise InvalidArgumentError("messages", got="an empty list", allowed=allowed)
    items = list(cast("Sequence[object]", given))
    if isinstance(items[0], Mapping):
        return [cast("Conversation", items)]
    for item in items:
        if not isinstance(item, Sequence) or isinstance(item, (str, bytes)) or not item:
            raise InvalidArgumentError("messages", got=f"a list with {shown(cast('object', item))}", allowed=allowed)
    return cast("list[Conversation]", items)


def num_characters(conversation: Conversation) -> int:
    """Characters of what messages say, before anything has looked at them."""
    given = cast("Sequence[object]", conversation)
    messages = [cast("Message", message) for message in given if isinstance(message, Mapping)]
    return sum(len(str(message.get("content"))) for message in messages)


def _check_variables(variables: object) -> None:
    allowed = "a mapping from names of template variables to values"
    if variables is not None and not isinstance(variables, Mapping):
        raise InvalidArgumentError("chat_template_kwargs", got=shown(variables), allowed=allowed)
    for name in cast("Mapping[object, object]", variables or {}):
        if not isinstance(name, str):
            raise InvalidArgumentError("chat_template_kwargs", got=f"a name {shown(name)}", allowed=allowed)
        if name in _NOT_VARIABLES:
            raise InvalidArgumentError(
                "chat_template_kwargs", got=name, allowed=f"names other than {', '.join(_NOT_VARIABLES)}"
            )
