"""From a rendered conversation to token ids: control tokens come from what the template wrote, and from nothing else.

Nothing is concluded from the text before it is encoded, since a normaliser may make a control token of anything. The
ids are looked at, and each that counts as control has to come from characters of the right writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from onewave.engine.text.chat_template import RenderedChat
from onewave.engine.text.traced import OPERATOR, TEMPLATE

if TYPE_CHECKING:
    from onewave.engine.text.tokenizer import Tokenizer


def encode_rendered(tokenizer: Tokenizer, chat: RenderedChat) -> list[int]:
    """Token ids of a rendered conversation.

    This is one ordinary encoding, if all its control tokens are the template's, and its tags not the user's. Otherwise
    the text is cut at those that are, and what lies between is encoded with control tokens and tags read as text.
    """
    return _ChatEncoder(tokenizer, chat).ids()


class _Token(NamedTuple):
    """A control token or tag, and the characters that it stands for."""

    id: int
    start: int
    end: int


class _ChatEncoder:
    """One conversation and its tokenizer. tags: ids of the template's tags. marks: those and all control tokens."""

    def __init__(self, tokenizer: Tokenizer, chat: RenderedChat) -> None:
        self.tokenizer, self.text, self.writers = tokenizer, chat.text, chat.writers
        self.added = {piece.id: piece for piece in tokenizer.parts.added}
        self.tags = frozenset(i for i, piece in self.added.items() if piece.content in chat.tags)
        self.marks = tokenizer.special_ids | self.tags

    def ids(self) -> list[int]:
        """As encode_rendered."""
        ids, tokens = self._encode(self.text)
        ends = [0, *(token.end for token in tokens)]
        if all(t.start >= end and self._may_stand(t) for t, end in zip(tokens, ends, strict=False)):
            return ids
        ids = list[int]()
        position = 0
        for token in self._rightful():
            ids += self._plain(position, token.start)
            ids.append(token.id)
            position = token.end
        return ids + self._plain(position, len(self.text))

    def _plain(self, start: int, end: int) -> list[int]:
        return self.tokenizer.encode_plain(self.text[start:end], at_start=start == 0, tags=self.tags)

    def _encode(self, text: str) -> tuple[list[int], list[_Token]]:
        """Ids of a text, and those of them that are control tokens or tags."""
        encoding = self.tokenizer.encode_whole(text)
        ids = encoding.ids
        if self.marks.isdisjoint(ids):
            return ids, []
        spans = ((i, encoding.token_to_chars(at)) for at, i in enumerate(ids) if i in self.marks)
        return ids, [_Token(i, *(span or (0, 0))) for i, span in spans]

    def _may_stand(self, token: _Token) -> bool:
        """Whether the writers of a token's characters may write it. The characters have to make it by themselves too: a
        normaliser's insertions are said to come from their neighbours."""
        text = self.text[token.start : token.end]
        start = token.start + len(text) - len(text.lstrip())
        text = text.strip()
        lowest = min(self.writers[start : start + len(text)], default=0)
        if lowest < (OPERATOR if token.id in self.tags else TEMPLATE):
            return False
        written_out = token.id in self.added and self.added[token.id].content == text
        return written_out or token.id in self.tokenizer.encode_whole(text).ids

    def _rightful(self) -> Iterator[_Token]:
        """The control tokens and tags in the template's own text, and the tags in an operator's."""
        position = 0
        for token in [*self._tokens_in(0, len(self.text), rb"\x02+"), _Token(-1, len(self.text), len(self.text))]:
            between = self._tokens_in(position, token.start, rb"[\x01\x02]+")
            yield from (tag for tag in between if tag.id in self.tags)
            if token.id >= 0:
                yield token
            position = token.end

    def _tokens_in(self, done: int, last: int, writers: bytes) -> Iterator[_Token]:
        """Control tokens and tags in the runs of some writers, with the whitespace that they take along."""
        text = self.text
        for run in re.compile(writers).finditer(self.writers, done, last):
            for i, start, end in self._encode(text[run.start() : run.end()])[1]:
                start, end, piece = start + run.start(), end + run.start(), self.added.get(i)
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
