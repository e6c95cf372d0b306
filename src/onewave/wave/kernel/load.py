"""The load partition of the wave kernel: one warp streams the thread block's weight tiles through the ring by TMA.

Order of waits, for each tile: its slot's empty barrier; then the full barrier of the tile FLIGHT before it, so that
queues in front of L2 stay short. A tile that has slack waits for the tile just before it instead. The warp never waits
for activations. Where a launch STREAMS, cached keys and values come between the weight tiles (attend/streamed.py).
Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from onewave.wave.kernel.attend.streamed import entry_of_task, keys_of_task, stream_keys
from onewave.wave.kernel.words import LIST_SIZE, tile_bytes


@gluon.jit
def tiles_ahead(num_tiles, tasks, c):
    """Count the tiles that are requested before the partitions part: those in flight that come before any keys."""
    MAX_AHEAD: gl.constexpr = c.FLIGHT if c.FLIGHT < c.S else c.S
    ahead = gl.minimum(num_tiles, MAX_AHEAD)
    if c.STREAMS:
        ahead = gl.minimum(ahead, gl.load(tasks))
    return ahead


@gluon.jit
def load_first(stream, ring, c):
    """Request the thread block's first stream.ahead tiles; their slots are free."""
    for tile in range(stream.ahead):
        request_tile(stream.boxes, stream.first_row + tile * stream.row_step, ring, tile, c)


@gluon.jit
def request_tile(boxes, row, ring, slot, c):
    """Request the tile that begins in a row of the stream for a slot, by TMA.

    One box; for 4-bit weights one more for the scales, or three for nested ones; or for compact weights three for the
    planes of words, one for the words beside them, one for the list.
    """
    TILE: gl.constexpr = tile_bytes(c.FORMAT, c.IMAGES)
    tiles = ring.places
    full = ring.full
    if len(tiles) == 1:
        mbarrier.expect(full.index(slot), TILE)
        tma.async_copy_global_to_shared(boxes[0], [row, 0], full.index(slot), tiles[0].index(slot))
    elif len(tiles) == 2:
        mbarrier.expect(full.index(slot), TILE)
        tma.async_copy_global_to_shared(boxes[0], [row, 0], full.index(slot), tiles[0].index(slot))
        scales = row + tiles[0].shape[1]
        COPIES: gl.constexpr = tiles[1].shape[0] // c.S
        for copy in gl.static_range(COPIES):
            to = tiles[1].index(slot * COPIES + copy)
            tma.async_copy_global_to_shared(boxes[1], [scales + copy * to.shape[0], 0], full.index(slot), to)
    else:
        PLANES: gl.constexpr = tiles[0].shape[0] // c.S
        ROWS: gl.constexpr = tiles[0].shape[1]
        LAST: gl.constexpr = tiles[1].shape[1]
        mbarrier.expect(full.index(slot), TILE + 4 * LIST_SIZE)
        for plane in gl.static_range(PLANES):
            to = tiles[0].index(slot * PLANES + plane)
            tma.async_copy_global_to_shared(boxes[0], [row + plane * ROWS, 0], full.index(slot), to)
        tma.async_copy_global_to_shared(boxes[1], [row + PLANES * ROWS, 0], full.index(slot), tiles[1].index(slot))
        number = row // (PLANES * ROWS + LAST)
        tma.async_copy_global_to_shared(boxes[2], [number, 0], full.index(slot), tiles[2].index(slot))


@gluon.jit
def load_partition(stream, slack, cached, sequences, ring, c):
    """Stream the thread block's weight tiles, and cached keys and values between them.

    slack: pointer to the runs of tiles that have slack (program.py). cached: KeyStream.
    """
    coming = slack
    first_slack = gl.load(slack)
    last_slack = gl.load(slack + 1)
    tile = stream.ahead
    tasks = cached.tasks
    if c.STREAMS:
        # Loaded one attention task ahead, so that nothing waits for them.
        stop = gl.load(tasks)
        task = gl.load(tasks + 1)
        next_stop = gl.load(tasks + 2)
        next_task = gl.load(tasks + 3)
        row = 0
        blocks = 0
        entry = 0
        in_page = 0
    # One turn more, for keys of tasks after the last product.
    for number in range(stream.ahead, stream.num_tiles + c.STREAMS):
        if c.STREAMS:
            while stop == number:
                row, blocks = keys_of_task(task, row, blocks, cached.steps, sequences, c)
                entry, in_page = entry_of_task(task, (entry, in_page), cached.steps, sequences, c)
                tile = stream_keys(cached, row, blocks, (entry, in_page), ring, tile, c)
                tasks += 2
                stop = next_stop
                task = next_task
                next_stop = gl.load(tasks + 2)
                next_task = gl.load(tasks + 3)
        if number < stream.num_tiles:
            coming, first_slack, last_slack = load_tile(
                stream, (coming, first_slack, last_slack), ring, tile, number, c
            )
        tile += 1


@gluon.jit
def load_tile(stream, run, ring, tile, number, c):
    """Stream one weight tile, as soon as its slot is free.

    run: pointer to a run of tiles that have slack, its first and its last tile. tile: number among all that pass the
    ring; number: among weight tiles. Returns the run of the next tile.
    """
    slack, first_slack, last_slack = run
    slot = tile % c.S
    mbarrier.wait(ring.empty.index(slot), ((tile // c.S) & 1) ^ 1)
    if c.FLIGHT < c.S:
        landed = tile - c.FLIGHT
        if number >= first_slack:
            landed = tile - 1
            if number >= last_slack:  # the run ends here, or ended before the first tile of this loop
                slack += 2
                first_slack = gl.load(slack)
                last_slack = gl.load(slack + 1)
        if landed >= 0:
            mbarrier.wait(ring.full.index(landed % c.S), (landed // c.S) & 1)
    request_tile(stream.boxes, stream.first_row + number * stream.row_step, ring, slot, c)
    return slack, first_slack, last_slack
