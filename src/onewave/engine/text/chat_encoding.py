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


class _Token(NamedTuple):
    """A control token, and the characters that it stands for."""

    id: int
    start: int
    end: int


def encode_rendered(tokenizer: Tokenizer, chat: RenderedChat) -> list[int]:
    """Token ids of a rendered conversation.

    This is one ordinary encoding, if all its control tokens are the template's, and its tags not the user's. Otherwise
    the text is cut at those that are, and what lies between is encoded with control tokens and tags read as text.
    """
    tags = frozenset(piece.id for piece in tokenizer.parts.added if piece.content in chat.tags)
    ids, tokens = _encode(tokenizer, chat.text, tags)
    end = 0
    for token in tokens:
        if token.start < end or not _may_stand(tokenizer, chat, token):
            break
        end = token.end
    else:
        return ids
    ids = list[int]()
    position = 0
    for token in _rightful_tokens(tokenizer, chat, tags):
        ids += tokenizer.encode_plain(chat.text[position : token.start], at_start=position == 0, tags=tags)
        ids.append(token.id)
        position = token.end
    return ids + tokenizer.encode_plain(chat.text[position:], at_start=position == 0, tags=tags)


def _encode(tokenizer: Tokenizer, text: str, tags: frozenset[int]) -> tuple[list[int], list[_Token]]:
    """Ids of a text, and those of them that are control tokens or tags."""
    encoding = tokenizer.encode_whole(text)
    ids = encoding.ids
    if tokenizer.special_ids.isdisjoint(ids) and tags.isdisjoint(ids):
        return ids, []
    spans = ((i, encoding.token_to_chars(at)) for at, i in enumerate(ids) if i in tokenizer.special_ids or i in tags)
    return ids, [_Token(i, *(span or (0, 0))) for i, span in spans]


def _may_stand(tokenizer: Tokenizer, chat: RenderedChat, token: _Token) -> bool:
    """Whether the writers of a token's characters may write it. The characters have to make it by themselves too: a
    normaliser's insertions are said to come from their neighbours."""
    text = chat.text[token.start : token.end]
    start = token.start + len(text) - len(text.lstrip())
    text = text.strip()
    lowest = min(chat.writers[start : start + len(text)], default=0)
    allowed = TEMPLATE if token.id in tokenizer.special_ids else OPERATOR
    return lowest >= allowed and token.id in tokenizer.encode_whole(text).ids


def _rightful_tokens(tokenizer: Tokenizer, chat: RenderedChat, tags: frozenset[int]) -> Iterator[_Token]:
    """The control tokens and tags in the template's own text, and the tags in an operator's."""
    position = 0
    for token in _tokens_in(tokenizer, chat, tags, (0, len(chat.text)), rb"\x02+"):
        yield from _tags_between(tokenizer, chat, tags, (position, token.start))
        yield token
        position = token.end
    yield from _tags_between(tokenizer, chat, tags, (position, len(chat.text)))


def _tags_between(
    tokenizer: Tokenizer, chat: RenderedChat, tags: frozenset[int], span: tuple[int, int]
) -> Iterator[_Token]:
    found = _tokens_in(tokenizer, chat, tags, span, rb"[\x01\x02]+")
    return (token for token in found if token.id not in tokenizer.special_ids)


def _tokens_in(
    tokenizer: Tokenizer, chat: RenderedChat, tags: frozenset[int], span: tuple[int, int], writers: bytes
) -> Iterator[_Token]:
    """Control tokens and tags in the runs of some writers, with the whitespace that they take along."""
    text, by_id = chat.text, {piece.id: piece for piece in tokenizer.parts.added}
    done, last = span
    for run in re.compile(writers).finditer(chat.writers, *span):
        for i, start, end in _encode(tokenizer, text[run.start() : run.end()], tags)[1]:
            start, end, piece = start + run.start(), end + run.start(), by_id.get(i)
            if piece is not None and piece.single_word and re.match(r"\w", text[end : end + 1]):
                continue
            if piece is not None and piece.single_word and re.match(r"\w", text[max(0, start - 1) : start]):
                continue
            while piece is not None and piece.lstrip and start > done and text[start - 1].isspace():
                start -= 1
            while piece is not None and piece.rstrip and end < last and text[end].isspace():
                end += 1
            if start >= done:
                yield _Token(i, start, end)
                done = end
