"""JSON objects in the small files of a model."""

import json
from pathlib import Path
from typing import Any, cast

from onewave.base.errors import OnewaveError

_MAX_BYTES = 100_000_000
_MAX_KEY_SHOWN = 200


def read_json_object(path: Path, kind: type[OnewaveError], *, strict: bool = False) -> dict[str, Any]:
    """Read a file that holds one JSON object. strict: in UTF-8, no key twice. Raises `kind`."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise kind(str(path), got="a directory" if path.is_dir() else "not a file", allowed="a JSON file")
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise kind(str(path), got=f"can't be read ({error.strerror or error})") from None
    if len(text) > _MAX_BYTES:
        raise kind(str(path), got=f"longer than {_MAX_BYTES} bytes")
    return parse_json_object(text, str(path), kind, strict=strict)


def parse_json_object(text: bytes, name: str, kind: type[OnewaveError], *, strict: bool = False) -> dict[str, Any]:
    """Parse the text of a JSON object. name: of the file. Raises `kind`."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique_pairs) if strict else json.loads(text)
    # Deep nesting overruns the parser's recursion, and an integer of thousands of digits Python's own limit.
    except (ValueError, RecursionError) as error:
        raise kind(name, got=f"not valid JSON ({error})", next="Fetch the file again.") from None
    if not isinstance(value, dict):
        raise kind(name, got="not a JSON object", next="Fetch the file again.")
    return cast("dict[str, Any]", value)


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"{ascii(key)[:_MAX_KEY_SHOWN]} appears twice")
        unique[key] = value
    return unique
