"""JSON schemas, changed keyword by keyword before llguidance reads them. No torch, no llguidance."""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
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
# Keywords by which two schemas may hold for one value: by themselves, and beside others.
_MERGING, _BRANCHING = frozenset({"allOf", "patternProperties"}), frozenset({"anyOf", "oneOf", "$ref"})
# llguidance has a state a remainder: a million take 14 s, more take minutes, and nothing ends them.
_MAX_REMAINDERS = 100_000


def closed(schema: object) -> object:
    """A schema with additionalProperties false wherever properties are named and nothing is said of others."""

    def close(found: Schema) -> None:
        if "properties" in found or "patternProperties" in found:
            found.setdefault("additionalProperties", False)

    return _changed(schema, close)


def followable(schema: Schema) -> Schema:
    """A schema without keywords that say nothing, and with bounds that llguidance keeps.

    Raises InvalidArgumentError for one that is nested too deep, or has multiples with too many remainders."""
    multiples: list[Decimal] = []
    merged: list[bool] = []

    def follow(found: Schema) -> None:
        _follow(found)
        merged.append(not _MERGING.isdisjoint(found) or (len(found) > 1 and not _BRANCHING.isdisjoint(found)))
        multiple = found.get("multipleOf")
        if isinstance(multiple, (int, float)) and not isinstance(multiple, bool) and 0 < abs(multiple) < math.inf:
            multiples.append(Decimal(repr(abs(multiple))).normalize())

    try:
        changed = cast("Schema", _changed(schema, follow))
    except RecursionError as error:
        raise InvalidArgumentError("structured_outputs", got="a schema nested too deep") from error
    # Multiples of different numbers have nothing to do with one another, unless two schemas may say them of one.
    together = [multiples] if any(merged) else [[each] for each in multiples]
    if any(_remainders(each) > _MAX_REMAINDERS for each in together):
        allowed = f"a least common multiple up to {_MAX_REMAINDERS:,}, in units of the last digit"
        raise InvalidArgumentError("structured_outputs", got="multipleOf beyond what is kept track of", allowed=allowed)
    return changed


def _remainders(multiples: list[Decimal]) -> int:
    """The least common multiple, in units of the last digit."""
    unit = min((int(each.as_tuple().exponent) for each in multiples), default=0)
    return math.lcm(*(int(each.scaleb(-unit)) for each in multiples))


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
