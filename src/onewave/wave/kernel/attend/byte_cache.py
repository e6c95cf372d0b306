"""Cached keys and values of 8 bits: to float16 for the products, and of a new token to what the cache holds.

Every int8 and every e4m3 number is a float16 one, so widening is exact, and products of either kind of model are in
float16. A KV head's scale of keys goes into the scores' scale, that of values into the result (attend.py). Queries are
rounded to float16, at most 65,504. int8: a byte with its sign bit flipped is the mantissa of 1,024 + 128 + x. e4m3:
two conversions a word. Values are paired by keys before they are widened, as their product wants them.

KV 0: 16 bits; 1: int8; 2: e4m3. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.kernel.finish import bits16
from onewave.wave.kernel.records import place_pointer, place_word, record_word
from onewave.wave.kernel.words import PLACE, WORD
from onewave.wave.plan.steps import Place

_HALVES_INT8 = gl.constexpr(
    """{
.reg .b32 x, m;
mov.b32 m, 0x64806480;
xor.b32 x, $2, 0x80808080;
prmt.b32 $0, x, 0x64646464, 0x4140;
prmt.b32 $1, x, 0x64646464, 0x4342;
sub.rn.f16x2 $0, $0, m;
sub.rn.f16x2 $1, $1, m;
}"""
)
_HALVES_FP8 = gl.constexpr(
    """{
.reg .b16 l, h;
mov.b32 {l, h}, $2;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
}"""
)
_KEYS_INT8 = gl.constexpr(
    """{
.reg .b32 x, y, m;
mov.b32 m, 0x64806480;
prmt.b32 x, $4, $5, 0x5140;
prmt.b32 y, $4, $5, 0x7362;
xor.b32 x, x, 0x80808080;
xor.b32 y, y, 0x80808080;
prmt.b32 $0, x, 0x64646464, 0x4140;
prmt.b32 $1, x, 0x64646464, 0x4342;
prmt.b32 $2, y, 0x64646464, 0x4140;
prmt.b32 $3, y, 0x64646464, 0x4342;
sub.rn.f16x2 $0, $0, m;
sub.rn.f16x2 $1, $1, m;
sub.rn.f16x2 $2, $2, m;
sub.rn.f16x2 $3, $3, m;
}"""
)
_KEYS_FP8 = gl.constexpr(
    """{
.reg .b32 x, y;
.reg .b16 l, h;
prmt.b32 x, $4, $5, 0x5140;
prmt.b32 y, $4, $5, 0x7362;
mov.b32 {l, h}, x;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
mov.b32 {l, h}, y;
cvt.rn.f16x2.e4m3x2 $2, l;
cvt.rn.f16x2.e4m3x2 $3, h;
}"""
)
# The place of a plain cache's stride between heads has the address of the scales: a page's heads follow one another.
_SCALES = gl.constexpr(Place.HEAD_STRIDE)
# Within 2^22, adding and taking away 1.5 * 2^23 rounds half to even.
_ROUNDER = gl.constexpr(12582912.0)


@gluon.constexpr_function
def stored_dim(dim, kv) -> int:
    """Values of 16 bits that are as long as a cached key."""
    return dim // 2 if kv else dim


@gluon.jit
def half_pairs(words, KV: gl.constexpr):
    """Widen each word's four numbers to two words of float16 pairs."""
    TEXT: gl.constexpr = _HALVES_INT8 if KV == 1 else _HALVES_FP8
    return gl.inline_asm_elementwise(TEXT, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def key_pairs(even, odd, KV: gl.constexpr):
    """Widen the four numbers of a word of each of two keys: four words, of both keys' first numbers, second, .."""
    TEXT: gl.constexpr = _KEYS_INT8 if KV == 1 else _KEYS_FP8
    return gl.inline_asm_elementwise(
        TEXT, "=r,=r,=r,=r,r,r", [even, odd], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def cache_scale(record, places, which: gl.constexpr, c):
    """Load a scale of a task's KV head: of keys (0), of values (1), and the inverse of both (2, 3), float32 [layers,
    kv_heads, 4]."""
    HEAD_WORDS: gl.constexpr = c.PAGE * stored_dim(c.D, c.KV) // 2
    heads = place_word(places, PLACE.SLOT_STRIDE) // HEAD_WORDS
    head = record_word(record, WORD.LAYER) * heads + record_word(record, WORD.KV_HEAD)
    return gl.load(place_pointer(places, _SCALES, gl.float32) + head * 4 + which)


@gluon.jit
def as_stored(x, inverse, KV: gl.constexpr):
    """Round float32 numbers to what the cache holds of them: the stored number, float32, and its byte, int32.
    inverse: of the scale."""
    y = x * inverse
    if KV == 1:
        y = (gl.minimum(gl.maximum(y, -128.0), 127.0) + _ROUNDER) - _ROUNDER
        return y, y.to(gl.int32) & 255
    else:
        stored = gl.minimum(gl.maximum(y, -448.0), 448.0).to(gl.float8e4nv)
        return stored.to(gl.float32), stored.to(gl.int8, bitcast=True).to(gl.int32) & 255


@gluon.jit
def pair_as_stored(x, y, is_new, inverse, KV: gl.constexpr):
    """A pair of float32 numbers as a word of float16: those of a new key or value as the cache holds them. And two
    bytes, of which only a new key's or value's mean anything."""
    stored_x, byte_x = as_stored(x, inverse, KV)
    stored_y, byte_y = as_stored(y, inverse, KV)
    x = gl.where(is_new, stored_x, gl.minimum(gl.maximum(x, -65504.0), 65504.0))
    y = gl.where(is_new, stored_y, gl.minimum(gl.maximum(y, -65504.0), 65504.0))
    return bits16(x, gl.float16) | (bits16(y, gl.float16) << 16), byte_x | (byte_y << 8)
