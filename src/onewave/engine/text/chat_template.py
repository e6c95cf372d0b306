"""Chat templates: Jinja, in a sandbox, with what transformers' templates expect to find there.

A template mixes its own control tokens with what people wrote. Its text is Traced (traced.py) and keeps its writer
through all that the template does, so that the two can be told apart after rendering.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from onewave.base.errors import InvalidArgumentError, TokenizerError, shown
from onewave.engine.text.tokenizer_parts import AddedPiece
from onewave.engine.text.traced import (
    OPERATOR,
    TEMPLATE,
    TracedEnvironment,
    join,
    lowest_writer,
    writers_of,
    written_by,
)

MAX_CHARACTERS = 50_000_000
"""Characters of a rendered conversation. Real ones stay far below."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


OPERATOR_ROLES = frozenset({"system", "developer", "assistant", "tool", "function", "ipython", "observation"})
"""Roles whose messages are not a user's words."""


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation.

    text: what the model is to read. writers: the writer of each character (traced.py). tags: added tokens that the
    template writes and that are no control tokens (`<tool_call>`); a user's are text.
    """

    text: str
    writers: bytes
    tags: frozenset[str]


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
    # Jinja's own escapes HTML.
    how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys, "default": _not_json}
    return written_by(lowest_writer(_strings(value)), json.dumps(value, ensure_ascii=ensure_ascii, **how))


def _not_json(value: object) -> str:
    if isinstance(value, _Foreign):
        raise value.error
    raise TypeError(f"{type(value).__name__} has no JSON")


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> TracedEnvironment:
    extensions = [_GenerationBlock, loopcontrols]
    environment = TracedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


class ChatTemplate:
    """One compiled template.

    Jinja's sandbox keeps it from Python's internals and limits `range` to 100,000 numbers. MAX_CHARACTERS limits its
    output. Nothing ends a template that computes for long without writing.

    source: Jinja. what: its name, for errors. special_tokens: name -> text, visible to the template. added: the
    tokenizer's added tokens. reads_tools: whether a variable of that name stands in it. Raises TokenizerError when the
    source is not a template.
    """

    def __init__(self, source: str, *, what: str, special_tokens: Mapping[str, str], added: Iterable[AddedPiece]):
        self._what = what
        self._special_tokens = {name: written_by(TEMPLATE, text) for name, text in special_tokens.items()}
        environment = _environment()
        try:
            tree = environment.parse(source)
            literals = _literals(tree)
            self.reads_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
            is_content = _content_in(tree)
            self._reads_parts = _reads_content_parts(tree, is_content)
            self._asks_for_none = any(t.name == "none" and is_content(t.node) for t in tree.find_all(nodes.Test))
            self._template = environment.from_string(tree)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise TokenizerError(self._what, got=f"not a Jinja template ({_reason(error)})") from error
        self._tags = frozenset(
            a.content for a in added if not a.special and not a.content.isspace() and a.content in literals
        )

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> RenderedChat:
        """Lay out a conversation. Raises InvalidArgumentError for malformed messages, TokenizerError when the
        template fails."""
        try:
            checked = _check_messages(messages)
            given = {name: _plain(value, name) for name, value in variables.items()}
        except RecursionError as error:
            raise InvalidArgumentError("messages", got="nested without end, or hundreds of levels deep") from error
        context = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **_by_operator(given),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._lay_out(checked, context)
        except TokenizerError:
            # Some templates take a content of None beside calls of tools neither so nor left out.
            nulls = [message.get("content", "") is None for message in checked]
            filled = [
                {**message, "content": ""} if null else message for message, null in zip(checked, nulls, strict=True)
            ]
            if not any(nulls) or self._loses_calls(filled, context):
                raise
            text = self._lay_out(filled, context)
        return RenderedChat(str.__str__(text), writers_of(text), self._tags)

    def _loses_calls(self, messages: Sequence[dict[str, Any]], context: dict[str, Any]) -> bool:
        """Whether a template writes the same without what messages without content call."""
        bare = [
            {k: v for k, v in message.items() if message.get("content") or k != "tool_calls"} for message in messages
        ]
        with suppress(TokenizerError):
            return self._lay_out(messages, context) == self._lay_out(bare, context)
        return False

    def _lay_out(self, messages: Iterable[dict[str, Any]], context: dict[str, Any]) -> str:
        return self._run({**context, "messages": [_with_writers(self._flatten(message)) for message in messages]})

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
        return join(chunks)

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


def _with_writers(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its writer: a user's words stay plain. A role of letters alone can be part of the template's
    control token (`<|user|>`)."""
    role = message["role"]
    traced = _by_operator(message) if role in OPERATOR_ROLES else message
    return {**traced, "role": written_by(TEMPLATE, role) if re.fullmatch(r"[\w -]*", role) else role}


def _by_operator(value: Any) -> Any:
    """Plain data with every string of it marked as the operator's."""
    if isinstance(value, str):
        return written_by(OPERATOR, value)
    if isinstance(value, list):
        return [_by_operator(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {_by_operator(key): _by_operator(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _strings(value: Any) -> Iterable[str]:
    """Every string in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            yield from _strings(item)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _literals(tree: nodes.Template) -> str:
    """All text written out in a template, "\\0" between the pieces."""
    found = [node.data for node in tree.find_all(nodes.TemplateData)]
    found += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join(found)


def _content_in(tree: nodes.Template) -> Callable[[nodes.Node | None], bool]:
    """Return a test of whether a template's expression is a message's content."""

    def is_content(node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Filter):
            return is_content(node.node)
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
            return bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "content"
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
