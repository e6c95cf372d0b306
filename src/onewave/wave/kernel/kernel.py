"""The persistent kernel that runs a task table: one block a multiprocessor, partitions of warps.

loader (1 warp)      streams the block's weight tiles, packed in the order in which they are used, through a ring of
                     slots of one tile (load.py), and where a launch STREAMS attention's cached keys and values as well
                     (streamed.py). It never waits for activations.
multiply (4 warps)   for every product step: take its first HELD tiles into registers, wait for the step's activations,
                     chunk by chunk, then for each further tile; wgmma straight from the ring, sums over K in registers;
                     the finished row block goes to shared memory (hand_over.py). Two such partitions where one would
                     be the bound (layout.TileShape.multipliers), each for its own row blocks of a group.
exchange (8 warps)   brings each step's activations into shared memory, finishes and publishes row blocks, adds up
                     partial sums (exchange.py).

Hand-offs between blocks are words in device memory that are their own flag (SYNC 0), or counters that only ever rise
(SYNC 1). Two sets of buffers by the parity of the launch: while a block publishes into one it clears the same words of
the other for the next launch, so nothing is reset in between. Bound: reading the weights once.

A launch begins while the one before it ends (programmatic dependent launch), and its blocks wait for that end before
they ask for anything: behind a copy by TMA the wait does not hold (docs/log/correctness.md).
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

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from onewave.gpu.ptx.hook import install
from onewave.wave.kernel.attend.attend import heads_memory
from onewave.wave.kernel.attend.streamed import behind_keys, tiles_of_keys
from onewave.wave.kernel.exchange import exchange_partition
from onewave.wave.kernel.hand_over import hand_over
from onewave.wave.kernel.load import load_first, load_partition, tiles_ahead
from onewave.wave.kernel.records import bring_first, notes_memory
from onewave.wave.kernel.widen.widen import multiply_byte_steps
from onewave.wave.kernel.words import (
    KIND_ATTEND,
    KIND_REDUCE_HIDDEN,
    LIST_SIZE,
    RECORD_SIZE,
    WORD_BLOCKS,
    WORD_CHUNKS,
    WORD_KIND,
    WORD_TILES,
    boxes_of,
    tile_bytes,
)

__all__ = ["wave_kernel"]


@gluon.jit
def multiply_partition(
    steps, num_steps, positions, batch, rings, full, empty, xs, xfull, xempty, parts, pfull, pempty,
    DTYPE: gl.constexpr, FORMAT: gl.constexpr, IMAGES: gl.constexpr, NB: gl.constexpr, R: gl.constexpr,
    G: gl.constexpr, S: gl.constexpr, XS: gl.constexpr, PC: gl.constexpr, HELD: gl.constexpr, D: gl.constexpr,
    FEW: gl.constexpr, STREAMS: gl.constexpr, MULTIPLIERS: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    # Triton takes what partitions are passed for just written: without this it has a barrier before each tile's wait.
    gl.thread_barrier()
    if FORMAT > 0:
        multiply_byte_steps(
            steps, num_steps, positions, batch, rings, full, empty, xs, xfull, xempty, parts, pfull, pempty, DTYPE,
            FORMAT, IMAGES, NB, R, G, S, XS, PC, D, FEW, STREAMS, MULTIPLIERS, OWN,
        )  # fmt: skip
    else:
        multiply_steps(
            steps, num_steps, positions, batch, rings[0], full, empty, xs, xfull, xempty, parts, pfull, pempty, DTYPE,
            NB, R, G, S, XS, PC, HELD, D, FEW, STREAMS,
        )  # fmt: skip


@gluon.jit
def multiply_steps(
    steps, num_steps, positions, batch, ring, full, empty, xs, xfull, xempty, parts, pfull, pempty,
    DTYPE: gl.constexpr, NB: gl.constexpr, R: gl.constexpr, G: gl.constexpr, S: gl.constexpr, XS: gl.constexpr,
    PC: gl.constexpr, HELD: gl.constexpr, D: gl.constexpr, FEW: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """Make all products of the block's steps."""
    # Of the next tile, carried along rather than divided out of a count: between two products every instruction shows.
    slot = 0
    phase = 0
    chunks_before = 0
    results = 0
    N: gl.constexpr = 64 // R * NB
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    # Of G row blocks, carried from one group to the next: while one of them is being made nothing else may write the
    # registers of another.
    acc0 = gl.zeros([64, N], gl.float32, ACC)
    acc1 = gl.zeros([64, N], gl.float32, ACC)
    acc2 = gl.zeros([64, N], gl.float32, ACC)
    acc3 = gl.zeros([64, N], gl.float32, ACC)
    # Tiles of keys and values of the last attention task, and of those that lie in the ring before the next product's
    # tiles, but for the held ones.
    known = 0
    keys = 0
    for step in tl.range(num_steps, disable_licm=True):
        record = steps + step * RECORD_SIZE
        kind = gl.load(record + WORD_KIND)
        blocks = gl.load(record + WORD_BLOCKS)
        tiles = gl.load(record + WORD_TILES)
        chunks = gl.load(record + WORD_CHUNKS)
        if kind >= KIND_REDUCE_HIDDEN:
            blocks = 0
        if STREAMS:
            if kind == KIND_ATTEND:
                known = tiles_of_keys(record, tiles, known, positions, batch, D, FEW)
                keys += known
        done0 = 0
        done1 = 0
        if HELD > 0:
            if (blocks * tiles >= HELD) & ((tiles >= HELD) | ((tiles * 2 == HELD) & (G > 1))):
                acc0, acc1, slot, phase = multiply_held(
                    acc0, acc1, tiles >= HELD, chunks_before, slot, phase, ring, full, empty, xs, xfull, ACC, DTYPE, N,
                    S, XS, PC, HELD,
                )  # fmt: skip
                done0 = gl.minimum(tiles, HELD)
                done1 = HELD - done0
        if STREAMS:
            if blocks > 0:
                slot, phase = behind_keys(slot, phase, keys, S)
                keys = 0
        for block in range(0, blocks, G):
            # Chunk by chunk for all of them, so that what later chunks wait for has more time.
            for chunk in range(chunks):
                place = (chunks_before + chunk) % XS
                if (block == 0) & ((chunk > 0) | (done0 == 0)):  # held tiles have waited for the first one
                    mbarrier.wait(xfull.index(place), ((chunks_before + chunk) // XS) & 1)
                x = xs.index(place)._reinterpret(DTYPE, [PC, N, 128], gl.NVMMASharedLayout(128, 16, 2))
                count = gl.minimum(tiles - chunk * PC, PC)
                begins = (block == 0) & (chunk == 0)
                before = -1
                acc0, slot, phase, before = multiply_block(
                    acc0, gl.where(begins, done0, 0), count, chunk, x, slot, phase, before, ring, full, empty, DTYPE, S,
                )  # fmt: skip
                if G > 1:
                    acc1, slot, phase, before = multiply_block(
                        acc1, gl.where(begins, done1, 0), gl.where(block + 1 < blocks, count, 0), chunk, x, slot, phase,
                        before, ring, full, empty, DTYPE, S,
                    )  # fmt: skip
                if G > 2:
                    acc2, slot, phase, before = multiply_block(
                        acc2, 0, gl.where(block + 2 < blocks, count, 0), chunk, x, slot, phase, before, ring, full,
                        empty, DTYPE, S,
                    )  # fmt: skip
                    acc3, slot, phase, before = multiply_block(
                        acc3, 0, gl.where(block + 3 < blocks, count, 0), chunk, x, slot, phase, before, ring, full,
                        empty, DTYPE, S,
                    )  # fmt: skip
                if G == 1:
                    acc0 = warpgroup_mma_wait(0, deps=[acc0])
                elif G == 2:
                    acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
                else:
                    acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3])
                if chunk + 1 < chunks:
                    gl.thread_barrier()
                    release(empty, before >= 0, xempty, block + G >= blocks, slot, place, S)
            hand_over(acc0, acc1, acc2, acc3, parts, pfull, pempty, results, NB, R, G)
            # Behind its barrier, as somebody waits for the products.
            streamed = gl.minimum(blocks - block, G) * tiles > gl.where(block == 0, done0 + done1, 0)
            release(empty, streamed, xempty, block + G >= blocks, slot, (chunks_before + chunks - 1) % XS, S)
            results += 1
        chunks_before += chunks


@gluon.jit
def release(empty, streamed, xempty, last, slot, place, S: gl.constexpr):
    """Free the slot before this one, if a tile was streamed through it, and a place of activations, if nothing else
    reads it."""
    mbarrier.arrive(empty.index(gl.where(slot == 0, S - 1, slot - 1)), count=1, pred=streamed)
    mbarrier.arrive(xempty.index(place), count=1, pred=last)
    gl.thread_barrier()


@gluon.jit
def multiply_held(
    acc0, acc1, of_one, chunks_before, slot, phase, ring, full, empty, xs, xfull, ACC: gl.constexpr,
    DTYPE: gl.constexpr, N: gl.constexpr, S: gl.constexpr, XS: gl.constexpr, PC: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Multiply a step's first HELD tiles, 2 or 4, brought into registers before the activations have come: while a
    hand-off lasts, the ring has as many more slots to fill.

    of_one: whether they all are of the first row block, in acc0; or one half of the second, in acc1. Sums run over K in
    the same order either way. Returns acc0 and acc1, finished, and the next tile's slot and phase.
    """
    first = slot
    a0, slot, phase = held_tile(slot, phase, ring, full, ACC, DTYPE, S)
    a1, slot, phase = held_tile(slot, phase, ring, full, ACC, DTYPE, S)
    if HELD == 4:
        a2, slot, phase = held_tile(slot, phase, ring, full, ACC, DTYPE, S)
        a3, slot, phase = held_tile(slot, phase, ring, full, ACC, DTYPE, S)
    # Nothing but a fence puts the copy engine's next write to these slots behind the loads, which may still be on their
    # way when a barrier has been passed.
    fence_async_shared()
    gl.thread_barrier()
    for tile in gl.static_range(HELD):
        mbarrier.arrive(empty.index((first + tile) % S), count=1)
    place = chunks_before % XS
    mbarrier.wait(xfull.index(place), (chunks_before // XS) & 1)
    b = xs.index(place)._reinterpret(DTYPE, [PC, N, 128], gl.NVMMASharedLayout(128, 16, 2))
    # Whole products in either branch: what crosses a branch unfinished makes ptxas wait for every single one.
    if of_one:
        acc0 = warpgroup_mma(a0, b.index(0).permute((1, 0)), acc0, use_acc=False, is_async=True)
        acc0 = warpgroup_mma(a1, b.index(1).permute((1, 0)), acc0, use_acc=True, is_async=True)
        if HELD == 4:
            acc0 = warpgroup_mma(a2, b.index(2).permute((1, 0)), acc0, use_acc=True, is_async=True)
            acc0 = warpgroup_mma(a3, b.index(3).permute((1, 0)), acc0, use_acc=True, is_async=True)
            acc0, kept0, kept1, kept2, kept3 = warpgroup_mma_wait(0, deps=[acc0, a0, a1, a2, a3])
        else:
            acc0, kept0, kept1 = warpgroup_mma_wait(0, deps=[acc0, a0, a1])
    else:
        acc0 = warpgroup_mma(a0, b.index(0).permute((1, 0)), acc0, use_acc=False, is_async=True)
        if HELD == 4:
            acc0 = warpgroup_mma(a1, b.index(1).permute((1, 0)), acc0, use_acc=True, is_async=True)
            acc1 = warpgroup_mma(a2, b.index(0).permute((1, 0)), acc1, use_acc=False, is_async=True)
            acc1 = warpgroup_mma(a3, b.index(1).permute((1, 0)), acc1, use_acc=True, is_async=True)
            acc0, acc1, kept0, kept1, kept2, kept3 = warpgroup_mma_wait(0, deps=[acc0, acc1, a0, a1, a2, a3])
        else:
            acc1 = warpgroup_mma(a1, b.index(0).permute((1, 0)), acc1, use_acc=False, is_async=True)
            acc0, acc1, kept0, kept1 = warpgroup_mma_wait(0, deps=[acc0, acc1, a0, a1])
    return acc0, acc1, slot, phase


@gluon.jit
def held_tile(slot, phase, ring, full, ACC: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """The tile in a slot as operand A in registers, once it has landed; the next one's slot and phase."""
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    mbarrier.wait(full.index(slot), phase)
    a = ring.index(slot)._reinterpret(DTYPE, [64, 128], OPERAND).load(gl.DotOperandLayout(0, ACC, 2))
    wraps = slot == S - 1
    return a, gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def multiply_block(
    acc, first, end, chunk, x, slot, phase, before, ring, full, empty, DTYPE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Start the products of a row block's tiles from first to end of a chunk, in acc, and free every slot but the last
    one's as they end.

    x: the chunk's activations, tile by tile. before: the slot of the tile before, not free yet; -1: there is none.
    Returns acc, unfinished, the next tile's slot and phase, and the last one's slot.
    """
    for tile in range(first, end):
        mbarrier.wait(full.index(slot), phase)
        a = ring.index(slot)._reinterpret(DTYPE, [64, 128], gl.NVMMASharedLayout(128, 16, 2))
        b = x.index(tile).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=(chunk > 0) | (tile > 0), is_async=True)
        # The product before has read its tile: its slot is free while this one runs.
        acc = warpgroup_mma_wait(1, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(gl.maximum(before, 0)), count=1, pred=before >= 0)
        # Triton wants a barrier behind an arrival: here it hides behind the product.
        gl.thread_barrier()
        before = slot
        wraps = slot == S - 1
        phase = gl.where(wraps, phase ^ 1, phase)
        slot = gl.where(wraps, 0, slot + 1)
    return acc, slot, phase, before


@gluon.jit(
    do_not_specialize=[
        "row_step",
        "easy_words",
        "visit_words",
        "batch",
        "source_stride",
        "out_stride",
        "set_words",
        "skipped",
    ]
)
def wave_kernel(
    weights, lasts, lists, keys, values, easy, visits, records, steps, lanes, source, exchange, out, waits, counters,
    totals, epochs, watch, trace, tokens, positions, slots, row_step, easy_words, visit_words, batch, source_stride,
    out_stride, set_words, skipped,
    DTYPE: gl.constexpr, FORMAT: gl.constexpr, IMAGES: gl.constexpr, NB: gl.constexpr, R: gl.constexpr,
    G: gl.constexpr, S: gl.constexpr, XS: gl.constexpr, PC: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr, GATED: gl.constexpr, SYNC: gl.constexpr, FLIGHT: gl.constexpr, HELD: gl.constexpr,
    TEST: gl.constexpr, TRACE: gl.constexpr, XW: gl.constexpr, XREGS: gl.constexpr, LREGS: gl.constexpr,
    D: gl.constexpr, GP: gl.constexpr, CH: gl.constexpr, FEW: gl.constexpr, KSPLITS: gl.constexpr,
    QKNORM: gl.constexpr, EPS: gl.constexpr, SCALE: gl.constexpr, PAGE: gl.constexpr, STREAMS: gl.constexpr,
    MULTIPLIERS: gl.constexpr, MREGS: gl.constexpr,
):  # fmt: skip
    """Run every block's steps once.

    keys, values: descriptors of the caches (launch_boxes.py), and visits: see program.py, visit_words a block, for
    launches that STREAMS them. weights: descriptor of the packed stream, 16-bit [rows of 64], boxes of one tile:
    [128, 64], or [IMAGES * 64, 64] of one-byte weights (FORMAT 1: int8, 2: fp8 e4m3), or a plane of a tile of compact
    ones, [IMAGES * 32, 64] (FORMAT 3). lasts, lists: of these, descriptors in boxes of the words beside a tile's
    planes, [IMAGES * 8, 64] of the same rows, and of its list, int32 [1, LIST_SIZE]. easy: see program.py, easy_words
    a block. records: descriptor of boxes of TOGETHER rows; the first row is `places` (attend.py), the others are steps.
    steps, lanes: see program.py. source: the caller's activations as int32 words. exchange: two sets of set_words
    words. out: the caller's result as words. waits: (counter, value) pairs. counters, totals, epochs, watch: see
    launch.py. batch: sequences, at most NB. D: 0, or the head dimension of a decode step; then tokens, positions, slots
    are int64 [batch], GP, CH, KSPLITS, QKNORM, EPS, SCALE as in attend.py, FEW as in merge.py (0: nobody merges splits
    on loading them), and PAGE as in cached.py. skipped: the step record whose results a test build keeps back (-1:
    none).
    """
    N: gl.constexpr = 64 // R * NB
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLACES: gl.constexpr = D > 0 or FORMAT > 0  # where rows' scales are found, too
    BOXES: gl.constexpr = boxes_of(FORMAT)
    BOX: gl.constexpr = 128 if FORMAT == 0 else 64 // (2 if BOXES > 1 else 1) * IMAGES
    # Who passes others' tiles must not come so far ahead that a slot's barrier has the parity of a round before. Within
    # a chunk the ring's depth sees to that; beyond it that a step's activations come when the one before is finished.
    TWO: gl.constexpr = MULTIPLIERS == 2 and G == 2 and FORMAT > 0 and S > FLIGHT + PC // IMAGES
    gl.static_assert(MULTIPLIERS == 1 or TWO)
    ring = gl.allocate_shared_memory(DTYPE, [S * BOXES, BOX, 64], weights.layout)
    xs = gl.allocate_shared_memory(DTYPE, [XS, N, PC * 128], OPERAND)
    parts = gl.allocate_shared_memory(gl.float32, [2, NB, G * 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if D > 0:
        heads = heads_memory(D, XW)
    else:
        heads = (parts, parts, parts, parts, parts)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    xfull = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    xempty = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    pfull = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    pempty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    notes, table, nfull = notes_memory(records, PLACES)
    if BOXES > 1:
        beside = gl.allocate_shared_memory(DTYPE, [S, BOX // 4, 64], lasts.layout)
        listed = gl.allocate_shared_memory(gl.int32, [S, 1, LIST_SIZE], lists.layout)
        boxes = (weights, lasts, lists)
        rings = (ring, beside, listed)
    else:
        boxes = (weights,)
        rings = (ring,)
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(XS):
        mbarrier.init(xfull.index(i), count=1)
        mbarrier.init(xempty.index(i), count=MULTIPLIERS)
    for i in gl.static_range(2):
        mbarrier.init(pfull.index(i), count=MULTIPLIERS)
        mbarrier.init(pempty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    # The next launch begins when every block of this one has said so: it cannot take a place that one of them needs.
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    block = gl.program_id(0)
    num_tiles = gl.load(lanes + block * 4)
    first_row = gl.load(lanes + block * 4 + 1)
    first_step = gl.load(lanes + block * 4 + 2)
    num_steps = gl.load(lanes + block * 4 + 3)
    mine = steps + first_step * RECORD_SIZE
    TILE: gl.constexpr = tile_bytes(FORMAT, IMAGES)
    coming = visits + block * visit_words
    first = tiles_ahead(num_tiles, coming, S, FLIGHT, STREAMS)
    load_first(boxes, rings, full, first, first_row, row_step, TILE, S)
    bring_first(records, first_step, num_steps, notes, table, nfull, PLACES)
    epoch = gl.load(epochs + block)
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (
                    mine, num_steps, positions, batch, rings, full, empty, xs, xfull, xempty, parts, pfull,
                    pempty, DTYPE, FORMAT, IMAGES, NB, R, G, S, XS, PC, HELD, D, FEW, STREAMS, MULTIPLIERS, 0,
                ),
            ),
            (
                exchange_partition,
                (
                    records, first_step, num_steps, source, exchange, out, waits, counters, totals, epochs, epoch,
                    watch, trace, tokens, positions, slots, block, batch, source_stride, out_stride, set_words, skipped,
                    ring, full, empty, xs, xfull, xempty, parts, pfull, pempty, heads, notes, table, nfull, DTYPE,
                    FORMAT, IMAGES, NB, R, G, S, XS, PC, SPLITS, ACT, GATED, SYNC, TEST, TRACE, XW, D, GP, CH, FEW,
                    KSPLITS, QKNORM, EPS, SCALE, PAGE, STREAMS,
                ),
            ),
            (
                load_partition,
                (
                    boxes, easy + block * easy_words, keys, values, coming, steps, positions, slots, batch,
                    rings, full, empty, first, num_tiles, first_row, row_step, DTYPE, TILE, S, FLIGHT, D, FEW,
                    STREAMS,
                ),
            ),
            (
                multiply_partition,
                (
                    mine, num_steps, positions, batch, rings, full, empty, xs, xfull, xempty, parts, pfull,
                    pempty, DTYPE, FORMAT, IMAGES, NB, R, G, S, XS, PC, HELD, D, FEW, STREAMS, MULTIPLIERS, 1,
                ),
            ),
        ][: 2 + MULTIPLIERS],
        [XW, 1, 4][: 1 + MULTIPLIERS],
        [XREGS, LREGS, MREGS][: 1 + MULTIPLIERS],
    )  # fmt: skip


install()  # the passes over this kernel's PTX: gpu/ptx/passes.py
