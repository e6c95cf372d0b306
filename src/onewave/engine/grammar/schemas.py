"""JSON schemas, changed keyword by keyword before llguidance reads them. No torch, no llguidance."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError

Schema = dict[str, Any]

# Keywords whose values are data, and those whose values are schemas under names of the caller's own.
_DATA = frozenset({"const", "enum", "default", "examples"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# JSON Schema 2020-12's. Any other (password, int32, ...) is a remark.
_FORMATS = frozenset({
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
# llguidance 1.9 lets 0 pass where one bound excludes it and the other lies within 1 of it.
_BOUNDS = (("minimum", "exclusiveMinimum", 1e-9, max), ("maximum", "exclusiveMaximum", -1e-9, min))


def closed(schema: object) -> object:
    """A schema with additionalProperties false wherever properties are named and nothing is said of others."""

    def close(found: Schema) -> None:
        if "properties" in found or "patternProperties" in found:
            found.setdefault("additionalProperties", False)

    return _changed(schema, close)


def followable(schema: Schema) -> Schema:
    """A schema without keywords that say nothing, and with bounds that llguidance keeps.

    Raises InvalidArgumentError for one that is nested too deep."""
    try:
        return cast("Schema", _changed(schema, _follow))
    except RecursionError as error:
        raise InvalidArgumentError("structured_outputs.json", got="a schema nested too deep") from error


def _follow(found: Schema) -> None:
    if found.get("uniqueItems") is False:
        del found["uniqueItems"]
    if found.get("propertyNames") in ({}, {"type": "string"}):
        del found["propertyNames"]
    if isinstance(kind := found.get("format"), str) and kind not in _FORMATS:
        del found["format"]
    for bound, exclusive, least, nearer in _BOUNDS:
        given, is_exclusive = found.get(bound, least), found.get(exclusive)
        excluded = given if is_exclusive is True else is_exclusive
        if not isinstance(excluded, bool) and excluded == 0 and isinstance(given, (int, float)):
            found[bound] = nearer(given, least)


def _changed(schema: object, change: Callable[[Schema], None]) -> object:
    """A copy in which every schema has been changed."""
    if isinstance(schema, list):
        return [_changed(item, change) for item in cast("list[object]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    found: Schema = {}
    for key, value in cast("Mapping[str, Any]", schema).items():
        if key in _NAMED and isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            found[key] = {name: _changed(each, change) for name, each in named.items()}
        else:
            found[key] = value if key in _DATA else _changed(value, change)
    change(found)
    return found
