"""All of a decoder layer behind attention in one launch: the feed-forward chain's kernel with two stages more.

A block is one SM, with the partitions of ffn/chain/kernel.py, and runs a queue of tiles: of the projection (kind 2),
of gate and up (kind 0), of the product down (kind 1). One partition more runs a queue of its own beside it:

norm      2 warps. A task is NORM_ROWS rows of the residual stream: it adds the projection's rows (kind 3) or those of
          the product down (kind 4), normalises, and posts for the tiles that read the rows, if any. It reads a
          row twice, the second time from L1, because registers do not hold one.

So norms run beside products, on warps and bandwidth that products leave idle; they are late only at the end.

Bits. Every product is one chain of wgmma over K, as in linear/hopper/kernel.py. Gate and up are rounded before they are
multiplied. A norm adds squares in the order of rms_norm/triton_impl.py, which has a row over 8 warps (4 up to 1,024
columns): a thread's 8 neighbours of every 2048 (1024) columns, then lanes 16, 8, 4, 2, 1 apart, then warps 4, 2, 1
apart. So all results are those of the separate operators, bit for bit.

Why rows are visible. From TMA to a norm: as in ffn/chain/kernel.py up to the release; acquire by every lane, plain
loads. From a norm to TMA: plain stores, fence.proxy.async, a barrier of the partition, release; acquire by the load
warp, fence.proxy.async, TMA loads.

Bound: the tensor cores.

constexpr    meaning [unit] (allowed values)
HIDDEN       columns of a row, as hidden_size (576 to 4096: with more, norms spill)
NORM_ROWS    rows of a task of the norms
others       as in ffn/chain/kernel.py
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.gpu.ptx.hook import install
from onewave.ops.ffn.chain.kernel import (
    Constants,
    allocate,
    load_partition,
    multiply_partition,
    pause,
    store_partition,
    wait_for,
)
from onewave.ops.post_attention.chain.plan import NORM_ROWS
from onewave.wave.kernel.spin import nanoseconds

NORM_WARPS = 2
_ROWS, _WARPS = gl.constexpr(NORM_ROWS), gl.constexpr(NORM_WARPS)
_STORED = gl.constexpr("fence.proxy.async; mov.u32 $0, 0;")


@gluon.jit
def stored():
    """Order what this thread has stored before TMA loads that follow the acquire of a later release."""
    gl.inline_asm_elementwise(_STORED, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def halves(x):
    """The elements of a last axis of 2, 4 or 8, as a tuple in order; this moves no register."""
    WIDTH: gl.constexpr = x.shape[1]
    HEIGHT: gl.constexpr = x.shape[0]
    if WIDTH == 1:
        found = (gl.reshape(x, [HEIGHT]),)
    else:
        even, odd = gl.split(gl.reshape(x, [HEIGHT, WIDTH // 2, 2]))
        found = ()
        evens = halves(even)
        odds = halves(odd)
        for at in gl.static_range(WIDTH // 2):
            found = found + (evens[at], odds[at])
    return found


@gluon.jit
def squares_behind(sums, x, FIRST: gl.constexpr):
    """Add the squares of each thread's 8 columns to its sum, in order."""
    parts = halves(gl.reshape(x, [x.shape[0] // 8, 8]))
    if FIRST:
        sums = gl.fma(parts[0], parts[0], parts[1] * parts[1])
    else:
        sums = gl.fma(parts[0], parts[0], sums)
        sums = gl.fma(parts[1], parts[1], sums)
    for at in gl.static_range(2, 8):
        sums = gl.fma(parts[at], parts[at], sums)
    return sums


@gluon.jit
def norm_row(x, residual, total, normed, weight, hidden, eps, HIDDEN: gl.constexpr):
    """Add a row to the residual stream and normalise the sum; see the module. Pointers to the row's first columns."""
    SPAN: gl.constexpr = 256 * _WARPS
    WIDTH: gl.constexpr = 2048 if HIDDEN > 1024 else 1024
    PADDED: gl.constexpr = (HIDDEN + WIDTH - 1) // WIDTH * WIDTH
    PARTS: gl.constexpr = WIDTH // SPAN
    LINE: gl.constexpr = gl.BlockedLayout([8], [32], [_WARPS], [0])
    lane = gl.arange(0, SPAN, layout=LINE)
    warps = ()
    for part in gl.static_range(PARTS):
        for begin in gl.static_range(part * SPAN, PADDED, WIDTH):
            # Zeros beyond the row change no sum.
            if begin < WIDTH or begin < HIDDEN:
                column = lane + begin
                mask = None if begin + SPAN <= HIDDEN else column < HIDDEN
                other = None if begin + SPAN <= HIDDEN else 0.0
                wide = gl.load(x + column, mask=mask, other=other).to(gl.float32)
                wide += gl.load(residual + column, mask=mask, other=other)
                if begin < WIDTH:
                    sums = squares_behind(wide, wide, True)
                else:
                    sums = squares_behind(sums, wide, False)
        warps = warps + (gl.sum(gl.reshape(sums, [_WARPS, 32]), axis=1),)
    if PARTS == 4:
        across = (warps[0] + warps[2]) + (warps[1] + warps[3])
    else:
        across = warps[0] + warps[1]
    # Every thread adds both warps' sums: less to wait for than a reduction across warps.
    across = gl.convert_layout(across, gl.BlockedLayout([_WARPS], [32], [_WARPS], [0]))
    scale = gl.rsqrt(gl.sum(across, axis=0) / hidden + eps)
    # Two parts at a time: their loads are under way together.
    for first in gl.static_range(0, HIDDEN, 2 * SPAN):
        parts = ()
        for begin in gl.static_range(first, min(first + 2 * SPAN, HIDDEN), SPAN):
            column = lane + begin
            mask = None if begin + SPAN <= HIDDEN else column < HIDDEN
            added = gl.load(x + column, mask=mask, cache_modifier=".ca")
            wide = gl.load(residual + column, mask=mask, cache_modifier=".ca")
            parts = parts + ((column, added, wide, gl.load(weight + column, mask=mask)),)
        for begin in gl.static_range(first, min(first + 2 * SPAN, HIDDEN), SPAN):
            column, added, wide, gain = parts[(begin - first) // SPAN]
            mask = None if begin + SPAN <= HIDDEN else column < HIDDEN
            wide += added.to(gl.float32)
            gl.store(total + column, wide, mask=mask)
            unit = (wide * scale).to(gain.dtype).to(gl.float32)
            gl.store(normed + column, (unit * gain.to(gl.float32)).to(gain.dtype), mask=mask)


@gluon.jit
def begun(tables, index):
    """A queue, and what its waits take. index: the queue's; it has an epoch of its own.

    Partitions look for themselves: what a kernel loads before they begin they get through shared memory, in an order
    that racecheck does not see.
    """
    records, lanes, waits, totals, counters, epochs, watch = tables
    queue = (records, gl.load(lanes + index * 2), gl.load(lanes + index * 2 + 1))
    return queue, (waits, totals, counters, gl.load(epochs + index), watch, index)


@gluon.jit
def load_tiles(maps, tables, trace, ring, c):
    queue, signals = begun(tables, gl.program_id(0))
    load_partition(maps, queue, signals, trace, ring, c)


@gluon.jit
def multiply_tiles(tables, total, ring, outs, wg: gl.constexpr, c):
    queue, signals = begun(tables, gl.program_id(0))
    multiply_partition(queue, signals, (total, 0, 0), ring, outs, wg, c)


@gluon.jit
def store_tiles(maps, tables, trace, skipped, outs, c):
    queue, signals = begun(tables, gl.program_id(0))
    store_partition(maps, queue, signals, tables[5], trace, skipped, outs, c)


@gluon.jit
def norm_partition(streams, gains, sizes, tables, trace, skipped, c, HIDDEN: gl.constexpr):
    projected, y, residual, total, normed, following = streams
    post_gain, next_gain = gains
    rows, hidden, eps = sizes
    index = gl.num_programs(0) + gl.program_id(0)
    queue, signals = begun(tables, index)
    records, first_task, num_tasks = queue
    waits, totals, counters, epoch, watch, block = signals
    for task in range(first_task, first_task + num_tasks):
        record = records + task * 16
        kind = gl.load(record)
        first = gl.load(record + 1) * (c.W * 64) + gl.load(record + 2) * _ROWS
        begin = gl.load(record + 6)
        count = gl.load(record + 7)
        post = gl.load(record + 10)
        x, before, out, gain = projected, residual, normed, post_gain
        if kind == 4:
            x, before, out, gain = y, total, following, next_gain
        if c.TRACE:
            gl.store(trace + task * 4, nanoseconds(kind))
        if c.TEST:
            pause(signals, task, 33)
        wait_for(begin, count, signals, task, _WARPS)
        gl.thread_barrier()
        if c.TRACE:
            gl.store(trace + task * 4 + 1, nanoseconds(count))
        for turn in range(gl.minimum(_ROWS, rows - first)):
            at = (first + turn).to(gl.int64) * hidden
            norm_row(x + at, before + at, total + at, out + at, gain, hidden, eps, HIDDEN)
        stored()
        gl.thread_barrier()
        if c.TEST:
            pause(signals, task, 55)
        if (post >= 0) & ((task != skipped) | (c.TEST == 0)):
            gl.atomic_add(counters + post, 1, sem="release", scope="gpu")
        if c.TRACE:
            gl.store(trace + task * 4 + 2, nanoseconds(post))
    gl.store(tables[5] + index, epoch + 1)


@gluon.jit(do_not_specialize=["skipped", "rows"])
def post_attention_kernel(
    attended, o, projected_out, x, gate, up, hidden, hidden_out, down, y_out, projected, y, residual, total, normed,
    following, post_gain, next_gain, rows, hidden_size, eps, records, lanes, waits, totals, counters, epochs, watch,
    trace, skipped,
    DTYPE: gl.constexpr, BN: gl.constexpr, W: gl.constexpr, S: gl.constexpr, OB: gl.constexpr, HIDDEN: gl.constexpr,
    TEST: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Run every block's tasks once.

    attended, x, hidden: descriptors [rows, K] in boxes [64, 64]; x is what lies at `normed`. o, gate, up, down: [N, K]
    in boxes [BN / 2, 64]; projected_out, hidden_out, y_out: [rows, N] in boxes [64, BN / 2]; all of DTYPE. projected,
    y, normed, following: pointers to [rows, hidden_size] of DTYPE; residual, total: of float32. post_gain, next_gain:
    [hidden_size]. lanes: int32 [2 x blocks, 2], of the tiles' queues and, behind them, of the norms'. watch: of twice
    as many records as blocks. The others: see ffn/chain/kernel.py.
    """
    tables = (records, lanes, waits, totals, counters, epochs, watch)
    maps = (x, gate, up, down, hidden, hidden_out, y_out, (attended, o, projected_out))
    streams = (projected, y, residual, total, normed, following)
    # Annotated, because Triton would turn the constants into values otherwise.
    c: gl.constexpr = Constants(
        DTYPE=DTYPE, BN=BN, W=W, S=S, OB=OB, ACT=1, GATED=True, SPLIT=False, TEST=TEST, TRACE=TRACE,
        AFTER_ATTENTION=True,
    )  # fmt: skip
    ring, outs = allocate(c)
    gl.warp_specialize(
        [
            (multiply_tiles, (tables, total, ring, outs, 0, c)),
            (multiply_tiles, (tables, total, ring, outs, W - 1, c)),  # the only one, if there is one
            (norm_partition, (streams, (post_gain, next_gain), (rows, hidden_size, eps), tables, trace, skipped, c,
                              HIDDEN)),
            (load_tiles, (maps, tables, trace, ring, c)),
            (store_tiles, (maps, tables, trace, skipped, outs, c)),
        ][2 - W :],
        [4, _WARPS, 1, 1][2 - W :],
        # Two warpgroups, with the first one's share, are all that three groups of four warps may hold. Norms want many;
        # products of fp16 spill with 192.
        [96, 96, 96] if W == 1 else [184, 104, 104, 104] if gl.bfloat16 == DTYPE else [200, 88, 88, 88],
    )  # fmt: skip


install()  # the passes over this kernel's PTX: gpu/ptx/passes.py
