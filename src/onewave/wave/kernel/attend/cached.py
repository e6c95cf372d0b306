"""Cached keys and values of a decode step: one run of rows a sequence, or KV blocks found through a block table.

PAGE 0: caches [layers, slots, kv_heads, capacity, D]. PAGE > 0: a KV block holds PAGE keys, caches [layers, blocks,
kv_heads, PAGE, D], and a table int32 [slots, blocks a slot]. Its rows are valid up to the last position. The table
must not change while the launch runs; it may change before the next.

A warp takes 16 keys at a time. They lie in one KV block, or in two where a sliding window begins in the middle of one;
the warp requests both block numbers a round before it needs them. A key's place has no influence on results.
"page" in names below is a KV block. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.kernel.attend.byte_cache import stored_dim
from onewave.wave.kernel.parameters import CacheRows
from onewave.wave.kernel.records import place_pointer, place_word, record_word
from onewave.wave.kernel.spin import prefetch_lines
from onewave.wave.kernel.words import PLACE, WORD


@gluon.constexpr_function
def page_bits(page) -> int:
    """log2 of a page's keys."""
    return page.bit_length() - 1


@gluon.jit
def rows_of_cache(step_record, sequences, places, c):
    """Find the keys and values of a task's sequence, layer and KV head: CacheRows.

    With pages: words from page 0 instead of pointers, and the block table's row with `places`: attention has no
    registers to keep pointers and a page's words in.
    """
    slot = gl.load(sequences.slots + record_word(step_record, WORD.SEQUENCE))
    layer = record_word(step_record, WORD.LAYER)
    if c.PAGE == 0:
        in_cache = (
            layer * place_word(places, PLACE.LAYER_STRIDE)
            + slot * place_word(places, PLACE.SLOT_STRIDE)
            + record_word(step_record, WORD.KV_HEAD) * place_word(places, PLACE.HEAD_STRIDE)
        )
        k_rows = gl.multiple_of(place_pointer(places, PLACE.KEYS, gl.int32) + in_cache, 16)
        v_rows = gl.multiple_of(place_pointer(places, PLACE.VALUES, gl.int32) + in_cache, 16)
        return CacheRows(k=k_rows, v=v_rows, table=(0, 0))
    else:
        in_cache = layer * place_word(places, PLACE.LAYER_STRIDE)
        if c.KV == 0:
            in_cache += record_word(step_record, WORD.KV_HEAD) * place_word(places, PLACE.HEAD_STRIDE)
        else:
            in_cache += record_word(step_record, WORD.KV_HEAD) * (c.PAGE * stored_dim(c.D, c.KV) // 2)
        row = place_pointer(places, PLACE.TABLE, gl.int32) + slot * place_word(places, PLACE.TABLE_STRIDE)
        return CacheRows(k=in_cache, v=in_cache, table=(row, places))


@gluon.jit
def base_of(rows, WHERE: gl.constexpr, PAGE: gl.constexpr):
    """The pointer to a task's keys (WHERE: PLACE.KEYS) or values (PLACE.VALUES); with pages, to those of page 0."""
    if PAGE == 0:
        return rows.k if WHERE == PLACE.KEYS else rows.v
    else:
        row, places = rows.table
        return gl.multiple_of(place_pointer(places, WHERE, gl.int32) + rows.k, 16)


@gluon.jit
def page_of(table, number, wanted, PAGE: gl.constexpr):
    """Load the page of the key `number`; 0 if not wanted."""
    row, places = table
    return gl.load(row + (number >> page_bits(PAGE)), mask=wanted, other=0)


@gluon.jit
def words_to(table, page, number, D: gl.constexpr, PAGE: gl.constexpr):
    """Words from page 0 to the key `number`, which is in `page`: int64. D: stored_dim."""
    row, places = table
    page_words = gl.multiple_of(place_word(places, PLACE.SLOT_STRIDE), 16)
    return page.to(gl.int64) * page_words + (number & (PAGE - 1)) * (D // 2)


@gluon.jit
def blocks_pages(rows, begin, end, KW: gl.constexpr, LAYOUT: gl.constexpr, c):
    """Load the pages of each warp's first and last key among the XW * KW from `begin` on: int32 [XW], for rows in
    LAYOUT; 0 for warps without a key before `end`."""
    if c.PAGE == 0:
        return 0, 0
    else:
        first = begin + gl.arange(0, c.XW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))) * KW
        last = gl.minimum(first + KW, end) - 1
        return page_of(rows.table, first, first < end, c.PAGE), page_of(rows.table, last, first < end, c.PAGE)


@gluon.jit
def numbers(KW: gl.constexpr, XW: gl.constexpr, LAYOUT: gl.constexpr):
    """Number XW * KW keys, KW a warp: [XW, KW]."""
    warp = gl.arange(0, XW, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    key = gl.arange(0, KW, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return warp * KW + key


@gluon.jit
def load_keys(rows, pages, begin, end, WHERE: gl.constexpr, KW: gl.constexpr, LAYOUT: gl.constexpr, c):
    """Load XW * KW rows of a cache from `begin` on: words [XW, KW, D / 2], zeros from `end` on, D being stored_dim.

    pages: blocks_pages of these rows. WHERE: as in base_of.
    """
    D: gl.constexpr = stored_dim(c.D, c.KV)
    word = gl.arange(0, D // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    number = begin + gl.expand_dims(numbers(KW, c.XW, gl.SliceLayout(2, LAYOUT)), 2)
    if c.PAGE == 0:
        at = number.to(gl.int64) * (D // 2) + word
    else:
        LW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
        first_page, last_page = pages
        first_page = gl.convert_layout(first_page, LW)[:, None][:, :, None]
        last_page = gl.convert_layout(last_page, LW)[:, None][:, :, None]
        first = begin + gl.arange(0, c.XW, layout=LW)[:, None][:, :, None] * KW
        page = gl.where((number ^ first) < c.PAGE, first_page, last_page)
        at = words_to(rows.table, page, number, D, c.PAGE) + word
    # Past L1: a row may be newer than a line that an earlier launch left there.
    return gl.load(base_of(rows, WHERE, c.PAGE) + at, mask=number < end, other=0, cache_modifier=".cg")


@gluon.jit
def lines_pages(rows, begin, end, KEYS: gl.constexpr, c):
    """Load the pages of the lines that prefetch_keys takes, in its layout; 0 from `end` on."""
    if c.PAGE == 0:
        return 0
    else:
        D: gl.constexpr = stored_dim(c.D, c.KV)
        number = begin + first_key_of_lines(KEYS * D // 64, D, c.XW)
        return page_of(rows.table, number, number < end, c.PAGE)


@gluon.jit
def first_key_of_lines(LINES: gl.constexpr, D: gl.constexpr, XW: gl.constexpr):
    """The first key of each line, [1, LINES]; a line holds two keys where D is 32."""
    L2: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, XW // 2], [1, 0])
    return gl.arange(0, LINES, layout=gl.SliceLayout(0, L2))[None, :] * 64 // D


@gluon.jit
def prefetch_keys(rows, pages, begin, end, KEYS: gl.constexpr, c):
    """Prefetch to L2 the lines of KEYS keys and values from `begin` on, those before `end`.

    pages: lines_pages of them.
    """
    D: gl.constexpr = stored_dim(c.D, c.KV)
    LINES: gl.constexpr = KEYS * D // 64
    L2: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, c.XW // 2], [1, 0])
    k_rows = base_of(rows, PLACE.KEYS, c.PAGE)
    v_rows = base_of(rows, PLACE.VALUES, c.PAGE)
    which = gl.arange(0, 2, layout=gl.SliceLayout(1, L2))[:, None]
    line = gl.arange(0, LINES, layout=gl.SliceLayout(0, L2))[None, :]
    if c.PAGE == 0:
        word = begin * (D // 2) + line * 32
        prefetch_lines(gl.where(which == 0, k_rows + word, v_rows + word), (word < end * (D // 2)) & (which >= 0))
    else:
        number = begin + first_key_of_lines(LINES, D, c.XW)
        word = words_to(rows.table, pages, number, D, c.PAGE) + line * 32 % max(32, D // 2)
        prefetch_lines(gl.where(which == 0, k_rows + word, v_rows + word), (number < end) & (which >= 0))
