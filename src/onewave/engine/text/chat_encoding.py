"""From a rendered conversation to token ids: control tokens come from what the template wrote, and from nothing else.

Added tokens cut a text before all else in the `tokenizers` library, and what lies between is encoded piece by piece.
So cutting at the template's own control tokens beforehand gives the ids of the whole. In the pieces control tokens are
text, whatever a normaliser makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from onewave.engine.text.chat_template import RenderedChat

if TYPE_CHECKING:
    from onewave.engine.text.tokenizer import Tokenizer


def encode_rendered(tokenizer: Tokenizer, chat: RenderedChat) -> list[int]:
    """Token ids of a rendered conversation.

    The text is cut at the control tokens and tags that the template wrote, and at an operator's tags. What lies between
    is encoded with control tokens and tags read as text.
    """
    return _ChatEncoder(tokenizer, chat).ids()


class _Token(NamedTuple):
    """A control token or tag, and the characters that it stands for."""

    id: int
    start: int
    end: int


class _ChatEncoder:
    """One conversation and its tokenizer. tags: ids of the template's tags."""

    def __init__(self, tokenizer: Tokenizer, chat: RenderedChat) -> None:
        self.tokenizer, self.text, self.writers = tokenizer, chat.text, chat.writers
        self.added = {piece.id: piece for piece in tokenizer.parts.added}
        self.tags = {i: piece.content for i, piece in self.added.items() if piece.content in chat.tags}

    def ids(self) -> list[int]:
        tags, stretches = frozenset(self.tags), self.tokenizer.stretches
        ids: list[int] = []
        position = 0
        for token in self._tokens():
            ids += stretches.ids(self.text[position : token.start], at_start=position == 0, tags=tags)
            ids.append(token.id)
            position = token.end
        return ids + stretches.ids(self.text[position:], at_start=position == 0, tags=tags)

    def _tokens(self) -> Iterator[_Token]:
        """The control tokens and tags in the template's own text, and the tags in an operator's."""
        position = 0
        end = _Token(-1, len(self.text), len(self.text))
        for token in [*self._tokens_in(0, len(self.text), rb"\x02+"), end]:
            if any(tag in self.text[position : token.start] for tag in self.tags.values()):
                between = self._tokens_in(position, token.start, rb"[\x01\x02]+")
                yield from (tag for tag in between if tag.id in self.tags)
            if token is not end:
                yield token
            position = token.end

    def _tokens_in(self, done: int, last: int, writers: bytes) -> Iterator[_Token]:
        """Control tokens and tags in the runs of some writers, with the whitespace that they take along."""
        text = self.text
        for run in re.compile(writers).finditer(self.writers, done, last):
            for i, start, end in self._found(run.start(), run.end()):
                piece = self.added.get(i)
                beside = text[max(0, start - 1) : start] + text[end : end + 1]
                if piece is not None and piece.single_word and re.search(r"\w", beside):
                    continue
                while piece is not None and piece.lstrip and start > done and text[start - 1].isspace():
                    start -= 1
                while piece is not None and piece.rstrip and end < last and text[end].isspace():
                    end += 1
                if start >= done:
                    yield _Token(i, start, end)
                    done = end

    def _found(self, start: int, end: int) -> Iterator[_Token]:
        """The control tokens and tags of a stretch of the text, encoded alone."""
        encoding = self.tokenizer.encode_whole(self.text[start:end])
        for at, i in enumerate(encoding.ids):
            if i in self.tokenizer.control_ids or i in self.tags:
                span = encoding.token_to_chars(at)
                if span is not None:
                    yield _Token(i, start + span[0], start + span[1])
