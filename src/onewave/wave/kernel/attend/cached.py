"""Where a decode step's keys and values lie: one run of rows a sequence, or pages found through a block table.

PAGE 0: caches [layers, slots, kv_heads, capacity, D]. Else PAGE, a power of two from 16, is the keys of a page: caches
[layers, pages, kv_heads, PAGE, D] and a table int32 [slots, pages a slot], whose rows' entries up to that of the last
position are pages of the caches. The table belongs to the launch while it runs, and may be another before the next.

A warp takes 16 keys at a time, which lie in one page, or in two where a sliding window begins in the middle of one: it
asks for both a block of keys before it needs them. What is computed from which key does not depend on where it lies.
"""
# ruff: noqa: RET505, SIM102, SIM108, RUF059, RUF005, B007, RUF100
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnusedVariable=false, reportReturnType=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.kernel.records import noted, place_of, place_word
from onewave.wave.kernel.spin import prefetch_lines
from onewave.wave.kernel.words import (
    PLACE_HEAD_STRIDE,
    PLACE_KEYS,
    PLACE_LAYER_STRIDE,
    PLACE_SLOT_STRIDE,
    PLACE_TABLE,
    PLACE_TABLE_STRIDE,
    PLACE_VALUES,
    WORD_KV_HEAD,
    WORD_LAYER,
    WORD_SEQUENCE,
)

__all__ = [
    "base_of",
    "blocks_pages",
    "lines_pages",
    "load_keys",
    "numbers",
    "page_of",
    "prefetch_keys",
    "rows_of_cache",
    "words_to",
]


@gluon.constexpr_function
def page_bits(page) -> int:
    """The power of two that a page's keys are."""
    return page.bit_length() - 1


@gluon.jit
def rows_of_cache(record, slots, places, PAGE: gl.constexpr):
    """Pointers to the keys and values of the task's sequence, layer and KV head. Of a paged cache, words to those of
    page 0 instead, for base_of, and the sequence's row of the block table with the launch's places: attention has no
    registers to keep pointers and a page's words in."""
    slot = gl.load(slots + noted(record, WORD_SEQUENCE))
    layer = noted(record, WORD_LAYER)
    if PAGE == 0:
        in_cache = (
            layer * place_word(places, PLACE_LAYER_STRIDE)
            + slot * place_word(places, PLACE_SLOT_STRIDE)
            + noted(record, WORD_KV_HEAD) * place_word(places, PLACE_HEAD_STRIDE)
        )
        k_rows = gl.multiple_of(place_of(places, PLACE_KEYS, gl.int32) + in_cache, 16)
        v_rows = gl.multiple_of(place_of(places, PLACE_VALUES, gl.int32) + in_cache, 16)
        return k_rows, v_rows, (0, 0)
    else:
        in_cache = layer * place_word(places, PLACE_LAYER_STRIDE)
        in_cache += noted(record, WORD_KV_HEAD) * place_word(places, PLACE_HEAD_STRIDE)
        row = place_of(places, PLACE_TABLE, gl.int32) + slot * place_word(places, PLACE_TABLE_STRIDE)
        return in_cache, in_cache, (row, places)


@gluon.jit
def base_of(rows, table, WHERE: gl.constexpr, PAGE: gl.constexpr):
    """The pointer behind rows_of_cache's keys (WHERE: PLACE_KEYS) or values (PLACE_VALUES)."""
    if PAGE == 0:
        return rows
    else:
        row, places = table
        return gl.multiple_of(place_of(places, WHERE, gl.int32) + rows, 16)


@gluon.jit
def page_of(table, number, wanted, PAGE: gl.constexpr):
    """The page of the key of that number; 0 if not wanted."""
    row, places = table
    return gl.load(row + (number >> page_bits(PAGE)), mask=wanted, other=0)


@gluon.jit
def words_to(table, page, number, D: gl.constexpr, PAGE: gl.constexpr):
    """Words from page 0 to the key of that number in its page, int64."""
    row, places = table
    page_words = gl.multiple_of(place_word(places, PLACE_SLOT_STRIDE), 16)
    return page.to(gl.int64) * page_words + (number & (PAGE - 1)) * (D // 2)


@gluon.jit
def blocks_pages(
    table, begin, end, KW: gl.constexpr, XW: gl.constexpr, LAYOUT: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """The pages of each warp's first and last key of the XW * KW from `begin` on, int32 [XW] for rows in LAYOUT; 0 for
    warps without a key before `end`."""
    if PAGE == 0:
        return 0, 0
    else:
        first = begin + gl.arange(0, XW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))) * KW
        last = gl.minimum(first + KW, end) - 1
        return page_of(table, first, first < end, PAGE), page_of(table, last, first < end, PAGE)


@gluon.jit
def numbers(KW: gl.constexpr, XW: gl.constexpr, LAYOUT: gl.constexpr):
    """Which of XW * KW keys each of a warp's is, [XW, KW]."""
    warp = gl.arange(0, XW, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    key = gl.arange(0, KW, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return warp * KW + key


@gluon.jit
def load_keys(
    rows, table, pages, begin, end, WHERE: gl.constexpr, D: gl.constexpr, KW: gl.constexpr, XW: gl.constexpr,
    LAYOUT: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The words of XW * KW rows of a cache from `begin` on, [XW, KW, D / 2]; zeros from `end` on. pages: what
    blocks_pages says of these rows. WHERE: as in base_of."""
    word = gl.arange(0, D // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    number = begin + gl.expand_dims(numbers(KW, XW, gl.SliceLayout(2, LAYOUT)), 2)
    if PAGE == 0:
        at = number.to(gl.int64) * (D // 2) + word
    else:
        LW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
        first_page, last_page = pages
        first_page = gl.convert_layout(first_page, LW)[:, None][:, :, None]
        last_page = gl.convert_layout(last_page, LW)[:, None][:, :, None]
        first = begin + gl.arange(0, XW, layout=LW)[:, None][:, :, None] * KW
        page = gl.where((number ^ first) < PAGE, first_page, last_page)
        at = words_to(table, page, number, D, PAGE) + word
    # Past the first-level cache: a row may be younger than a line that an earlier launch left there.
    return gl.load(base_of(rows, table, WHERE, PAGE) + at, mask=number < end, other=0, cache_modifier=".cg")


@gluon.jit
def lines_pages(table, begin, end, KEYS: gl.constexpr, D: gl.constexpr, XW: gl.constexpr, PAGE: gl.constexpr):
    """The pages of the lines that prefetch_keys then brings nearer, laid out as these; 0 from `end` on."""
    if PAGE == 0:
        return 0
    else:
        number = begin + first_key_of_lines(KEYS * D // 64, D, XW)
        return page_of(table, number, number < end, PAGE)


@gluon.jit
def first_key_of_lines(LINES: gl.constexpr, D: gl.constexpr, XW: gl.constexpr):
    """The first key of each line, [1, LINES]; a line holds two of 32 values."""
    L2: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, XW // 2], [1, 0])
    return gl.arange(0, LINES, layout=gl.SliceLayout(0, L2))[None, :] * 64 // D


@gluon.jit
def prefetch_keys(
    k_rows, v_rows, table, pages, begin, end, KEYS: gl.constexpr, D: gl.constexpr, XW: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Bring the lines of KEYS keys and values from `begin` on, if before `end`, into the second-level cache. pages:
    what lines_pages says of them."""
    LINES: gl.constexpr = KEYS * D // 64
    L2: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, XW // 2], [1, 0])
    k_rows = base_of(k_rows, table, PLACE_KEYS, PAGE)
    v_rows = base_of(v_rows, table, PLACE_VALUES, PAGE)
    which = gl.arange(0, 2, layout=gl.SliceLayout(1, L2))[:, None]
    line = gl.arange(0, LINES, layout=gl.SliceLayout(0, L2))[None, :]
    if PAGE == 0:
        word = begin * (D // 2) + line * 32
        prefetch_lines(gl.where(which == 0, k_rows + word, v_rows + word), (word < end * (D // 2)) & (which >= 0))
    else:
        number = begin + first_key_of_lines(LINES, D, XW)
        word = words_to(table, pages, number, D, PAGE) + line * 32 % max(32, D // 2)
        prefetch_lines(gl.where(which == 0, k_rows + word, v_rows + word), (number < end) & (which >= 0))
