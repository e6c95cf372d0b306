"""Formats of weights in a stream besides 16 bits, by name. Needs no torch.

`Rounding`s round 16-bit weights as they are packed: to one byte with a scale a row, or to four bits with a scale a
group. `COMPACT` loses nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from onewave.base.errors import InvalidArgumentError, shown

COMPACT_BYTES = 1.625
"""Bytes of a bfloat16 weight in thirteen bits (wave/weights/compact.py)."""


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights in a stream. number: the kernel's FORMAT. weight_bytes: bytes a weight, with what a tile has
    beside it. box_rows, beside_rows: of an image, rows of 128 bytes that one copy brings, and of what lies beside its
    values."""

    name: str
    number: int
    weight_bytes: float
    box_rows: int
    beside_rows: int

    @property
    def digits(self) -> bool:
        """Whether the kernel multiplies them by activations in digits, of few sequences (words.takes_digits)."""
        return False

    @property
    def copied_rows(self) -> int:
        """Rows that one copy brings of those beside an image: a box has a power of two of them."""
        return self.beside_rows & -self.beside_rows


@dataclass(frozen=True)
class Rounding(WeightFormat):
    """A format that 16-bit weights are rounded to."""


@dataclass(frozen=True)
class RowRounding(Rounding):
    """A one-byte format with a scale a row (rounding.py). largest: the largest magnitude in use."""

    largest: float

    @property
    def digits(self) -> bool:
        return self.name == "int8"


@dataclass(frozen=True)
class GroupRounding(Rounding):
    """Four bits a weight, 0 to 15, with a float16 scale for each group of neighbouring columns of a row, 32, 64 or 128
    (group_rounding.py). minima: whether each group has a float16 minimum as well; without one 8 stands for zero.
    nested: scales and minima are one float16 for 128 columns, times a small integer a group; nothing is rounded to it.
    """

    group: int
    minima: bool
    nested: bool = False

    @property
    def digits(self) -> bool:
        return self.nested or not self.minima


def _nibbles(group: int, *, minima: bool) -> GroupRounding:
    name = "int4" if group == 128 and not minima else f"int4 groups of {group}{' with minima' * minima}"
    rows = 128 // group * (1 + minima)
    number = 4 + (128, 64, 32).index(group) + 3 * minima
    return GroupRounding(name, number, (32 + rows) / 64, 32, rows, group, minima)


@dataclass(frozen=True)
class ScaledFormat(WeightFormat):
    """One-byte weights with a scale a row, whose products round activations to the same codes by token. No stream
    holds them. codes: a name in ROW_ROUNDINGS."""

    codes: str


SIX_BITS = 3
"""The width of 6-bit matrices among MixedFormat's: their tiles are laid out as 8-bit ones', twice as wide as 4-bit
ones'."""
ROW_ROUNDINGS = {
    found.name: found for found in (RowRounding("int8", 1, 1, 64, 0, 127.0), RowRounding("fp8", 2, 1, 64, 0, 448.0))
}
"""One-byte formats by name."""
NIBBLES = {(group, minima): _nibbles(group, minima=minima) for group in (128, 64, 32) for minima in (False, True)}
"""Formats of four bits by columns of a group and whether there are minima."""
NESTED = GroupRounding("4 bits, nested groups of 32", 10, 38 / 64, 32, 6, group=32, minima=True, nested=True)
"""Four bits as GGUF's Q4_K has them: 4.75 with what lies beside them."""
ROUNDINGS: dict[str, Rounding] = {**ROW_ROUNDINGS, "int4": NIBBLES[128, False]}
"""Formats that weights can be rounded to on load, by name."""
SCALED = {name: ScaledFormat(name, 0, 1, 0, 0, codes) for name, codes in (("w8a8", "int8"), ("fp8-w8a8", "fp8"))}
"""Formats of weights and activations that matrices can be rounded to on load, by name."""
COMPACT = WeightFormat("compact", 3, COMPACT_BYTES, 32, 8)
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


@dataclass(frozen=True)
class MixedFormat(WeightFormat):
    """4-bit weights with others beside them. nibbles: their format. widths: matrices whose weights are twice or four
    times as wide, 8 or 16 bits, or beside nested ones SIX_BITS, by name. 8-bit ones have 128 for zero, or are e4m3
    `floats`, and a scale for `wide_group` columns, of `wide_number` bytes: 2 (float16) or 4 (float32)."""

    nibbles: GroupRounding
    widths: tuple[tuple[str, int], ...]
    floats: bool = False

    @property
    def digits(self) -> bool:
        return self.nibbles.digits

    @property
    def wide_group(self) -> int:
        """Columns that share a scale, of 8-bit weights."""
        return 128 if self.floats else 16 if self.nibbles.nested else max(16, 64 // self.beside_rows)

    @property
    def wide_number(self) -> int:
        """Bytes of such a scale."""
        return 4 if self.floats or self.beside_rows == 8 else 2


def times_as_wide(width: int) -> int:
    """How many times as many bytes as 4 bits the tiles of a MixedFormat's width take."""
    return 2 if width == SIX_BITS else width


def mixed(nibbles: GroupRounding, widths: Mapping[str, int], *, floats: bool = False) -> MixedFormat:
    """Return 4-bit weights with some matrices of another width. floats: 8-bit ones are e4m3; nibbles without minima
    for 128 columns leave room for their scales."""
    n = nibbles
    name, kept = f"{n.name}, mixed{' with fp8' * floats}", tuple(sorted(widths.items()))
    return MixedFormat(
        name, n.number + (32 if floats else 16), n.weight_bytes, n.box_rows, n.beside_rows, n, kept, floats
    )


def find_quantization(name: object) -> Rounding | ScaledFormat | None:
    """Find what matrices are rounded to on load by name; None for None. Raises InvalidArgumentError."""
    if isinstance(name, str) and name in SCALED:
        return SCALED[name]
    if name is None or (isinstance(name, str) and name in ROUNDINGS):
        return find_rounding(name)
    raise InvalidArgumentError("quantization", got=shown(name), allowed=f"{', '.join((*ROUNDINGS, *SCALED))} or None")


def find_rounding(name: object) -> Rounding | None:
    """Find a format to round to by name; None for None. Raises InvalidArgumentError."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in ROUNDINGS:
        raise InvalidArgumentError("quantization", got=shown(name), allowed=f"{', '.join(ROUNDINGS)} or None")
    return ROUNDINGS[name]
