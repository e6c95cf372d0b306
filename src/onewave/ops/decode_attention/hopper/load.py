"""The warp that loads: over the program's list of rows and tiles, by TMA, into a ring.

Keys lie one after another, in blocks that a table names and that hold whole tiles, or in smaller pages: then a tile is
put together from pieces of a page by 128 bytes, or of whole keys that have fewer, each to where the whole tile has it.
Which pages those are is asked for before the wait for a free place, so that the answer is there when the place is.

Where keys lie one after another and nothing is fused, the first tiles are guessed: from the lengths of before the wait
for the launch before, and asked for right behind it. When the real ones have come they are kept or, if those differ,
waited for and asked for anew (settle). The workers wait for that verdict: `sure`.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra import cuda

from onewave.ops.decode_attention.hopper.parts import (
    bytes_of_number,
    columns_across,
    early_part,
    own_share,
    part_here,
    part_of_only_row,
)
from onewave.ops.decode_attention.triton.shares import listed_keys, row_lengths


@gluon.jit
def next_place(slot, phase, STAGES: gl.constexpr):
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def boxed(buffer, descriptor):
    """buffer [rows, columns] as a box of a descriptor."""
    return buffer._reinterpret(descriptor.dtype, descriptor.block_shape, descriptor.layout)


@gluon.jit
def fetch(c, tiles, block, kv_head, key, buffer, full):
    """Have TMA bring BLOCK_N keys (or values) of a block, from `key` on, into buffer, and tell the barrier full."""
    mbarrier.expect(full, c.BLOCK_N * c.BLOCK_D * bytes_of_number(c.KV))
    tma.async_copy_global_to_shared(tiles, [block, kv_head, key, 0], full, boxed(buffer, tiles))


@gluon.jit
def fetch_pages(c, tiles, pages, kv_head, buffer, full):
    """The same from whole pages of PAGE keys, in pieces of the bytes in which swizzled shared memory repeats, each to
    where the whole tile has it."""
    mbarrier.expect(full, c.BLOCK_N * c.BLOCK_D * bytes_of_number(c.KV))
    ACROSS: gl.constexpr = columns_across(c.KV, c.BLOCK_D)
    PIECES: gl.constexpr = c.BLOCK_N // c.PAGE
    pieces = buffer._reinterpret(tiles.dtype, [c.BLOCK_D // ACROSS * PIECES, c.PAGE, ACROSS], buffer.layout)
    for piece in gl.static_range(PIECES):
        for across in gl.static_range(c.BLOCK_D // ACROSS):
            to = boxed(pieces.index(across * PIECES + piece), tiles)
            tma.async_copy_global_to_shared(tiles, [pages[piece], kv_head, 0, across * ACROSS], full, to)


@gluon.jit
def pages_of_tile(c, row, start, first_key, end):
    """The blocks of a row's keys from `start` on: one of each PAGE keys, 0 where no key is seen."""
    pages = ()
    for piece in gl.static_range(c.BLOCK_N // c.PAGE):
        key = start + piece * c.PAGE
        seen = (key < end) & (key + c.PAGE > first_key)
        pages += (
            gl.load(c.table + row.to(gl.int64) * c.stride_table + key // c.PAGE, mask=seen, other=0).to(gl.int32),
        )
    return pages


@gluon.jit
def worked_out(number):
    """The first lane's number, int32, worked out here: ptxas would do that where it is needed, and so put most of
    what finds a program's share behind the wait for the launch before."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; shfl.sync.idx.b32 $0, $1, 0, 31, -1; setp.eq.s32 p, $0, -7; @p nanosleep.u32 0; }",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fetch_guessed(c, guessed, row, begin, kv_head):
    """Have so many tiles, FLIGHT at most, of a row's keys from begin on brought to the first places."""
    gl.static_assert(c.FLIGHT <= c.STAGES)
    for i in gl.static_range(c.FLIGHT):
        if i < guessed:
            key = begin + i * c.BLOCK_N
            fetch(c, c.k_tiles, row, kv_head, key, c.k_ring.index(i), c.k_full.index(i))
            fetch(c, c.v_tiles, row, kv_head, key, c.v_ring.index(i), c.v_full.index(i))


@gluon.jit
def settle(c, right, guessed):
    """Let the workers begin, with what was guessed if it was right; if not, when it has come and its places are as if
    nothing had. Returns how many tiles need not be asked for any more."""
    if not right:
        for i in gl.static_range(c.FLIGHT):
            if i < guessed:
                mbarrier.wait(c.k_full.index(i), 0)
                mbarrier.wait(c.v_full.index(i), 0)
                # With a second phase behind it the next one has the parity of the first.
                mbarrier.arrive(c.k_full.index(i), count=1)
                mbarrier.arrive(c.v_full.index(i), count=1)
    mbarrier.arrive(c.sure.index(0), count=1)
    return gl.where(right, guessed, 0)


@gluon.jit
def load_tiles(c):
    """The loader: see the top of this file."""
    kv_head = gl.program_id(1) // c.TILES
    guessed = 0
    if c.GUESSES or c.ROWS == 1:
        early_row, early_length, early = early_part(c)
        early_begin, early_end = early.begin, early.end
        if c.GUESSES:
            guessed = (gl.maximum(early_end - early_begin, 0) + c.BLOCK_N - 1) // c.BLOCK_N
            guessed = worked_out(gl.minimum(guessed, c.FLIGHT))
        if c.ROWS == 1:
            early_length = worked_out(early_length)
        else:
            early_row = worked_out(early_row)
        early_begin, early_end = worked_out(early_begin), worked_out(early_end)
    # Copies by TMA after it only: behind one, even one of nothing, the wait does not hold (docs/log/correctness.md).
    cuda.gdc_wait()
    if c.GUESSES:
        fetch_guessed(c, guessed, early_row, early_begin, kv_head)
    if c.ROWS == 1:
        first_row, last_row, row_at = early_row, early_row, 0
        first_key, begin, end = early.first_key, early_begin, early_end
        length = row_lengths(first_row, True, c)
        right = length == early_length
        if not right:
            part = part_of_only_row(c, length)
            first_key, begin, end = part.first_key, part.begin, part.end
    else:
        first_row, last_row, row_at, share_begin, share_end = own_share(c)
    slot = 0
    phase = 1
    behind = 0
    behind_phase = 0
    issued = 0
    for row in tl.range(first_row, last_row + 1, disable_licm=True):
        if c.ROWS > 1:
            length = row_lengths(row.to(gl.int64), row >= 0, c)
            part = part_here(c, row_at, length, share_begin, share_end)
            first_key, begin, end = part.first_key, part.begin, part.end
            row_at += listed_keys(length, c)
        block = row
        if c.PAGING == 1:
            block = gl.load(c.table + row.to(gl.int64) * c.stride_table).to(gl.int32)
        if c.GUESSES:
            if row == first_row:
                if c.ROWS > 1:
                    right = (early_row == row) & (early_begin == begin) & (early_end == end)
                guessed = settle(c, right, guessed)
        for start in range(begin, end, c.BLOCK_N):
            if (row == last_row) & (start + c.BLOCK_N >= end):
                cuda.gdc_launch_dependents()
            key = start
            if c.PAGING == 2:
                block = gl.load(c.table + row.to(gl.int64) * c.stride_table + start // c.block_size).to(gl.int32)
                key = start % c.block_size
            if c.PAGING == 3:
                pages = pages_of_tile(c, row, start, first_key, end)
            # A guessed tile has its place, which may be free again by now: the wait would be for the round after.
            asks = True if not c.GUESSES else issued >= guessed
            if asks:
                mbarrier.wait(c.empty.index(slot), phase)
            # Keys after keys and values after values, so that never more than FLIGHT tiles' bytes are under way.
            old = issued >= c.FLIGHT
            if old:
                mbarrier.wait(c.k_full.index(behind), behind_phase)
            if c.PAGING == 3:
                fetch_pages(c, c.k_tiles, pages, kv_head, c.k_ring.index(slot), c.k_full.index(slot))
            elif asks:
                fetch(c, c.k_tiles, block, kv_head, key, c.k_ring.index(slot), c.k_full.index(slot))
            if old:
                mbarrier.wait(c.v_full.index(behind), behind_phase)
                behind, behind_phase = next_place(behind, behind_phase, c.STAGES)
            if c.PAGING == 3:
                fetch_pages(c, c.v_tiles, pages, kv_head, c.v_ring.index(slot), c.v_full.index(slot))
            elif asks:
                fetch(c, c.v_tiles, block, kv_head, key, c.v_ring.index(slot), c.v_full.index(slot))
            issued += 1
            slot, phase = next_place(slot, phase, c.STAGES)
    if c.GUESSES:
        if first_row > last_row:
            # No row, so no warp waits; but what was guessed must have come before the program ends.
            settle(c, gl.to_tensor(False), guessed)
