"""Reading what the page sent: every field checked, every mistake an InvalidArgumentError in one line."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, check_one_of
from onewave.base.json_files import parse_json


class Fields(dict[str, Any]):
    """A request's fields, and which of them were read: a misspelt field is refused, not passed over."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._known: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._known.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None, /) -> Any:
        self._known.add(key)
        return super().get(key, default)

    def refuse_unknown(self) -> None:
        """Raise InvalidArgumentError for a field that nothing asked for."""
        for name in self.keys() - self._known:
            raise InvalidArgumentError("field", got=repr(name[:40]), allowed=", ".join(sorted(self._known)))


def whole(given: Mapping[str, Any], name: str, default: int, most: int, least: int = 1) -> int:
    """Read a whole number from least to most; `default` where the field is missing."""
    value = given.get(name, default)
    text = str(value)
    # Digits only: int() would take "1_000", and refuse thousands of digits with an error of its own.
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,12}", text) or not least <= int(text) <= most:
        raise InvalidArgumentError(name, got=repr(text[:40]), allowed=f"a whole number from {least} to {most:,}")
    return int(text)


def wholes(given: Mapping[str, Any], name: str, default: str, most: int) -> list[int]:
    """Read up to 4 whole numbers separated by commas."""
    parts = str(given.get(name, default)).split(",")
    if len(parts) > 4:
        raise InvalidArgumentError(name, got=f"{len(parts)} numbers", allowed="up to 4")
    return [whole({name: part.strip()}, name, 1, most) for part in parts]


def choice(given: Mapping[str, Any], name: str, default: str, allowed: Iterable[str]) -> str:
    """Read one word of a list."""
    return check_one_of(name, given.get(name, default), allowed)


def tiles_of(value: object, rows: int, cols: int) -> list[tuple[int, int]]:
    """Read an order: [[row, column], ...] inside the grid, each tile at most once."""
    if not isinstance(value, list):
        raise InvalidArgumentError("order", got=type(value).__name__, allowed="a list of [row, column]")
    found: dict[tuple[int, int], None] = {}
    for pair in cast("list[object]", value):
        items = cast("list[object]", pair) if isinstance(pair, list) else []
        if len(items) != 2 or not all(type(item) is int for item in items):
            raise InvalidArgumentError(
                "order", got=repr(cast("object", pair))[:40], allowed="pairs [row, column] of whole numbers"
            )
        row, col = cast("list[int]", items)
        if not (0 <= row < rows and 0 <= col < cols):
            raise InvalidArgumentError("tile", got=f"({row}, {col})"[:60], allowed=f"inside the {rows} x {cols} grid")
        if (row, col) in found:
            raise InvalidArgumentError("order", got=f"({row}, {col}) twice", allowed="each tile at most once")
        found[row, col] = None
    return list(found)


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a request's body, which must be one JSON object."""
    document: object = parse_json(body, "request", allowed="a JSON object")
    if not isinstance(document, dict):
        raise InvalidArgumentError("request", got=f"JSON {type(document).__name__}", allowed="a JSON object")
    return cast("dict[str, Any]", document)
