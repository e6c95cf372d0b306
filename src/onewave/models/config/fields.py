"""Reading one value after another out of a file's mapping, refusing what is missing or of the wrong kind."""

import math
from collections.abc import Mapping
from typing import cast

from onewave.base.errors import ConfigError, UnsupportedError

# Sizes, ids and lengths all stay below this; a larger one is a corrupt file, found here before anything is allocated.
LARGEST_INTEGER = 2**31 - 1
_LONGEST_VALUE_SHOWN = 80


class Fields:
    """The values of a config file or of a section of it, each checked as it is read.

    source: the file, for messages. prefix: what the section is called in front of a key ("rope_scaling.").
    A null counts as absent. Every method raises ConfigError naming source and key.
    """

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = ""):
        self.values, self.source, self.prefix = values, source, prefix

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.values.get(key) is not None

    def error(self, key: str, *, got: str, allowed: str | None = None) -> ConfigError:
        """Build the error for a key; the caller raises it."""
        return ConfigError(f"{self.source}: {self.prefix}{key}", got=got, allowed=allowed)

    def refuse(self, key: str, allowed: str) -> ConfigError:
        """Build the error for a value that is not allowed, or for a key that is missing."""
        value = self.values.get(key)
        return self.error(key, got="missing" if value is None else show(value), allowed=allowed)

    def unsupported(self, key: str, got: object, allowed: str, next: str | None = None) -> UnsupportedError:
        """Build the error for a value that other programs know."""
        return UnsupportedError(f"{self.source}: {self.prefix}{key}", got=show(got), allowed=allowed, next=next)

    def integer(self, key: str, *, minimum: int = 1, maximum: int = LARGEST_INTEGER) -> int:
        """Return a whole number, which must be there."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.refuse(key, f"a whole number from {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """Return a whole number, or None when it is absent."""
        return self.integer(key, minimum=minimum) if self.has(key) else None

    def number(self, key: str, *, above: float = 0.0) -> float:
        """Return a finite number greater than `above`, which must be there."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e30:
            raise self.refuse(key, f"a finite number above {above:g}")
        return float(value)

    def optional_number(self, key: str, *, above: float = 0.0) -> float | None:
        """Return a finite number greater than `above`, or None when it is absent."""
        return self.number(key, above=above) if self.has(key) else None

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a truth value."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """Return a string, or None when it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def items(self, key: str) -> list[object] | None:
        """Return a list, or None when it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise self.refuse(key, "a list")
        return cast("list[object] | None", value)

    def section(self, key: str) -> "Fields | None":
        """Return the fields of an object, or None when it is absent or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        return Fields(cast("Mapping[str, object]", value), self.source, f"{self.prefix}{key}.")

    def has_token_ids(self, key: str) -> bool:
        """Whether the key is there and not -1, which exporters write for "none"."""
        return self.values.get(key) not in (None, -1)

    def token_ids(self, key: str, *, below: int | None = None) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple, empty when absent.

        below: drop ids that are negative or not below this, instead of refusing those that no model could have.
        """
        if not self.has_token_ids(key):
            return ()
        value = self.values[key]
        ids = cast("list[object]", value) if isinstance(value, list) else [value]
        found: list[int] = []
        for token in ids:
            known = isinstance(token, int) and 0 <= token < (LARGEST_INTEGER + 1 if below is None else below)
            if not isinstance(token, int) or isinstance(token, bool) or not (known or below is not None):
                raise self.refuse(key, "a token id or a list of them")
            if known:
                found.append(token)
        return tuple(dict.fromkeys(found))


def show(value: object) -> str:
    """Format a value from a file so that it prints anywhere and stays short."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) >= 10**_LONGEST_VALUE_SHOWN:
        return f"a number of more than {_LONGEST_VALUE_SHOWN} digits"
    text = ascii(value)
    return text if len(text) <= _LONGEST_VALUE_SHOWN else f"{text[:_LONGEST_VALUE_SHOWN]}..."
