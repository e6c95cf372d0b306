"""Files of JSON: those of a model, and those that a person names."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, OnewaveError

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


def read_bounded(path: str | PathLike[str], what: str, max_bytes: int) -> bytes:
    """Read a file that a person named, even one without an end. what: the argument. Raises InvalidArgumentError."""
    # One byte more than is allowed tells a file that is too large.
    try:
        with open(path, "rb") as stream:
            data = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with NUL in it
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(what, got=f"{path}: {reason}", allowed="a readable file") from None
    check_size(data, path, what, max_bytes)
    return data


def check_size(data: bytes, path: str | PathLike[str], what: str, max_bytes: int) -> None:
    """Refuse more bytes than allowed. Raises InvalidArgumentError."""
    if len(data) > max_bytes:
        size = f"{max_bytes >> 20} MiB"
        raise InvalidArgumentError(f"{what} size", got=f"{path}: over {size}", allowed=f"up to {size}")


def parse_json(text: bytes | str, what: str, *, allowed: str | None = None) -> Any:
    """Parse JSON, in UTF-8, without a key twice in an object. Raises InvalidArgumentError."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_unique_pairs)
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = str(error)[:_MAX_KEY_SHOWN]
        reason = "a number of thousands of digits" if "integer string" in reason else reason
    raise InvalidArgumentError(what, got=f"not valid JSON ({reason})", allowed=allowed)


@contextmanager
def in_file(path: str | PathLike[str]) -> Generator[None]:
    """Name the file in each InvalidArgumentError that is raised about what stands in it."""
    try:
        yield
    except InvalidArgumentError as error:
        raise type(error)(f"{path}: {error.what}", got=error.got, allowed=error.allowed, next=error.next) from None


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"{ascii(key)[:_MAX_KEY_SHOWN]} appears twice")
        unique[key] = value
    return unique
