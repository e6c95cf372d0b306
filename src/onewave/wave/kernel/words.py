"""The words that the host and kernels share, by the names that the host has for them; none is typed here.

A kernel may use a module's constants if they are constexprs that the module holds by name. Triton then takes them for
part of the kernel's source, and compiles it anew when one changes. So WORD.FIRST_BLOCK is the word of a step record's
`first_block` (plan/steps.py), PLACE.KEYS that of LaunchPlaces' `keys`; KIND and FLAG have what stands in `kind` and
`flags`.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.base.weight_formats import SIX_BITS
from onewave.wave.plan.layout import (
    DIGITS_BATCH,
    DIGITS_BATCH_OF_BYTES,
    LIST_WORDS,
    STEP_WORDS,
    TILE_BYTES,
    TILE_VALUES,
)
from onewave.wave.plan.steps import Flag, Kind, Place, Word

RECORD_SIZE = gl.constexpr(STEP_WORDS)
LIST_SIZE = gl.constexpr(LIST_WORDS)
SIX = gl.constexpr(SIX_BITS)


class Numbers(gl.constexpr):
    """A constexpr of several numbers, which are its attributes to kernels and to Triton's search for dependencies."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        numbers = {name: number for name, number in named.items() if name.isupper()}
        super().__init__(namedtuple("Numbers", numbers)(**numbers))

    def __getattr__(self, name: str) -> int:
        if not name.isupper():  # copy and pickle ask for much
            raise AttributeError(name)
        return getattr(self.value, name)


WORD, PLACE, KIND, FLAG = Numbers(Word.offsets), Numbers(Place.offsets), Numbers(vars(Kind)), Numbers(vars(Flag))


@gluon.constexpr_function
def tile_bytes(FORMAT, IMAGES) -> int:
    """Bytes of a tile of the stream. FORMAT: 0 of 16-bit weights; of others a tile has IMAGES times the columns."""
    if FORMAT == 3:
        return TILE_VALUES * 13 // 8 * IMAGES
    if FORMAT > 3:
        return (TILE_VALUES // 2 + 128 * scale_rows(FORMAT)) * IMAGES
    return TILE_VALUES * IMAGES if FORMAT > 0 else TILE_BYTES


@gluon.constexpr_function
def boxes_of(FORMAT) -> int:
    """Boxes of the ring that a tile takes: three for compact weights, one a plane of words (compact.py)."""
    return 3 if FORMAT == 3 else 1


@gluon.constexpr_function
def box_rows(FORMAT, IMAGES) -> int:
    """Rows of 128 bytes of a box of the ring."""
    return 128 if FORMAT == 0 else (32 if FORMAT > 2 else 64) * IMAGES


@gluon.constexpr_function
def group_of(FORMAT) -> int:
    """Columns that share a scale, of 4-bit weights (base/weight_formats.py): 32, 64 or 128."""
    return 32 if FORMAT % 16 == 10 else (128, 64, 32)[(FORMAT % 16 - 4) % 3]


@gluon.constexpr_function
def has_minima(FORMAT) -> int:
    """Whether each group of 4-bit weights has a minimum beside its scale."""
    return int(FORMAT % 16 >= 7)


@gluon.constexpr_function
def scale_rows(FORMAT) -> int:
    """Rows of 128 bytes of scales and minima, beside an image of 4-bit weights."""
    return 6 if FORMAT % 16 == 10 else (1, 2, 4)[(FORMAT % 16 - 4) % 3] * (2 if FORMAT % 16 >= 7 else 1)


@gluon.constexpr_function
def copied_rows(ROWS) -> int:
    """Rows that one copy brings of those beside an image: a box has a power of two of them."""
    return ROWS & -ROWS


@gluon.constexpr_function
def is_nested(FORMAT) -> int:
    """Whether scales and minima are a number for more columns times an integer a group."""
    return int(FORMAT % 16 == 10)


@gluon.constexpr_function
def takes_digits(FORMAT, NB) -> int:
    """Whether weights are multiplied by activations in digits of eight bits (widen/digits.py): of four bits nested ones
    and those without minima, for up to DIGITS_BATCH sequences, and int8 for up to DIGITS_BATCH_OF_BYTES."""
    return int(NB <= (DIGITS_BATCH if FORMAT % 16 in (4, 5, 6, 10) else DIGITS_BATCH_OF_BYTES if FORMAT == 1 else 0))


@gluon.constexpr_function
def whole_bytes(FORMAT, R) -> int:
    """Whether a tile's int8 weights are whole bytes for products with digits (formats/row_bytes.py): tiles of 8 rows
    are one sequence's."""
    return int(FORMAT == 1 and R == 8)


@gluon.constexpr_function
def halves_apart(FORMAT, NB) -> int:
    """Whether the halves of an image's columns are in products' columns of their own (widen/nested_digits.py)."""
    return int(is_nested(FORMAT) and NB == 1)


@gluon.jit
def in_digits(width, c):
    """Whether a step's activations are, where a launch takes_digits: of 4-bit and of 6-bit weights, and of nested 8-bit
    ones for one sequence."""
    if halves_apart(c.FORMAT, c.NB):
        return width < 4
    elif is_nested(c.FORMAT):
        return (width <= 1) | (width == SIX)
    else:
        return width <= 1


@gluon.constexpr_function
def is_mixed(FORMAT) -> int:
    """Whether steps on 4-bit weights have others beside them: 8-bit ones with a scale a group, and 16-bit ones."""
    return int(FORMAT >= 16)


@gluon.jit
def times_of(width):
    """How many times as many bytes a weight takes as the launch's narrowest: TileShape.of_width."""
    return gl.where(width == SIX, 2, width)


@gluon.constexpr_function
def has_floats(FORMAT) -> int:
    """Whether 8-bit weights beside 4-bit ones are e4m3 numbers, with a float32 scale for 128 columns."""
    return int(FORMAT >= 32)


@gluon.constexpr_function
def wide_group(FORMAT) -> int:
    """Columns that share a scale, of 8-bit weights beside 4-bit ones: as few as a tile's bytes leave room for."""
    return (64, 32, 16, 32, 16, 16, 16)[FORMAT % 16 - 4]


@gluon.constexpr_function
def wide_number(FORMAT) -> int:
    """Bytes of a scale of 8-bit weights: 4 (float32) where there is room, else 2 (float16)."""
    return 4 if FORMAT % 16 == 9 else 2
