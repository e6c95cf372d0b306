"""The persistent kernel that runs a task table: one thread block an SM, partitions of warps (gl.warp_specialize).

Program ids: program_id(0) is the thread block, a worker of the table. It runs its own list of steps in order (lanes).

partition    warps   work
multiply     4       products of every product step: waits for the step's activations chunk by chunk, multiplies tiles
                     straight from the ring (wgmma; mma.sync for weights below 16 bits), sums over K in
                     registers, hands finished row blocks over (hand_over.py). Two such partitions where one would be
                     the bound (TileShape.multipliers), each for its own row blocks of a group.
exchange     XW      activations into shared memory; finishes and publishes row blocks; adds up slices of K; attention
                     (exchange.py, finish.py, attend/).
load         1       streams weight tiles, and cached keys and values, through the ring by TMA (load.py).

memory       what lives there
registers    multiply: sums of G row blocks, HELD weight tiles, or operand A of widened weights. exchange: one step's
             activations or results; attention's queries, scores and sums.
shared       ring of S weight tiles; XS chunks of activations; two places of finished row blocks; four groups of step
             records; attention's queries and maxima. They fill the SM, so it holds one thread block.
L2           exchange sets, counters, step records, the next keys. Weight loads are evict-first, so all this stays.
device       weights (read once), KV cache, residual stream.

Order of loads and waits in a step: its record (requested steps ahead), counters (SYNC 1), its activations (polled word
by word under SYNC 0), then products as tiles land, then the results' publication, which clears the same words of the
other set for the next launch. So nothing is reset between launches. Sets alternate with the launch's parity.

A launch starts while the one before it ends (programmatic dependent launch). Its thread blocks wait for that end before
they request anything: after a copy by TMA the wait does not hold (docs/log/correctness.md).

Roofline: device memory bandwidth. A launch reads the weights once and each cached key once.

constexpr    meaning [unit] (allowed values)
DTYPE        of activations and 16-bit weights (bfloat16, float16)
FORMAT       of weights (0: DTYPE, 1: int8, 2: fp8 e4m3, 3: compact, from 4 on: four bits, from 16 on: also 8 and 16)
IMAGES       operands A [64, 128] in a tile, side by side (1; 2 for one-byte and compact weights; 4 for four bits)
NB           sequences, padded (1 to 64, a power of two; R / 8 or more)
R            rows of a weight tile (8, 16, 32, 64)
G            row blocks handed over together (1, 2, 4)
S            weight tiles in the ring
XS           chunks of activations in shared memory
PC           operands A that one chunk of activations multiplies (a multiple of IMAGES)
SPLITS       slices of K that a reduction adds up, at most (1, or a power of two)
ACT          activation function (0: none, 1: SiLU, 2: GELU)
GATED        whether any step multiplies two halves of its rows: act(gate) * up (False, True)
SYNC         hand-off (0: data-as-flag, 1: counters that only rise)
FLIGHT       weight tiles in flight (1 to S; S or more: no limit)
HELD         weight tiles of a product in registers before its activations come (0, 2, 4; 0 if FORMAT > 0)
TEST         build (0: none, 1: one step's results withheld, 2: pseudorandom delays as well)
TRACE        whether steps store their times [ns] (False, True)
XW           warps of the exchange partition (8)
XREGS        registers of an exchange thread (a multiple of 8)
LREGS        registers of a load thread (a multiple of 8)
MREGS        registers of a thread of the second multiply partition (a multiple of 8; 0: there is none)
D            head_dim [values] (32, 64, 128; 0: no attention)
GP           query heads of a KV head (1 to 8)
CH           heads that one combining task merges
MERGE_WORDS  words a thread takes at a time of attention that a product step merges (4, 8; 0: no step merges)
KSPLITS      splits of a sequence's keys, at most (a power of two up to 16)
QKNORM       whether queries and keys are normalised (False, True)
EPS          epsilon of RMS norms
SCALE        scale of attention scores
PAGE         keys of a KV block (16 to 256, a power of two; 0: one run of rows a sequence)
STREAMS      whether cached keys come through the ring (0, 1)
MULTIPLIERS  multiply partitions (1, 2)
KV           numbers of the cache (0: DTYPE, 1: int8, 2: fp8 e4m3; not 0: PAGE > 0 and D 64 or 128)
"""

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
from onewave.wave.kernel.attend.attend import attention_memory
from onewave.wave.kernel.attend.streamed import skip_tiles, tiles_of_keys
from onewave.wave.kernel.exchange import exchange_partition
from onewave.wave.kernel.hand_over import hand_over, next_slot, product_of
from onewave.wave.kernel.load import load_first, load_partition, tiles_ahead
from onewave.wave.kernel.parameters import (
    Channel,
    Constants,
    Counters,
    ExchangeInputs,
    KeyStream,
    Output,
    Records,
    Sequences,
    TileStream,
)
from onewave.wave.kernel.records import copy_first_records, records_memory
from onewave.wave.kernel.widen.widen import multiply_byte_steps
from onewave.wave.kernel.words import (
    KIND,
    LIST_SIZE,
    RECORD_SIZE,
    box_rows,
    boxes_of,
    copied_rows,
    halves_apart,
    is_nested,
    scale_rows,
    takes_digits,
)


@gluon.jit
def multiply_partition(steps, num_steps, sequences, ring, activations, results, c, OWN: gl.constexpr):
    """Make all products of the thread block's steps; of two such partitions, each group's row block OWN."""
    # Triton takes a partition's captures for just written: without this barrier it adds one before each tile's wait.
    gl.thread_barrier()
    if c.FORMAT > 0:
        multiply_byte_steps(steps, num_steps, sequences, ring, activations, results, c, OWN)
    else:
        multiply_steps(steps, num_steps, sequences, ring, activations, results, c)


@gluon.jit
def multiply_steps(steps, num_steps, sequences, ring, activations, results, c):
    """Make all products of the thread block's steps from 16-bit weights, by wgmma.

    steps: pointer to its first record. ring, activations, results: channels.
    """
    # The next tile's slot and phase are carried, not divided out of a count: every instruction between two products
    # costs time.
    slot = 0
    phase = 0
    chunks_before = 0
    number = 0
    N: gl.constexpr = 64 // c.R * c.NB
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    # Sums of G row blocks, carried from one group to the next: while one product runs, nothing else may write the
    # registers of another.
    acc0 = gl.zeros([64, N], gl.float32, ACC)
    acc1 = gl.zeros([64, N], gl.float32, ACC)
    acc2 = gl.zeros([64, N], gl.float32, ACC)
    acc3 = gl.zeros([64, N], gl.float32, ACC)
    # Tiles of keys and values: of the last attention task; and in the ring before the next product's tiles, held ones
    # excepted.
    known = 0
    keys = 0
    for step in tl.range(num_steps, disable_licm=True):
        record = steps + step * RECORD_SIZE
        kind, blocks, tiles, chunks = product_of(record)
        if c.STREAMS:
            if kind == KIND.ATTEND:
                known = tiles_of_keys(record, tiles, known, sequences, c)
                keys += known
        done0 = 0
        done1 = 0
        if c.HELD > 0:
            if (blocks * tiles >= c.HELD) & ((tiles >= c.HELD) | ((tiles * 2 == c.HELD) & (c.G > 1))):
                acc0, acc1, slot, phase = multiply_held(
                    (acc0, acc1), tiles >= c.HELD, chunks_before, (slot, phase), ring, activations, ACC, c
                )
                done0 = gl.minimum(tiles, c.HELD)
                done1 = c.HELD - done0
        if c.STREAMS:
            if blocks > 0:
                slot, phase = skip_tiles(slot, phase, keys, c.S)
                keys = 0
        for block in range(0, blocks, c.G):
            # Chunk by chunk for the whole group: later chunks have more time to come.
            for chunk in range(chunks):
                place = (chunks_before + chunk) % c.XS
                if (block == 0) & ((chunk > 0) | (done0 == 0)):  # held tiles have waited for the first chunk
                    mbarrier.wait(activations.full.index(place), ((chunks_before + chunk) // c.XS) & 1)
                x = (
                    activations.places[0]
                    .index(place)
                    ._reinterpret(c.DTYPE, [c.PC, N, 128], gl.NVMMASharedLayout(128, 16, 2))
                )
                count = gl.minimum(tiles - chunk * c.PC, c.PC)
                begins = (block == 0) & (chunk == 0)
                before = -1
                acc0, slot, phase, before = multiply_block(
                    acc0, (gl.where(begins, done0, 0), count), chunk, x, (slot, phase, before), ring, c
                )
                if c.G > 1:
                    first = gl.where(begins, done1, 0)
                    end = gl.where(block + 1 < blocks, count, 0)
                    acc1, slot, phase, before = multiply_block(
                        acc1, (first, end), chunk, x, (slot, phase, before), ring, c
                    )
                if c.G > 2:
                    end = gl.where(block + 2 < blocks, count, 0)
                    acc2, slot, phase, before = multiply_block(acc2, (0, end), chunk, x, (slot, phase, before), ring, c)
                    end = gl.where(block + 3 < blocks, count, 0)
                    acc3, slot, phase, before = multiply_block(acc3, (0, end), chunk, x, (slot, phase, before), ring, c)
                if c.G == 1:
                    acc0 = warpgroup_mma_wait(0, deps=[acc0])
                elif c.G == 2:
                    acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
                else:
                    acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3])
                if chunk + 1 < chunks:
                    gl.thread_barrier()
                    release(ring, before >= 0, slot, activations, block + c.G >= blocks, place, c.S)
            hand_over((acc0, acc1, acc2, acc3), results, number, c)
            # After the hand-over's barrier, because the exchange partition waits for the products.
            streamed = gl.minimum(blocks - block, c.G) * tiles > gl.where(block == 0, done0 + done1, 0)
            place = (chunks_before + chunks - 1) % c.XS
            release(ring, streamed, slot, activations, block + c.G >= blocks, place, c.S)
            number += 1
        chunks_before += chunks


@gluon.jit
def release(ring, streamed, slot, activations, last, place, S: gl.constexpr):
    """Free the slot before `slot` if a tile was `streamed` through it, and a place of activations at its `last` use."""
    mbarrier.arrive(ring.empty.index(gl.where(slot == 0, S - 1, slot - 1)), count=1, pred=streamed)
    mbarrier.arrive(activations.empty.index(place), count=1, pred=last)
    gl.thread_barrier()


@gluon.jit
def multiply_held(accs, of_one, chunks_before, at, ring, activations, ACC: gl.constexpr, c):
    """Load a step's first HELD tiles to registers before its activations have come, then multiply them.

    Their ring slots are free while the hand-off lasts, as if the ring had that many more. accs: of the first two row
    blocks. of_one: all tiles are of the first row block; otherwise half are of the second. Sums run over K in the same
    order either way. at: slot and phase. Returns both accumulators, finished, and the next tile's slot and phase.
    """
    acc0, acc1 = accs
    slot, phase = at
    N: gl.constexpr = 64 // c.R * c.NB
    first = slot
    a0, slot, phase = held_tile(slot, phase, ring, ACC, c)
    a1, slot, phase = held_tile(slot, phase, ring, ACC, c)
    if c.HELD == 4:
        a2, slot, phase = held_tile(slot, phase, ring, ACC, c)
        a3, slot, phase = held_tile(slot, phase, ring, ACC, c)
    # Only a fence orders TMA's next write to these slots after the loads: they may still be under way when a barrier
    # has been passed.
    fence_async_shared()
    gl.thread_barrier()
    for tile in gl.static_range(c.HELD):
        mbarrier.arrive(ring.empty.index((first + tile) % c.S), count=1)
    place = chunks_before % c.XS
    mbarrier.wait(activations.full.index(place), (chunks_before // c.XS) & 1)
    b = activations.places[0].index(place)._reinterpret(c.DTYPE, [c.PC, N, 128], gl.NVMMASharedLayout(128, 16, 2))
    # Whole products in either branch: ptxas waits for each product that crosses a branch unfinished.
    if of_one:
        acc0 = warpgroup_mma(a0, b.index(0).permute((1, 0)), acc0, use_acc=False, is_async=True)
        acc0 = warpgroup_mma(a1, b.index(1).permute((1, 0)), acc0, use_acc=True, is_async=True)
        if c.HELD == 4:
            acc0 = warpgroup_mma(a2, b.index(2).permute((1, 0)), acc0, use_acc=True, is_async=True)
            acc0 = warpgroup_mma(a3, b.index(3).permute((1, 0)), acc0, use_acc=True, is_async=True)
            acc0, kept0, kept1, kept2, kept3 = warpgroup_mma_wait(0, deps=[acc0, a0, a1, a2, a3])
        else:
            acc0, kept0, kept1 = warpgroup_mma_wait(0, deps=[acc0, a0, a1])
    else:
        acc0 = warpgroup_mma(a0, b.index(0).permute((1, 0)), acc0, use_acc=False, is_async=True)
        if c.HELD == 4:
            acc0 = warpgroup_mma(a1, b.index(1).permute((1, 0)), acc0, use_acc=True, is_async=True)
            acc1 = warpgroup_mma(a2, b.index(0).permute((1, 0)), acc1, use_acc=False, is_async=True)
            acc1 = warpgroup_mma(a3, b.index(1).permute((1, 0)), acc1, use_acc=True, is_async=True)
            acc0, acc1, kept0, kept1, kept2, kept3 = warpgroup_mma_wait(0, deps=[acc0, acc1, a0, a1, a2, a3])
        else:
            acc1 = warpgroup_mma(a1, b.index(0).permute((1, 0)), acc1, use_acc=False, is_async=True)
            acc0, acc1, kept0, kept1 = warpgroup_mma_wait(0, deps=[acc0, acc1, a0, a1])
    return acc0, acc1, slot, phase


@gluon.jit
def held_tile(slot, phase, ring, ACC: gl.constexpr, c):
    """Load a slot's tile as operand A in registers, once it has landed. Returns the next tile's slot and phase too."""
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    mbarrier.wait(ring.full.index(slot), phase)
    tile = ring.places[0].index(slot)._reinterpret(c.DTYPE, [64, 128], OPERAND)
    a = tile.load(gl.DotOperandLayout(0, ACC, 2))
    wraps = slot == c.S - 1
    return a, gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def multiply_block(acc, tiles, chunk, x, at, ring, c):
    """Start the products of a row block's tiles in a chunk; free every slot but the last one's as products end.

    tiles: the first tile and the end. x: the chunk's activations, tile by tile. at: slot, phase, and the slot before,
    not free yet (-1: none). Returns acc, unfinished, and the next tile's three of these.
    """
    first, end = tiles
    slot, phase, before = at
    for tile in range(first, end):
        mbarrier.wait(ring.full.index(slot), phase)
        a = ring.places[0].index(slot)._reinterpret(c.DTYPE, [64, 128], gl.NVMMASharedLayout(128, 16, 2))
        b = x.index(tile).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=(chunk > 0) | (tile > 0), is_async=True)
        # The product before has read its tile: its slot is free while this one runs.
        acc = warpgroup_mma_wait(1, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index(gl.maximum(before, 0)), count=1, pred=before >= 0)
        # Triton wants a barrier after an arrival: here it hides behind the product.
        gl.thread_barrier()
        before = slot
        slot, phase = next_slot(slot, phase, c.S)
    return acc, slot, phase, before


@gluon.jit(
    do_not_specialize=[
        "row_step",
        "slack_words",
        "task_words",
        "batch",
        "source_stride",
        "out_stride",
        "set_words",
        "skipped",
    ]
)
def wave_kernel(
    weights, lasts, lists, keys, values, slack, tasks, records, steps, lanes, source, exchange, out, waits, counters,
    totals, epochs, watch, trace, tokens, positions, slots, row_step, slack_words, task_words, batch, source_stride,
    out_stride, set_words, skipped,
    DTYPE: gl.constexpr, FORMAT: gl.constexpr, IMAGES: gl.constexpr, NB: gl.constexpr, R: gl.constexpr,
    G: gl.constexpr, S: gl.constexpr, XS: gl.constexpr, PC: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr, GATED: gl.constexpr, SYNC: gl.constexpr, FLIGHT: gl.constexpr, HELD: gl.constexpr,
    TEST: gl.constexpr, TRACE: gl.constexpr, XW: gl.constexpr, XREGS: gl.constexpr, LREGS: gl.constexpr,
    D: gl.constexpr, GP: gl.constexpr, CH: gl.constexpr, MERGE_WORDS: gl.constexpr, KSPLITS: gl.constexpr,
    QKNORM: gl.constexpr, EPS: gl.constexpr, SCALE: gl.constexpr, PAGE: gl.constexpr, STREAMS: gl.constexpr,
    MULTIPLIERS: gl.constexpr, MREGS: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    """Run every thread block's steps once. The parameters are flat, as a launch passes them.

    weights: descriptor of the packed stream, 16-bit [rows of 64], boxes of one tile: [128, 64] (FORMAT 0),
    [IMAGES * 64, 64] (1, 2), one plane of a tile, [IMAGES * 32, 64] (3), or its values, likewise (4 on). lasts: of the
    words beside a tile's planes, [IMAGES * 8, 64] of the same rows (3), or of its scales, as many as one copy brings,
    [IMAGES * copied_rows, 64] (4 on). lists: of a tile's list, int32 [1, LIST_SIZE] (3).
    keys, values: descriptors of the caches (boxes.py), read where a launch STREAMS. slack, tasks, steps, lanes: see
    program.py; slack_words, task_words: a thread block's. records: descriptor of boxes of TOGETHER rows; row 0 is
    `places` (layout.Place), the others are steps. row_step: rows from one of a thread block's tiles to its next.
    source: the caller's activations, int32 words. exchange: two sets of set_words words. out: the caller's result,
    words. waits: (counter, value) pairs. counters, totals, epochs, watch, trace: see launch.py. batch: sequences, at
    most NB. tokens, positions, slots: int64 [batch], where D > 0. skipped: the step of which a test build withholds
    the results (-1: none).
    """
    # Annotated, because Triton would turn the constants into values otherwise.
    c: gl.constexpr = Constants(
        DTYPE=DTYPE, FORMAT=FORMAT, IMAGES=IMAGES, NB=NB, R=R, G=G, S=S, XS=XS, PC=PC, SPLITS=SPLITS, ACT=ACT,
        GATED=GATED, SYNC=SYNC, FLIGHT=FLIGHT, HELD=HELD, TEST=TEST, TRACE=TRACE, XW=XW, D=D, GP=GP, CH=CH,
        MERGE_WORDS=MERGE_WORDS, KSPLITS=KSPLITS, QKNORM=QKNORM, EPS=EPS, SCALE=SCALE, PAGE=PAGE, STREAMS=STREAMS,
        MULTIPLIERS=MULTIPLIERS, KV=KV,
    )  # fmt: skip
    N: gl.constexpr = 64 // R * NB
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLACES: gl.constexpr = D > 0 or FORMAT > 0  # rows' scales are found by them too
    BOXES: gl.constexpr = boxes_of(FORMAT)
    BOX: gl.constexpr = box_rows(FORMAT, IMAGES)
    # A partition that skips another's tiles must not run so far ahead that a slot's barrier has the parity of a round
    # before. Within a chunk the ring's depth ensures that; beyond it, a step's activations come after the step before.
    TWO: gl.constexpr = MULTIPLIERS == 2 and G == 2 and FORMAT > 0 and S > FLIGHT + PC // IMAGES
    gl.static_assert(MULTIPLIERS == 1 or TWO)
    tiles = gl.allocate_shared_memory(DTYPE, [S * BOXES, BOX, 64], weights.layout)
    APART: gl.constexpr = 1 + halves_apart(FORMAT, NB)
    xs = gl.allocate_shared_memory(DTYPE, [XS, N * APART, PC * 128], OPERAND)
    parts = gl.allocate_shared_memory(gl.float32, [2, NB, G * 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if D > 0:
        memory = attention_memory(c)
    else:
        memory = (parts,)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    xfull = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    xempty = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    pfull = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    pempty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    groups, places, rfull = records_memory(records, PLACES)
    if FORMAT > 3:
        ROWS: gl.constexpr = scale_rows(FORMAT)
        COPIED: gl.constexpr = copied_rows(ROWS)
        scales = gl.allocate_shared_memory(DTYPE, [S * (ROWS // COPIED), COPIED * IMAGES, 64], lasts.layout)
        boxes = (weights, lasts)
        ring = Channel(places=(tiles, scales), full=full, empty=empty)
    elif BOXES > 1:
        beside = gl.allocate_shared_memory(DTYPE, [S, BOX // 4, 64], lasts.layout)
        listed = gl.allocate_shared_memory(gl.int32, [S, 1, LIST_SIZE], lists.layout)
        boxes = (weights, lasts, lists)
        ring = Channel(places=(tiles, beside, listed), full=full, empty=empty)
    else:
        boxes = (weights,)
        ring = Channel(places=(tiles,), full=full, empty=empty)
    if takes_digits(FORMAT, NB):
        xscales = gl.allocate_shared_memory(gl.float32, [XS, PC, N * APART], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        activations = Channel(places=(xs, xscales), full=xfull, empty=xempty)
        if is_nested(FORMAT):
            xsums = gl.allocate_shared_memory(gl.int32, [XS, PC, 4 * N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
            activations = Channel(places=(xs, xscales, xsums), full=xfull, empty=xempty)
    else:
        activations = Channel(places=(xs,), full=xfull, empty=xempty)
    results = Channel(places=parts, full=pfull, empty=pempty)
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
    # The next launch starts when every thread block has said so: it cannot take an SM that one of them needs.
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    block = gl.program_id(0)
    num_tiles = gl.load(lanes + block * 4)
    first_row = gl.load(lanes + block * 4 + 1)
    first_step = gl.load(lanes + block * 4 + 2)
    num_steps = gl.load(lanes + block * 4 + 3)
    mine = steps + first_step * RECORD_SIZE
    cached = KeyStream(k_box=keys, v_box=values, tasks=tasks + block * task_words, steps=steps)
    ahead = tiles_ahead(num_tiles, cached.tasks, c)
    stream = TileStream(boxes=boxes, ahead=ahead, num_tiles=num_tiles, first_row=first_row, row_step=row_step)
    load_first(stream, ring, c)
    step_records = Records(
        box=records, first_step=first_step, num_steps=num_steps, groups=groups, places=places, full=rfull
    )
    copy_first_records(step_records, PLACES)
    epoch = gl.load(epochs + block)
    sequences = Sequences(tokens=tokens, positions=positions, slots=slots, batch=batch)
    inputs = ExchangeInputs(
        source=source, source_stride=source_stride, exchange=exchange, set_words=set_words,
        output=Output(words=out, stride=out_stride),
        counters=Counters(waits=waits, counts=counters, totals=totals, epoch=epoch),
        epochs=epochs, watch=watch, trace=trace, block=block, skipped=skipped,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (multiply_partition, (mine, num_steps, sequences, ring, activations, results, c, 0)),
            (exchange_partition, (step_records, inputs, sequences, ring, activations, results, memory, c)),
            (load_partition, (stream, slack + block * slack_words, cached, sequences, ring, c)),
            (multiply_partition, (mine, num_steps, sequences, ring, activations, results, c, 1)),
        ][: 2 + MULTIPLIERS],
        [XW, 1, 4][: 1 + MULTIPLIERS],
        [XREGS, LREGS, MREGS][: 1 + MULTIPLIERS],
    )


install()  # the passes over this kernel's PTX: gpu/ptx/passes.py
