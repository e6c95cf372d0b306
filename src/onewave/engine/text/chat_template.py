"""Chat templates: Jinja, in a sandbox, with what transformers' templates expect to find there.

A template mixes its own control tokens with what people wrote. To tell the two apart after rendering, control tokens
inside the messages are wrapped in two marker characters that occur nowhere else; the template may trim, split or
upper-case the text and the markers travel with it. Rendering returns the text without the markers, and where they
were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onewave.base.errors import InvalidArgumentError, TokenizerError, shown
from onewave.engine.text.tokenizer_parts import AddedPiece

MAX_CHARACTERS = 50_000_000
"""Characters of a rendered conversation. Real ones stay far below."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation.

    text: what the model is to read. user_starts: positions in text where a control token copied from a message
    begins. breaks: positions that no control token may span. control: the texts that count as control tokens.
    """

    text: str
    user_starts: frozenset[int]
    breaks: tuple[int, ...]
    control: frozenset[str]


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here they are only words."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML. What json does not know is asked for its text, which refuses.
    how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys, "default": str}
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> Environment:
    extensions = [_GenerationBlock, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


class ChatTemplate:
    """One compiled template.

    Jinja's sandbox keeps it from Python's internals and limits `range` to 100,000 numbers. MAX_CHARACTERS limits its
    output. Nothing ends a template that computes for long without writing.

    source: Jinja. origin: the model's file, for messages. special_tokens: name -> text, visible to the template.
    added: the tokenizer's added tokens; control tokens are the special ones and those that the template itself
    writes. Raises TokenizerError when the source is not a template.
    """

    def __init__(self, source: str, *, origin: str, special_tokens: Mapping[str, str], added: Iterable[AddedPiece]):
        self._what = f"{origin}: chat template"
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            tree = environment.parse(source)
            literals = _literals(tree)
            is_content = _content_in(tree)
            self._reads_parts = _reads_content_parts(tree, is_content)
            self._asks_for_none = any(t.name == "none" and is_content(t.node) for t in tree.find_all(nodes.Test))
            self._template = environment.from_string(tree)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise TokenizerError(self._what, got=f"not a Jinja template ({_reason(error)})") from error
        special = [a.content for a in added if a.special]
        written = [a.content for a in added if not a.special and not a.content.isspace() and a.content in literals]
        self._everyone = _Marker(special + written)
        # A model's own earlier answers hold `<think>` and the like on purpose, and templates take them apart by these.
        self._assistant = _Marker(special)
        self._source = source

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> RenderedChat:
        """Lay out a conversation. Raises InvalidArgumentError for malformed messages, TokenizerError when the
        template fails."""
        try:
            checked = [self._flatten(message) for message in _check_messages(messages)]
            given = {name: _plain(value, name) for name, value in variables.items()}
        except RecursionError as error:
            raise InvalidArgumentError("messages", got="nested without end, or hundreds of levels deep") from error
        private = _unused([self._source, *self._special_tokens.values(), *_characters(checked), *_characters(given)])
        start, end = next(private, None), next(private, None)
        if start is None or end is None:
            raise InvalidArgumentError("messages", got="every character that Unicode leaves for private use")
        marked = [
            (self._assistant if message["role"] == "assistant" else self._everyone).mark(message, start, end)
            for message in checked
        ]
        context = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **self._everyone.mark(given, start, end),
            "messages": marked,
            "add_generation_prompt": add_generation_prompt,
        }
        return _unmark(self._run(context), start, end, self._everyone.control)

    def _run(self, context: dict[str, Any]) -> str:
        chunks: list[str] = []
        length = 0
        try:
            for chunk in self._template.generate(context):
                chunks.append(chunk)
                length += len(chunk)
                if length > MAX_CHARACTERS:
                    raise TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")
        except InvalidArgumentError:
            raise
        except Exception as error:  # whatever a stranger's program may raise
            raise TokenizerError(
                self._what,
                got=f"failed ({_reason(error)})",
                next="Check the messages against what this model's template takes.",
            ) from error
        return "".join(chunks)

    def _flatten(self, message: dict[str, Any]) -> dict[str, Any]:
        """Join a content list into one string for a template that knows only strings. A content of None stays for a
        template that asks for it; others would write "None"."""
        content = message.get("content")
        if content is None and "content" in message and not self._asks_for_none:
            return {key: value for key, value in message.items() if key != "content"}
        if not isinstance(content, list) or self._reads_parts:
            return message
        return {**message, "content": "\n".join(part["text"] for part in cast("list[dict[str, Any]]", content))}


def _check_messages(messages: object) -> list[dict[str, Any]]:
    shape = 'a list of {"role": ..., "content": ...}'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidArgumentError("messages", got=type(cast("object", messages)).__name__, allowed=shape)
    if not messages:
        raise InvalidArgumentError("messages", got="an empty list", allowed=shape)
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(cast("Sequence[object]", messages))]


def _check_message(message: object, what: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgumentError(what, got=type(message).__name__, allowed='{"role": ..., "content": ...}')
    fields = cast("dict[str, Any]", _plain(cast("Mapping[Any, Any]", message), what))
    # APIs send "tool_calls": null; templates handle a key that is missing, and few handle None. Beside calls of tools
    # it is the content that is null, which some ask for.
    kept = {"content"} if fields.get("tool_calls") else set[str]()
    fields = {key: value for key, value in fields.items() if value is not None or key in kept}
    for name in ("role", "content"):
        given = fields.get(name)
        if isinstance(given, _Foreign):
            raise given.error
    if not isinstance(fields.get("role"), str):
        got = type(fields["role"]).__name__ if "role" in fields else "missing"
        raise InvalidArgumentError(f"{what}.role", got=got, allowed="a string such as 'user'")
    content = fields.get("content")
    if content is None and len(fields) == 1:
        raise InvalidArgumentError(f"{what}.content", got="missing", allowed="a string, or a list of text parts")
    if content is not None and not isinstance(content, str):
        _check_parts(content, f"{what}.content")
    reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _check_parts(content: object, what: str) -> None:
    if not isinstance(content, list):
        raise InvalidArgumentError(what, got=type(content).__name__, allowed="a string, or a list of text parts")
    for i, part in enumerate(cast("list[object]", content)):
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            got = f"a part of type {fields['type']!r}" if "type" in fields else type(cast("object", part)).__name__
            raise InvalidArgumentError(f"{what}[{i}]", got=got, allowed='{"type": "text", "text": ...}')


def _plain(value: Any, what: str) -> Any:
    """A copy made of JSON's types alone: a template may call methods of what it gets, so it gets nothing else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.bool_):
        return bool(cast("Any", value))
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        with suppress(OverflowError):
            return float(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_plain_key(key, what): _plain(item, f"{what}.{str(key)[:60]}") for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{what}[{i}]") for i, item in enumerate(cast("Sequence[Any]", value))]
    return _Foreign(value, what)


def _plain_key(key: Any, what: str) -> Any:
    if isinstance(key, str | Real) or key is None:
        return _plain(key, what)
    raise InvalidArgumentError(f"{what}: a key", got=shown(key), allowed="a string or a number")


class _Foreign:
    """Stands for a value that JSON has not: refused where a template takes it up, which most never do."""

    error: InvalidArgumentError

    def __init__(self, value: object, what: str) -> None:
        allowed = "what JSON has: None, True, False, numbers, strings, lists and mappings"
        hint = "Call its model_dump() first." if hasattr(value, "model_dump") else "Convert it to one of them."
        self.error = InvalidArgumentError(what, got=shown(value), allowed=allowed, next=hint)

    def _refuse(self, *_: object) -> Any:
        raise self.error

    __str__ = __repr__ = __format__ = __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = _refuse
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __call__ = __getattr__ = _refuse
    __hash__ = _refuse


def _unused(texts: Iterable[str]) -> Iterator[str]:
    """Characters for private use that stand in none of the texts, spelled as JSON does neither."""
    joined = "\0".join(texts)
    used, escaped = set(joined), set(re.findall(r"\\u[0-9a-f]{4}", joined))
    for character in map(chr, chain(range(0xE000, 0xF8FF), *_MORE_PRIVATE)):
        if character not in used and json.dumps(character)[1:7] not in escaped:
            yield character


def _characters(value: Any) -> Iterable[str]:
    """Every string in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            yield from _characters(key)
            yield from _characters(item)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _characters(item)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class _Marker:
    """Puts markers into strings: `start` + token + `end` around control tokens, `end` where a cut-off one touches an
    edge."""

    def __init__(self, control: Iterable[str]):
        self.control = frozenset(control)
        longest_first = sorted(self.control, key=len, reverse=True)
        # Upper and lower case alike: a template may fold the text after we looked.
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.IGNORECASE)
        folded = {token.lower() for token in self.control}
        self._heads = frozenset(token[:cut] for token in folded for cut in range(1, len(token)))
        self._tails = frozenset(token[cut:] for token in folded for cut in range(1, len(token)))
        self._longest = max(map(len, folded), default=1) - 1

    def mark(self, value: Any, start: str, end: str) -> Any:
        """Plain data with every string marked; dict keys, which templates look for, within alone."""
        if isinstance(value, str):
            return self._mark_text(value, start, end, edges=True)
        if isinstance(value, list):
            return [self.mark(item, start, end) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            fields = cast("dict[Any, Any]", value)
            # Templates compare these two with fixed words.
            words = {"role", "type"}
            return {
                self._mark_text(key, start, end, edges=False) if isinstance(key, str) else key: self._mark_text(
                    item, start, end, edges=False
                )
                if key in words and isinstance(item, str)
                else self.mark(item, start, end)
                for key, item in fields.items()
            }
        return value

    def _mark_text(self, text: str, start: str, end: str, *, edges: bool) -> str:
        if edges and self._longest:
            # Two strings that the template joins must not make a token of a half each.
            body = text.strip()
            lead, trail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
            folded_head, folded_tail = body[: self._longest].lower(), body[-self._longest :].lower()
            if any(folded_tail[-n:] in self._heads for n in range(1, len(folded_tail) + 1)):
                body += end
            if any(folded_head[:n] in self._tails for n in range(1, len(folded_head) + 1)):
                body = end + body
            text = lead + body + trail if body else text
        return self._whole.sub(lambda match: start + match[0] + end, text)


def _unmark(text: str, start: str, end: str, control: frozenset[str]) -> RenderedChat:
    if start not in text and end not in text and "\\u" not in text:
        return RenderedChat(text, frozenset(), (), control)
    # tojson(ensure_ascii=true) writes a marker as an escape.
    spellings = {start: start, end: end, json.dumps(start)[1:-1]: start, json.dumps(end)[1:-1]: end}
    pieces = re.split("(" + "|".join(map(re.escape, spellings)) + ")", text)
    starts: set[int] = set()
    breaks: list[int] = []
    position = 0
    for text_piece, marker in zip(pieces[::2], [*pieces[1::2], None], strict=True):
        position += len(text_piece)
        if marker is not None:
            breaks.append(position)
            if spellings[marker] == start:
                starts.add(position)
    return RenderedChat("".join(pieces[::2]), frozenset(starts), tuple(breaks), control)


# Unicode's planes 15 and 16.
_MORE_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


def _literals(tree: nodes.Template) -> str:
    """All text written out in a template, "\\0" between the pieces."""
    found = [node.data for node in tree.find_all(nodes.TemplateData)]
    found += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join(found)


def _content_in(tree: nodes.Template) -> Callable[[nodes.Node | None], bool]:
    """What says of a template's expressions whether they are a message's content."""

    def is_content(node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Filter):
            return is_content(node.node)
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Name) and node.name in aliases

    aliases: set[str] = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if is_content(assign.node) and isinstance(assign.target, nodes.Name):
            aliases.add(assign.target.name)
    return is_content


def _reads_content_parts(tree: nodes.Template, is_content: Callable[[nodes.Node | None], bool]) -> bool:
    """Whether a template looks inside a message's content instead of taking it for a string: it loops over it, or takes
    a field of its first part. (A template that only asks for its type writes nothing of a list, or its repr.)"""
    fields = [*tree.find_all(nodes.Getattr), *tree.find_all(nodes.Getitem)]
    firsts = [field.node for field in fields if isinstance(field.node, nodes.Getitem)]
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For)) or any(
        is_content(first.node) and isinstance(first.arg, nodes.Const) and type(first.arg.value) is int
        for first in firsts
    )
