"""Cached keys and values in the weight stream: an attention task's whole blocks of keys come through the ring.

A block is the 128 keys that the exchange partition's warps multiply at a time, 16 a warp. With head_dim 64 it takes a
tile of keys and a tile of values; with 128 two of each, the first with 8 keys of each warp. In 8 bits heads of 128 take
one of each, and heads of 64 half of one. The tiles lie in the ring
before the weight tile that the task's record names (Word.COMES), so the stream goes on at full speed while attention
runs. Their number follows from the sequence's length. The load partition brings them, the exchange partition reads them
and frees their slots, the multiply partition skips them. The exchange partition itself loads the keys left over, less
than a block, before its queries exist, and attends to them first.

With PAGE > 0 a KV block holds whole blocks of keys, and no layer has a window, in the middle of whose KV block a block
of keys would begin. The load partition asks for the number of the next KV block one block of keys ahead.

No deadlock: all tiles that a task's queries wait for come before its keys. Tiles after them wait for the task only, and
the multiply partition takes them in order. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from onewave.wave.kernel.attend.byte_cache import stored_dim
from onewave.wave.kernel.attend.combine import split_of_keys
from onewave.wave.kernel.words import PLACE, RECORD_SIZE, WORD
from onewave.wave.plan.layout import BLOCK_KEYS

_BLOCK = gl.constexpr(BLOCK_KEYS)


@gluon.constexpr_function
def tiles_of_block(dim) -> int:
    """Tiles of the ring that a block's keys and values take. dim: stored_dim."""
    return 2 * max(1, dim // 64)


@gluon.constexpr_function
def tile_rows(dim) -> int:
    """Rows of 64 16-bit values, 128 bytes, of a block's tile. dim: stored_dim."""
    return min(BLOCK_KEYS, BLOCK_KEYS * dim // 64)


@gluon.jit
def rows_of(keys, D: gl.constexpr):
    """Rows of 64 16-bit values that so many keys take. D: stored_dim."""
    if D >= 64:
        return keys * (D // 64)
    else:
        return keys // (64 // D)


@gluon.jit
def whole_blocks(begin, end):
    """Count whole blocks among the keys from `begin` to before `end`."""
    return gl.maximum(end - begin, 0) // _BLOCK


@gluon.jit
def blocks_of(record, sequences, c):
    """The first key of an attention task and its number of whole blocks. record: in device memory."""
    sequence = gl.load(record + WORD.SEQUENCE)
    split = gl.load(record + WORD.SLICE)
    window = gl.load(record + WORD.WINDOW)
    splits = gl.load(record + WORD.SPLITS)
    position = gl.load(sequences.positions + sequence, mask=sequence < sequences.batch, other=0)
    length = position.to(gl.int32) + 1
    first_key, share, used = split_of_keys(window, splits, length, c.MERGE_WORDS)
    begin = first_key + split * share
    return begin, whole_blocks(begin, gl.minimum(begin + share, length - 1))


@gluon.jit
def tiles_of_keys(record, further, before, sequences, c):
    """Count the tiles of an attention task's keys and values.

    further: its Word.FURTHER. before: tiles of the task before it on this thread block.
    """
    if further == 0:
        begin, blocks = blocks_of(record, sequences, c)
        before = blocks * tiles_of_block(stored_dim(c.D, c.KV))
    return before


@gluon.jit
def skip_tiles(slot, phase, tiles, S: gl.constexpr):
    """Advance a slot and its phase by so many tiles."""
    at = slot + tiles
    return at % S, phase ^ ((at // S) & 1)


@gluon.jit
def keys_of_task(task, row, blocks, steps, sequences, c):
    """Find the keys of the thread block's next attention task: first row of 64 values in the caches, whole blocks.

    task: below 0, -1 - (number of its step). Above 0, layers after the task before: its keys are at the same positions,
    and row and blocks are that task's. With PAGE > 0 the row is that of KV block 0.
    """
    places = (steps - RECORD_SIZE).to(gl.pointer_type(gl.int64))
    layer = gl.load(places + PLACE.LAYER_STRIDE)
    if task > 0:
        row += (task * (layer // 32)).to(gl.int32)
    else:
        record = steps + (-1 - task) * RECORD_SIZE
        begin, blocks = blocks_of(record, sequences, c)
        sequence = gl.load(record + WORD.SEQUENCE)
        words = gl.load(record + WORD.LAYER) * layer
        slot = gl.load(sequences.slots + sequence, mask=sequence < sequences.batch, other=0)
        if c.PAGE == 0:
            words += slot * gl.load(places + PLACE.SLOT_STRIDE)
        if c.KV == 0:
            words += gl.load(record + WORD.KV_HEAD) * gl.load(places + PLACE.HEAD_STRIDE)
        else:
            words += gl.load(record + WORD.KV_HEAD) * (c.PAGE * stored_dim(c.D, c.KV) // 2)
        row = (words // 32).to(gl.int32)
        if c.PAGE == 0:
            row += begin * (c.D // 64)
    return row, blocks


@gluon.jit
def entry_of_task(task, entry, steps, sequences, c):
    """Find the entry of the block table for the first key of the thread block's next attention task: its number among
    all entries, and that key's row of 64 values in its KV block. task: as keys_of_task. entry: of the task before."""
    number, row = entry
    if c.PAGE > 0:
        if task < 0:
            places = (steps - RECORD_SIZE).to(gl.pointer_type(gl.int64))
            record = steps + (-1 - task) * RECORD_SIZE
            begin, blocks = blocks_of(record, sequences, c)
            sequence = gl.load(record + WORD.SEQUENCE)
            slot = gl.load(sequences.slots + sequence, mask=sequence < sequences.batch, other=0)
            number = (slot * gl.load(places + PLACE.TABLE_STRIDE)).to(gl.int32) + begin // c.PAGE
            row = rows_of(begin % c.PAGE, stored_dim(c.D, c.KV))
    return number, row


@gluon.jit
def stream_keys(cached, row, blocks, entry, ring, tile, c):
    """Stream blocks of keys and values, as slots become free. Returns the number of the tile after them.

    cached: KeyStream (boxes.keys_box). row: as keys_of_task. entry: as entry_of_task. tile: number of the ring's next
    tile.
    """
    D: gl.constexpr = stored_dim(c.D, c.KV)
    HALVES: gl.constexpr = max(1, D // 64)
    TILE_ROWS: gl.constexpr = tile_rows(D)
    BLOCK_ROWS: gl.constexpr = TILE_ROWS * HALVES
    PAGE_ROWS: gl.constexpr = c.PAGE * D // 64
    first = row
    if c.PAGE > 0:
        number, in_page = entry
        places = (cached.steps - RECORD_SIZE).to(gl.pointer_type(gl.int64))
        page_rows = (gl.load(places + PLACE.SLOT_STRIDE) // 32).to(gl.int32)
        entries = gl.load(places + PLACE.TABLE).to(gl.pointer_type(gl.int32)) + number
        page = gl.load(entries, mask=blocks > 0, other=0)
    tiles = ring.places[0]
    # One tile of keys more in flight, where weight tiles are larger.
    AHEAD: gl.constexpr = c.FLIGHT + 1 if tiles.shape[0] > c.S else c.FLIGHT
    for piece in range(blocks * (2 * HALVES)):
        slot = tile % c.S
        mbarrier.wait(ring.empty.index(slot), ((tile // c.S) & 1) ^ 1)
        if AHEAD < c.S:
            landed = tile - AHEAD
            if landed >= 0:
                mbarrier.wait(ring.full.index(landed % c.S), (landed // c.S) & 1)
        mbarrier.expect(ring.full.index(slot), TILE_ROWS * 128)
        if c.PAGE == 0:
            at = row + piece // (2 * HALVES) * BLOCK_ROWS + piece % HALVES * 16
        else:
            if piece % (2 * HALVES) == 0:
                first = row + page * page_rows + in_page
                in_page += BLOCK_ROWS
                if in_page == PAGE_ROWS:
                    in_page = 0
                    entries += 1
                    page = gl.load(entries, mask=piece + 2 * HALVES < blocks * (2 * HALVES), other=0)
            at = first + piece % HALVES * 16
        place = tiles.index(slot * (tiles.shape[0] // c.S))
        if c.KV == 0:
            box = place._reinterpret(c.DTYPE, [8, 16, 64], gl.NVMMASharedLayout(128, 16, 3))
        else:
            box = place._reinterpret(gl.int8, [8, TILE_ROWS // 8, 128], gl.NVMMASharedLayout(128, 8, 3))
        if piece // HALVES % 2 == 0:
            tma.async_copy_global_to_shared(cached.k_box, [0, at, 0], ring.full.index(slot), box)
        else:
            tma.async_copy_global_to_shared(cached.v_box, [0, at, 0], ring.full.index(slot), box)
        tile += 1
    return tile


@gluon.jit
def from_ring(ring, tile, LAYOUT: gl.constexpr, ROWS: gl.constexpr, KW: gl.constexpr, c):
    """Load a block's keys, or its values, from the ring once they have landed: words [XW, KW, D / 2] in LAYOUT, D being
    stored_dim.

    tile: number of the first tile. ROWS: layout of a tile's words as they lie there.
    """
    D: gl.constexpr = stored_dim(c.D, c.KV)
    if D <= 64:
        words = gl.reshape(tile_from_ring(ring, tile, ROWS, c), [c.XW, KW, D // 2])
    else:
        first = gl.reshape(tile_from_ring(ring, tile, ROWS, c), [c.XW, KW // 2, D // 2])
        second = gl.reshape(tile_from_ring(ring, tile + 1, ROWS, c), [c.XW, KW // 2, D // 2])
        words = gl.reshape(gl.permute(gl.join(first, second), (0, 3, 1, 2)), [c.XW, KW, D // 2])
    return gl.convert_layout(words, LAYOUT, assert_trivial=True)


@gluon.jit
def tile_from_ring(ring, tile, ROWS: gl.constexpr, c):
    """Load a tile's words from the ring once it has landed: [tile_rows, 32] in ROWS."""
    slot = tile % c.S
    mbarrier.wait(ring.full.index(slot), (tile // c.S) & 1)
    tiles = ring.places[0]
    place = tiles.index(slot * (tiles.shape[0] // c.S))
    TILE_ROWS: gl.constexpr = tile_rows(stored_dim(c.D, c.KV))
    return place._reinterpret(gl.int32, [TILE_ROWS, 32], gl.NVMMASharedLayout(128, 32, 2)).load(ROWS)


@gluon.jit
def release_keys(ring, tile, TILES: gl.constexpr, c):
    """Free the slots of so many tiles once their keys and values are in registers. tile: number of the first tile."""
    fence_async_shared()
    gl.thread_barrier()
    for at in gl.static_range(TILES):
        mbarrier.arrive(ring.empty.index((tile + at) % c.S), count=1)
    gl.thread_barrier()
