"""Keys and values in the stream of weights: an attention task's whole blocks of cached keys come through the ring.

A block is the 128 keys that the exchange partition's warps multiply at a time, 16 each: with heads of 64 a tile of keys
and a tile of values, with heads of 128 two of either, the first with 8 keys of each warp. They lie in the ring between
the weight tiles, before the tile that the task's record names (Word.COMES), so that the stream goes on while attention
does, and is as fast. How many there are follows from the sequence's length: the loader brings them, the exchange
partition takes them and frees their slots, and the multiply partition passes over as many. What is left over, less than
a block, the exchange partition loads itself, before its queries exist, and takes first.

Nobody waits in a circle for it: before a task's keys lie all tiles that its queries wait for, and of tiles behind them
only those that wait for the task, which the multiply partition takes in their turn.
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from onewave.wave.kernel.attend.combine import split_of_keys
from onewave.wave.kernel.words import (
    PLACE_HEAD_STRIDE,
    PLACE_LAYER_STRIDE,
    PLACE_SLOT_STRIDE,
    RECORD_SIZE,
    WORD_KV_HEAD,
    WORD_LAYER,
    WORD_SEQUENCE,
    WORD_SLICE,
    WORD_SPLITS,
    WORD_WINDOW,
)
from onewave.wave.plan.layout import BLOCK_KEYS, TILE_BYTES

__all__ = [
    "behind_keys",
    "from_ring",
    "keys_of_visit",
    "let_go_of_keys",
    "stream_keys",
    "tiles_of_block",
    "tiles_of_keys",
    "whole_blocks",
]

_BLOCK = gl.constexpr(BLOCK_KEYS)
_TILE = gl.constexpr(TILE_BYTES)


@gluon.constexpr_function
def tiles_of_block(dim) -> int:
    """Tiles of the ring that a block's keys and values take."""
    return 2 * max(1, dim // 64)


@gluon.jit
def whole_blocks(begin, end):
    """Whole blocks among the keys from `begin` to before `end`."""
    return gl.maximum(end - begin, 0) // _BLOCK


@gluon.jit
def blocks_of(record, positions, batch, FEW: gl.constexpr):
    """The first key of an attention task, by its record in device memory, and how many whole blocks it has."""
    sequence = gl.load(record + WORD_SEQUENCE)
    split = gl.load(record + WORD_SLICE)
    window = gl.load(record + WORD_WINDOW)
    splits = gl.load(record + WORD_SPLITS)
    length = gl.load(positions + sequence, mask=sequence < batch, other=0).to(gl.int32) + 1
    first_key, share, used = split_of_keys(window, splits, length, FEW)
    begin = first_key + split * share
    return begin, whole_blocks(begin, gl.minimum(begin + share, length - 1))


@gluon.jit
def tiles_of_keys(record, further, before, positions, batch, D: gl.constexpr, FEW: gl.constexpr):
    """How many tiles of the ring are an attention task's keys and values. further: its Word.FURTHER; before: as many of
    the lane's task before it."""
    if further == 0:
        begin, blocks = blocks_of(record, positions, batch, FEW)
        before = blocks * tiles_of_block(D)
    return before


@gluon.jit
def behind_keys(slot, phase, tiles, S: gl.constexpr):
    """The slot, and its phase, so many tiles further on."""
    at = slot + tiles
    return at % S, phase ^ ((at // S) & 1)


@gluon.jit
def keys_of_visit(task, row, blocks, steps, positions, slots, batch, D: gl.constexpr, FEW: gl.constexpr):
    """The first row of 64 values in the caches, and the whole blocks, of the keys that a lane's next attention task
    goes over. task: how many layers behind the one before, whose row and blocks are given, it goes over the same keys;
    or, below 0, -1 less its step."""
    places = (steps - RECORD_SIZE).to(gl.pointer_type(gl.int64))
    layer = gl.load(places + PLACE_LAYER_STRIDE)
    if task > 0:
        row += (task * (layer // 32)).to(gl.int32)
    else:
        record = steps + (-1 - task) * RECORD_SIZE
        begin, blocks = blocks_of(record, positions, batch, FEW)
        sequence = gl.load(record + WORD_SEQUENCE)
        words = (
            gl.load(record + WORD_LAYER) * layer
            + gl.load(slots + sequence, mask=sequence < batch, other=0) * gl.load(places + PLACE_SLOT_STRIDE)
            + gl.load(record + WORD_KV_HEAD) * gl.load(places + PLACE_HEAD_STRIDE)
        )
        row = (words // 32).to(gl.int32) + begin * (D // 64)
    return row, blocks


@gluon.jit
def stream_keys(
    keys, values, row, blocks, ring, full, empty, tile, DTYPE: gl.constexpr, S: gl.constexpr, FLIGHT: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Stream blocks of keys and values, as slots become free. keys, values: descriptors of the caches
    (launch_boxes.keys_box). row: keys_of_visit's. tile: the number of the ring's next tile; returns that of the one
    after them."""
    HALVES: gl.constexpr = D // 64
    # Beside larger tiles of weights, one more of keys.
    AHEAD: gl.constexpr = FLIGHT + 1 if ring.shape[0] > S else FLIGHT
    for piece in range(blocks * (2 * HALVES)):
        slot = tile % S
        mbarrier.wait(empty.index(slot), ((tile // S) & 1) ^ 1)
        if AHEAD < S:
            landed = tile - AHEAD
            if landed >= 0:
                mbarrier.wait(full.index(landed % S), (landed // S) & 1)
        mbarrier.expect(full.index(slot), _TILE)
        at = row + piece // (2 * HALVES) * (_BLOCK * HALVES) + piece % HALVES * 16
        box = ring.index(slot * (ring.shape[0] // S))._reinterpret(DTYPE, [8, 16, 64], gl.NVMMASharedLayout(128, 16, 3))
        if piece // HALVES % 2 == 0:
            tma.async_copy_global_to_shared(keys, [0, at, 0], full.index(slot), box)
        else:
            tma.async_copy_global_to_shared(values, [0, at, 0], full.index(slot), box)
        tile += 1
    return tile


@gluon.jit
def from_ring(
    ring, full, tile, LAYOUT: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, KW: gl.constexpr, XW: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """A block's keys, or its values, from the ring, once they have landed: words [XW, KW, D / 2] in LAYOUT. tile: the
    first one's number. ROWS: LAYOUT's words of a tile, as it lies there."""
    if D == 64:
        words = gl.reshape(tile_from_ring(ring, full, tile, ROWS, S), [XW, KW, D // 2])
    else:
        first = gl.reshape(tile_from_ring(ring, full, tile, ROWS, S), [XW, KW // 2, D // 2])
        second = gl.reshape(tile_from_ring(ring, full, tile + 1, ROWS, S), [XW, KW // 2, D // 2])
        words = gl.reshape(gl.permute(gl.join(first, second), (0, 3, 1, 2)), [XW, KW, D // 2])
    return gl.convert_layout(words, LAYOUT, assert_trivial=True)


@gluon.jit
def tile_from_ring(ring, full, tile, ROWS: gl.constexpr, S: gl.constexpr):
    slot = tile % S
    mbarrier.wait(full.index(slot), (tile // S) & 1)
    place = ring.index(slot * (ring.shape[0] // S))
    return place._reinterpret(gl.int32, [128, 32], gl.NVMMASharedLayout(128, 32, 2)).load(ROWS)


@gluon.jit
def let_go_of_keys(empty, tile, D: gl.constexpr, S: gl.constexpr):
    """Free the slots of a block, whose keys and values are in registers. tile: the first one's number."""
    fence_async_shared()
    gl.thread_barrier()
    for at in gl.static_range(tiles_of_block(D)):
        mbarrier.arrive(empty.index((tile + at) % S), count=1)
    gl.thread_barrier()
