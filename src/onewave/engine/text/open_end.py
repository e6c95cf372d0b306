"""A conversation whose last message the model is to continue: its rendering ends where that message's text ends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError
from onewave.engine.text.chat_template import RenderedChat

_MARK = "END-OF-FINAL-MESSAGE"


def mark_end(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], str]:
    """The messages with a mark behind the last one's text, and the mark.

    Of a list of parts the last text gets it. Messages of another shape stay as they are: the template refuses them.
    Raises InvalidArgumentError where there is no text to continue.
    """
    copied: list[Any] = list(messages)
    mark = _MARK
    while mark in str(copied):
        mark += "-"
    last = copied[-1] if copied else None
    if not isinstance(last, Mapping):
        return copied, mark
    fields = cast("Mapping[str, Any]", last)
    content = fields.get("content")
    if isinstance(content, str):
        # The space tells whether the template trims what it writes.
        copied[-1] = {**fields, "content": f"{content}{mark} "}
        return copied, mark
    parts: list[Any] = list(cast("list[Any]", content)) if isinstance(content, list) else []
    if not parts or not isinstance(parts[-1], Mapping) or not isinstance(parts[-1].get("text"), str):  # pyright: ignore[reportUnknownMemberType]
        raise InvalidArgumentError(
            "continue_final_message", got="a last message that does not end with text", allowed="one that does"
        )
    copied[-1] = {**fields, "content": [*parts[:-1], {**parts[-1], "text": f"{parts[-1]['text']}{mark} "}]}
    return copied, mark


def cut_at(chat: RenderedChat, mark: str) -> RenderedChat:
    """The conversation up to its mark; whitespace before it goes where the template trims the message.

    Raises InvalidArgumentError where the template has left the message's end out.
    """
    at = chat.text.rfind(mark)
    if at < 0:
        raise InvalidArgumentError(
            "continue_final_message",
            got="a last message that the template leaves out or changes",
            allowed="another one",
        )
    text, writers = chat.text[:at], chat.writers
    if not chat.text.startswith(f"{mark} ", at):
        text = text.rstrip()
    # A template may write the message before as well.
    while (first := text.find(mark)) >= 0:
        end = first + len(mark) + text.startswith(f"{mark} ", first)
        text, writers = text[:first] + text[end:], writers[:first] + writers[end:]
    return replace(chat, text=text, writers=writers[: len(text)])
