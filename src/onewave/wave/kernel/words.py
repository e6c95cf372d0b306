"""The words that host and kernels share (layout.py), by the names that kernels use.

A kernel may use a module's constants if they are constexprs that the module holds by name. Triton then takes them for
part of the kernel's source, and compiles it anew when one changes. WORD_: places in a step's record; KIND_ and FLAG_:
what stands in its KIND and FLAGS; PLACE_: places in a launch's `places`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingTypeStubs=false, reportMissingParameterType=false, reportUnknownParameterType=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.plan.layout import LIST_WORDS, STEP_WORDS, TILE_BYTES, TILE_VALUES, Flag, Kind, Place, Word

__all__ = [
    "FLAG_ACTIVATE",
    "FLAG_EMBEDDED",
    "FLAG_GATED",
    "FLAG_LOGITS",
    "FLAG_NORM",
    "FLAG_RESIDUAL",
    "KIND_ATTEND",
    "KIND_OUT",
    "KIND_PARTIAL",
    "KIND_REDUCE_HIDDEN",
    "KIND_REDUCE_OUT",
    "LIST_SIZE",
    "PLACE_BIASES",
    "PLACE_EMBEDDING",
    "PLACE_HEAD_STRIDE",
    "PLACE_KEYS",
    "PLACE_K_NORM",
    "PLACE_LAYER_STRIDE",
    "PLACE_Q_NORM",
    "PLACE_RESIDUAL",
    "PLACE_ROTARY",
    "PLACE_SCALES",
    "PLACE_SLOT_STRIDE",
    "PLACE_STREAM",
    "PLACE_TABLE",
    "PLACE_TABLE_STRIDE",
    "PLACE_VALUES",
    "RECORD_SIZE",
    "WORD_AHEAD",
    "WORD_AHEAD_TILES",
    "WORD_APPENDS",
    "WORD_BIAS",
    "WORD_BLOCKS",
    "WORD_CHUNKS",
    "WORD_COLUMNS",
    "WORD_COMES",
    "WORD_FEW",
    "WORD_FIRST_BLOCK",
    "WORD_FIRST_COLUMN",
    "WORD_FIRST_WAIT",
    "WORD_FLAGS",
    "WORD_HEADS",
    "WORD_K",
    "WORD_KIND",
    "WORD_KV_HEAD",
    "WORD_LAYER",
    "WORD_POST",
    "WORD_PREFETCH",
    "WORD_Q",
    "WORD_SCALES",
    "WORD_SEQUENCE",
    "WORD_SLICE",
    "WORD_SOURCE",
    "WORD_SOURCE_STRIDE",
    "WORD_SPLITS",
    "WORD_TARGET",
    "WORD_TARGET_STRIDE",
    "WORD_TILES",
    "WORD_V",
    "WORD_WAITS",
    "WORD_WHOLE",
    "WORD_WINDOW",
    "boxes_of",
    "tile_bytes",
]

RECORD_SIZE = gl.constexpr(STEP_WORDS)
LIST_SIZE = gl.constexpr(LIST_WORDS)

WORD_KIND = gl.constexpr(Word.KIND)
WORD_BLOCKS = gl.constexpr(Word.BLOCKS)
WORD_TILES = gl.constexpr(Word.TILES)
WORD_CHUNKS = gl.constexpr(Word.CHUNKS)
WORD_SOURCE = gl.constexpr(Word.SOURCE)
WORD_SOURCE_STRIDE = gl.constexpr(Word.SOURCE_STRIDE)
WORD_FIRST_COLUMN = gl.constexpr(Word.FIRST_COLUMN)
WORD_COLUMNS = gl.constexpr(Word.COLUMNS)
WORD_COMES = gl.constexpr(Word.COMES)
WORD_FIRST_BLOCK = gl.constexpr(Word.FIRST_BLOCK)
WORD_TARGET = gl.constexpr(Word.TARGET)
WORD_TARGET_STRIDE = gl.constexpr(Word.TARGET_STRIDE)
WORD_SLICE = gl.constexpr(Word.SLICE)
WORD_FLAGS = gl.constexpr(Word.FLAGS)
WORD_FIRST_WAIT = gl.constexpr(Word.FIRST_WAIT)
WORD_WAITS = gl.constexpr(Word.WAITS)
WORD_POST = gl.constexpr(Word.POST)
WORD_BIAS = gl.constexpr(Word.BIAS)
WORD_SEQUENCE = gl.constexpr(Word.SEQUENCE)
WORD_SPLITS = gl.constexpr(Word.SPLITS)
WORD_LAYER = gl.constexpr(Word.LAYER)
WORD_KV_HEAD = gl.constexpr(Word.KV_HEAD)
WORD_WINDOW = gl.constexpr(Word.WINDOW)
WORD_APPENDS = gl.constexpr(Word.APPENDS)
WORD_HEADS = gl.constexpr(Word.HEADS)
WORD_Q = gl.constexpr(Word.Q)
WORD_K = gl.constexpr(Word.K)
WORD_V = gl.constexpr(Word.V)
WORD_PREFETCH = gl.constexpr(Word.PREFETCH)
WORD_AHEAD = gl.constexpr(Word.AHEAD)
WORD_AHEAD_TILES = gl.constexpr(Word.AHEAD_TILES)
WORD_SCALES = gl.constexpr(Word.SCALES)
WORD_WHOLE = gl.constexpr(Word.WHOLE)
WORD_FEW = gl.constexpr(Word.FEW)

KIND_PARTIAL = gl.constexpr(Kind.PARTIAL)
KIND_OUT = gl.constexpr(Kind.OUT)
KIND_REDUCE_HIDDEN = gl.constexpr(Kind.REDUCE_HIDDEN)
KIND_REDUCE_OUT = gl.constexpr(Kind.REDUCE_OUT)
KIND_ATTEND = gl.constexpr(Kind.ATTEND)

FLAG_ACTIVATE = gl.constexpr(Flag.ACTIVATE)
FLAG_GATED = gl.constexpr(Flag.GATED)
FLAG_NORM = gl.constexpr(Flag.NORM)
FLAG_RESIDUAL = gl.constexpr(Flag.RESIDUAL)
FLAG_LOGITS = gl.constexpr(Flag.LOGITS)
FLAG_EMBEDDED = gl.constexpr(Flag.EMBEDDED)

PLACE_EMBEDDING = gl.constexpr(Place.EMBEDDING)
PLACE_ROTARY = gl.constexpr(Place.ROTARY)
PLACE_KEYS = gl.constexpr(Place.KEYS)
PLACE_VALUES = gl.constexpr(Place.VALUES)
PLACE_RESIDUAL = gl.constexpr(Place.RESIDUAL)
PLACE_BIASES = gl.constexpr(Place.BIASES)
PLACE_Q_NORM = gl.constexpr(Place.Q_NORM)
PLACE_K_NORM = gl.constexpr(Place.K_NORM)
PLACE_LAYER_STRIDE = gl.constexpr(Place.LAYER_STRIDE)
PLACE_SLOT_STRIDE = gl.constexpr(Place.SLOT_STRIDE)
PLACE_HEAD_STRIDE = gl.constexpr(Place.HEAD_STRIDE)
PLACE_STREAM = gl.constexpr(Place.STREAM)
PLACE_SCALES = gl.constexpr(Place.SCALES)
PLACE_TABLE = gl.constexpr(Place.TABLE)
PLACE_TABLE_STRIDE = gl.constexpr(Place.TABLE_STRIDE)


@gluon.constexpr_function
def tile_bytes(FORMAT, IMAGES) -> int:
    """Of a tile of the stream. FORMAT: 0 of 16-bit weights; of others a tile has IMAGES times the columns."""
    if FORMAT == 3:
        return TILE_VALUES * 13 // 8 * IMAGES
    return TILE_VALUES * IMAGES if FORMAT > 0 else TILE_BYTES


@gluon.constexpr_function
def boxes_of(FORMAT) -> int:
    """Places of the ring that a tile takes: three of compact weights, whose words come in threes (compact.py)."""
    return 3 if FORMAT == 3 else 1
