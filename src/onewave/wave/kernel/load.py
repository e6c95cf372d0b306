"""The loading partition of the wave kernel: one warp that streams the block's weight tiles through the ring.

It waits for free slots and, so that the queues in front of L2 stay short, for the tile FLIGHT places earlier to have
landed, or, of tiles that have time, for the one before. It never waits for activations. Where a launch STREAMS, keys
and values of attention's tasks come the same way, between the tiles (streamed.py).
"""
# ruff: noqa: RET505, SIM102, SIM108, RUF059, RUF005, B007, RUF100
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnusedVariable=false, reportReturnType=false, reportPossiblyUnboundVariable=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from onewave.wave.kernel.attend.streamed import keys_of_visit, stream_keys
from onewave.wave.kernel.words import LIST_SIZE

__all__ = ["load_first", "load_partition", "tiles_ahead"]


@gluon.jit
def tiles_ahead(num_tiles, visits, S: gl.constexpr, FLIGHT: gl.constexpr, STREAMS: gl.constexpr):
    """Tiles that a block asks for before its partitions part: as many as may be in flight, before any keys."""
    MOST: gl.constexpr = FLIGHT if FLIGHT < S else S
    ahead = gl.minimum(num_tiles, MOST)
    if STREAMS:
        ahead = gl.minimum(ahead, gl.load(visits))
    return ahead


@gluon.jit
def load_first(boxes, rings, full, count, first_row, row_step, TILE: gl.constexpr, S: gl.constexpr):
    """Ask for so many of the block's first tiles; their slots are free."""
    for tile in range(count):
        ask_for_tile(boxes, first_row + tile * row_step, rings, full, tile, TILE, S)


@gluon.jit
def ask_for_tile(boxes, row, rings, full, slot, TILE: gl.constexpr, S: gl.constexpr):
    """Have the copy engine bring the tile that begins in a row of the stream to a slot: in one box or, of compact
    weights, in three for the planes of words, one for the words beside them, and one for its list (compact.py).

    boxes: descriptors, and rings: shared memory, of the tiles themselves, and of the other two, if there are any."""
    if len(rings) == 1:
        mbarrier.expect(full.index(slot), TILE)
        tma.async_copy_global_to_shared(boxes[0], [row, 0], full.index(slot), rings[0].index(slot))
    else:
        PLANES: gl.constexpr = rings[0].shape[0] // S
        ROWS: gl.constexpr = rings[0].shape[1]
        LAST: gl.constexpr = rings[1].shape[1]
        mbarrier.expect(full.index(slot), TILE + 4 * LIST_SIZE)
        for plane in gl.static_range(PLANES):
            to = rings[0].index(slot * PLANES + plane)
            tma.async_copy_global_to_shared(boxes[0], [row + plane * ROWS, 0], full.index(slot), to)
        tma.async_copy_global_to_shared(boxes[1], [row + PLANES * ROWS, 0], full.index(slot), rings[1].index(slot))
        number = row // (PLANES * ROWS + LAST)
        tma.async_copy_global_to_shared(boxes[2], [number, 0], full.index(slot), rings[2].index(slot))


@gluon.jit
def load_partition(
    boxes, easy, keys, values, visits, steps, positions, slots, batch, rings, full, empty, first, num_tiles, first_row,
    row_step, DTYPE: gl.constexpr, TILE: gl.constexpr, S: gl.constexpr, FLIGHT: gl.constexpr, D: gl.constexpr,
    FEW: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    coming = easy
    first_easy = gl.load(easy)
    last_easy = gl.load(easy + 1)
    tile = first
    if STREAMS:
        # A visit's words are asked for a visit ahead, so that nothing waits for them.
        stop = gl.load(visits)
        task = gl.load(visits + 1)
        next_stop = gl.load(visits + 2)
        next_task = gl.load(visits + 3)
        row = 0
        blocks = 0
    # One turn more for keys of tasks behind the block's last product.
    for number in range(first, num_tiles + STREAMS):
        if STREAMS:
            while stop == number:
                row, blocks = keys_of_visit(task, row, blocks, steps, positions, slots, batch, D, FEW)
                tile = stream_keys(keys, values, row, blocks, rings[0], full, empty, tile, DTYPE, S, FLIGHT, D)
                visits += 2
                stop = next_stop
                task = next_task
                next_stop = gl.load(visits + 2)
                next_task = gl.load(visits + 3)
        if number < num_tiles:
            coming, first_easy, last_easy = load_tile(
                boxes, coming, first_easy, last_easy, rings, full, empty, tile, number, first_row,
                row_step, TILE, S, FLIGHT,
            )  # fmt: skip
        tile += 1


@gluon.jit
def load_tile(
    boxes, easy, first_easy, last_easy, rings, full, empty, tile, number, first_row, row_step,
    TILE: gl.constexpr, S: gl.constexpr, FLIGHT: gl.constexpr,
):  # fmt: skip
    """Stream one tile, as soon as a slot is free. tile: its number among all that pass the ring; number: among those of
    weights. first_easy, last_easy: of the run of tiles that have time that easy points to. Returns these three for the
    next tile."""
    slot = tile % S
    mbarrier.wait(empty.index(slot), ((tile // S) & 1) ^ 1)
    if FLIGHT < S:
        landed = tile - FLIGHT
        if number >= first_easy:
            landed = tile - 1
            if number >= last_easy:  # or the run was over before the first tile that comes this way
                easy += 2
                first_easy = gl.load(easy)
                last_easy = gl.load(easy + 1)
        if landed >= 0:
            mbarrier.wait(full.index(landed % S), (landed // S) & 1)
    ask_for_tile(boxes, first_row + number * row_step, rings, full, slot, TILE, S)
    return easy, first_easy, last_easy
