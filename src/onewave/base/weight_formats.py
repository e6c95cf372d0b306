"""Formats of weights in a stream besides 16 bits: one-byte formats by name, and compact. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from onewave.base.errors import InvalidArgumentError, shown

COMPACT_BYTES = 1.625
"""Bytes of a bfloat16 weight in thirteen bits (wave/weights/compact.py)."""


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights in a stream. number: the kernel's FORMAT. weight_bytes: bytes a weight."""

    name: str
    number: int
    weight_bytes: float


@dataclass(frozen=True)
class Rounding(WeightFormat):
    """A one-byte format (rounding.py). largest: the largest magnitude in use."""

    largest: float


ROUNDINGS = {found.name: found for found in (Rounding("int8", 1, 1, 127.0), Rounding("fp8", 2, 1, 448.0))}
"""One-byte formats by name."""
COMPACT = WeightFormat("compact", 3, COMPACT_BYTES)
"""bfloat16 weights in thirteen bits, without loss (compact.py)."""
WEIGHT_BYTES: dict[str, float] = {"16-bit": 2} | {
    found.name: found.weight_bytes for found in (*ROUNDINGS.values(), COMPACT)
}
"""Bytes of a weight in a stream, by the format's name; 16-bit: as it is."""


def find_format(name: str) -> WeightFormat | None:
    """The format of a name in WEIGHT_BYTES; None for 16 bits."""
    return {COMPACT.name: COMPACT, **ROUNDINGS}.get(name)


def name_of(found: WeightFormat | None) -> str:
    """A format's name in WEIGHT_BYTES. found: None for 16 bits."""
    return "16-bit" if found is None else found.name


def find_rounding(name: object) -> Rounding | None:
    """Find a one-byte format by name; None for None. Raises InvalidArgumentError."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in ROUNDINGS:
        raise InvalidArgumentError("quantization", got=shown(name), allowed=f"{', '.join(ROUNDINGS)} or None")
    return ROUNDINGS[name]
