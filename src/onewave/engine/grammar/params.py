"""Constraints on a request's output, checked when they are written down. No torch, no llguidance."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, shown
from onewave.engine.arguments import flag, items
from onewave.engine.grammar.schemas import closed

KINDS = ("json", "regex", "choice", "grammar", "json_object")
_SCHEMA = "a JSON schema: an object, or its text"


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output: exactly one of json, regex, choice, grammar, json_object. Names are vLLM's.

    json: a JSON schema, as a mapping or as text. regex: what the whole output matches, in the syntax of Rust's regex
    crate. choice: the output is one of these strings. grammar: in Lark's syntax, or in GBNF's with `::=`.
    json_object: any JSON object.
    disable_any_whitespace: no whitespace between JSON tokens. whitespace_pattern: a regex of the whitespace that may
    stand there; by default one space, or a line break and at most 32 spaces. disable_additional_properties: objects
    with properties take no others, unless they say so.

    `json` becomes text and `choice` a tuple. Raises InvalidArgumentError.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1 or self.json_object is False:
            got = " and ".join(given) if self.json_object is not False else "json_object=False"
            raise InvalidArgumentError("structured_outputs", got=got or "nothing", allowed=f"one of {', '.join(KINDS)}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise InvalidArgumentError(f"structured_outputs.{name}", got=shown(text), allowed="text, not empty")
        flag("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        flag("structured_outputs.disable_additional_properties", self.disable_additional_properties)
        if self.json_object is not None:
            flag("structured_outputs.json_object", self.json_object)
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json, close=self.disable_additional_properties))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> str:
        """The field that says the form; any JSON object is "json"."""
        given = next(name for name in KINDS if getattr(self, name) is not None)
        return "json" if given == "json_object" else given

    @classmethod
    def of(cls, value: object) -> "StructuredOutputsParams | None":
        """Take what SamplingParams was given: one of these, a mapping of its fields, or None."""
        if value is None or isinstance(value, cls):
            return value
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            allowed = f"StructuredOutputsParams, or a mapping with {', '.join(known)}"
            raise InvalidArgumentError("structured_outputs", got=shown(value), allowed=allowed)
        values = cast("Mapping[str, Any]", value)
        for name in values:
            if name not in known:
                raise InvalidArgumentError(
                    "structured_outputs", got=f"unknown field {shown(name)}", allowed=", ".join(known)
                )
        return cls(**values)


def _schema(value: object, *, close: bool) -> str:
    """A schema's JSON text, its properties in the order in which they were given."""
    what = "structured_outputs.json"
    try:
        schema: object = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            raise InvalidArgumentError(what, got=shown(cast("object", value)), allowed=_SCHEMA)
        return json.dumps(closed(cast("object", schema)) if close else schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(what, got=f"{shown(value)} ({error})", allowed=_SCHEMA) from error


def _choices(value: object) -> tuple[str, ...]:
    allowed = "a list of strings, none of them empty"
    found = items("structured_outputs.choice", value, allowed)
    if not found or not all(isinstance(item, str) and item for item in found):
        raise InvalidArgumentError("structured_outputs.choice", got=shown(value), allowed=allowed)
    return tuple(cast("list[str]", found))
