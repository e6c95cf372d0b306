"""Which one-byte formats weights may be rounded to, by name. Needs no torch; rounding.py does the rounding."""

from __future__ import annotations

from dataclasses import dataclass

from onewave.base.errors import InvalidArgumentError, shown

__all__ = ["ROUNDINGS", "Rounding", "find_rounding"]


@dataclass(frozen=True)
class Rounding:
    """A one-byte format. number: the kernel's FORMAT. largest: its largest magnitude that is used."""

    name: str
    number: int
    largest: float


ROUNDINGS = {found.name: found for found in (Rounding("int8", 1, 127.0), Rounding("fp8", 2, 448.0))}
"""What weights may be rounded to."""


def find_rounding(name: object) -> Rounding | None:
    """The rounding of that name; None for None. Raises InvalidArgumentError."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in ROUNDINGS:
        raise InvalidArgumentError("quantization", got=shown(name), allowed=f"{', '.join(ROUNDINGS)} or None")
    return ROUNDINGS[name]
