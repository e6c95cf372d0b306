"""The words that the host and kernels share, by the names that kernels use; none is typed here.

A kernel may use a module's constants if they are constexprs that the module holds by name. Triton then takes them for
part of the kernel's source, and compiles it anew when one changes. WORD_<FIELD>: a step record's field (plan/steps.py:
WORD_FIRST_BLOCK is `first_block`). PLACE_<FIELD>: a field of LaunchPlaces. KIND_<NAME>, FLAG_<NAME>: what stands in a
record's `kind` and `flags`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.plan.layout import LIST_WORDS, STEP_WORDS, TILE_BYTES, TILE_VALUES
from onewave.wave.plan.steps import Flag, Kind, Place, Word

RECORD_SIZE = gl.constexpr(STEP_WORDS)
LIST_SIZE = gl.constexpr(LIST_WORDS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> gl.constexpr: ...


_NUMBERS: dict[str, Mapping[str, Any]] = {
    "WORD": Word.offsets, "PLACE": Place.offsets, "KIND": vars(Kind), "FLAG": vars(Flag)
}  # fmt: skip
for _prefix, _named in _NUMBERS.items():
    globals().update({f"{_prefix}_{name}": gl.constexpr(n) for name, n in _named.items() if name.isupper()})


@gluon.constexpr_function
def tile_bytes(FORMAT, IMAGES) -> int:
    """Of a tile of the stream. FORMAT: 0 of 16-bit weights; of others a tile has IMAGES times the columns."""
    if FORMAT == 3:
        return TILE_VALUES * 13 // 8 * IMAGES
    return TILE_VALUES * IMAGES if FORMAT > 0 else TILE_BYTES


@gluon.constexpr_function
def boxes_of(FORMAT) -> int:
    """Boxes of the ring that a tile takes: three for compact weights, one a plane of words (compact.py)."""
    return 3 if FORMAT == 3 else 1
