"""From a rendered conversation to token ids, with the messages' own `<|im_end|>` kept as text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onewave.engine.text.chat_template import RenderedChat
from onewave.engine.text.tokenizer_parts import AddedPiece

if TYPE_CHECKING:
    from onewave.engine.text.tokenizer import Tokenizer


def encode_rendered(tokenizer: Tokenizer, chat: RenderedChat) -> list[int]:
    """Token ids of a rendered conversation.

    Where no message holds anything like a control token this is one ordinary encoding. Otherwise the text is cut at
    the tokens that the template wrote, and what lies between is encoded with control tokens read as text.
    """
    if not chat.breaks:
        return tokenizer.encode(chat.text, add_special_tokens=False)
    ids: list[int] = []
    position = 0
    for piece, start, end in _template_tokens(tokenizer.parts.added, chat):
        ids += tokenizer.encode_plain(chat.text[position:start], at_start=position == 0)
        ids.append(piece.id)
        position = end
    return ids + tokenizer.encode_plain(chat.text[position:], at_start=position == 0)


def _template_tokens(added: tuple[AddedPiece, ...], chat: RenderedChat) -> Iterator[tuple[AddedPiece, int, int]]:
    """The added tokens that stand in the text as tokens: (token, start, end), whitespace that it takes along
    included."""
    longest_first = sorted((a for a in added if a.content), key=lambda a: len(a.content), reverse=True)
    if not longest_first:
        return
    by_content = {a.content: a for a in longest_first}
    pattern = re.compile("|".join(map(_pattern, longest_first)))
    position = 0
    while match := pattern.search(chat.text, position):
        group = match.lastindex or 0
        start, end = match.span(group)
        if match[group] in chat.control and _from_message(chat, start, end):
            # The search goes on behind its first character: a token of the template may begin inside.
            position = start + 1
            continue
        yield by_content[match[group]], max(match.start(), position), match.end()
        position = match.end()


def _pattern(piece: AddedPiece) -> str:
    text = f"({re.escape(piece.content)})"
    if piece.single_word:
        text = rf"(?<!\w){text}(?!\w)"
    return (r"\s*" if piece.lstrip else "") + text + (r"\s*" if piece.rstrip else "")


def _from_message(chat: RenderedChat, start: int, end: int) -> bool:
    """Whether the control token at [start, end) came, whole or in part, from a message."""
    after = bisect_right(chat.breaks, start)
    spans_break = after < len(chat.breaks) and chat.breaks[after] < end
    return start in chat.user_starts or spans_break
