"""Two products in one launch, for many rows: a persistent kernel for Hopper (TMA, mbarriers, wgmma), in Gluon.

A block is one SM and runs its own queue of tasks (plan.py). A task is one tile of W x 64 rows: of
the hidden tensor (kind 0: W_gate and W_up side by side, the activation in the epilogue; or W_up alone, BN columns) or
of the result (kind 1: BN columns, all of K or a slice of it). Partitions of warps, which meet at mbarriers only:

load      1 warp. A [W x 64, 64] and B [BN, 64] go step by step along K into a ring of S stages; it runs ahead into the
          next tasks. Of a task of kind 1 it first sends for the weights of S steps, then waits for the semaphores of
          the rows that the task reads, then sends for those rows.
multiply  W warpgroups, each with 64 rows: wgmma [64, BN] x 64 from the ring, sums in float32 registers; then the
          epilogue into shared memory, half the columns a piece (kind 0 with a gate has only one piece).
store     1 warp. Sends pieces out by TMA, and posts the task's semaphore when all of them have arrived.

Semaphores are int32 counters that only rise; epoch e (the e-th launch) waits for e * total + value, so nothing is
reset. Every wait on one is bounded (wave/kernel/spin.py): when its budget runs out the launch's abort word is set,
all blocks run to their ends with wrong numbers, and the host raises WaveStalled.

Why the hidden tensor is visible. It is written by TMA (async proxy) in one block and read by TMA in another:
  1. store: cp.async.bulk.wait_group 0 without .read returns when the writes are done and visible to the thread that
     issued them (Triton's own store_wait is .read: it only says that shared memory may be reused);
  2. store: fence.proxy.async, so that what follows through the generic proxy is ordered after them; bar.warp.sync, as
     another lane may post; then a release at GPU scope adds 1 to the counter;
  3. load: every lane spins with ld.acquire.gpu on a counter of its own; bar.warp.sync hands what they acquired to the
     lane that issues the copies; fence.proxy.async orders its later copies (async proxy) after the acquire (generic);
  4. the copies read L2, where TMA's writes went: no L1 lies in between.
Partial sums of K slices stay in the generic proxy on both sides: plain stores, an mbarrier to the store warp, release;
acquire, a barrier of the warpgroup, loads past L1 (.cg). A tile's last slice adds up all of them in their order once
it has its own sum: the same bits every run, and one hand-over whatever the number of slices.

Bound: the tensor cores from some hundred rows on, the weights' bytes below. Source of the row semaphores: Jangda et al.
2024 (cuSync), arXiv:2305.13450.

constexpr    meaning [unit] (allowed values)
DTYPE        of x, the weights and the result (bfloat16, float16)
BN           columns of a tile, of W_gate and W_up together (128, 256)
W            multiplying warpgroups, 64 rows of a tile each (1, 2)
S            stages of the ring
OB           pieces of a finished tile in shared memory, a warpgroup
ACT          activation function (0: none, 1: SiLU, 2: GELU)
GATED        whether there is a gate (False, True)
SPLIT        whether K of the second product is sliced (False, True)
MARK         whether blocks count themselves in `started` (False, True)
TEST         whether blocks sleep at random, and one post may be kept back (False, True)
TRACE        whether tasks store their times [ns] (False, True)
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onewave.wave.kernel.finish import activated
from onewave.wave.kernel.spin import delay, nanoseconds, spin_counter

_ACQUIRED = gl.constexpr("bar.warp.sync 0xffffffff; fence.proxy.async; mov.u32 $0, 0;")
_LANDED = gl.constexpr("cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; mov.u32 $0, 0;")
_REGISTERS = gl.constexpr("=r,r")


@gluon.jit
def acquired():
    """Order later TMA loads of this warp after what any of its lanes has acquired."""
    gl.inline_asm_elementwise(_ACQUIRED, _REGISTERS, [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def landed():
    """Wait until this warp's TMA stores have been written, and order a later release of any lane after them."""
    gl.inline_asm_elementwise(_LANDED, _REGISTERS, [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for(begin, count, signals, task, WARPS: gl.constexpr):
    """Spin on the counters of `count` (counter, value) pairs from `begin` on, 32 side by side."""
    waits, totals, counters, epoch, watch, block = signals
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lane = gl.arange(0, 32, layout=LANES)
    for first in range(begin, begin + count, 32):
        mine = first + lane < begin + count
        number = gl.load(waits + (first + lane) * 2, mask=mine, other=0)
        value = gl.load(waits + (first + lane) * 2 + 1, mask=mine, other=0)
        value += epoch * gl.load(totals + number, mask=mine, other=0)
        pointer = gl.where(mine, (counters + number).to(gl.int64), 0)
        spin_counter(pointer, value, watch, block, task)


@gluon.jit
def pause(signals, task, salt):
    """A pseudorandom pause of up to 16 us, another one for every block, task and launch."""
    waits, totals, counters, epoch, watch, block = signals
    mixed = (((block + salt) * 40503 + task) * 30011 + epoch * 69069) * 1103515245
    delay((mixed >> 8) & 16383)


class Constants(
    namedtuple("Constants", "DTYPE BN W S OB ACT GATED SPLIT TEST TRACE AFTER_ATTENTION", defaults=[False])
):
    """The launch's constexprs; the table at the top has their meaning. AFTER_ATTENTION: whether these partitions serve
    post_attention/chain/kernel.py, whose tasks of kind 2 are tiles of the projection, whose tasks of kind 0 wait for
    their rows, too, and which rounds gates and what they gate."""


@gluon.jit
def load_b(b0, b1, n0, n1, step, at, ring, c):
    """Take the ring's next stage and send for its weights."""
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring_a, ring_b, full, free = ring
    slot = at % c.S
    mbarrier.wait(free.index(slot), ((at // c.S) & 1) ^ 1)
    mbarrier.expect(full.index(slot), (c.W * 64 + c.BN) * 128)
    halves = ring_b.index(slot)._reinterpret(c.DTYPE, [2, c.BN // 2, 64], OPERAND)
    tma.async_copy_global_to_shared(b0, [n0, step * 64], full.index(slot), halves.index(0))
    tma.async_copy_global_to_shared(b1, [n1, step * 64], full.index(slot), halves.index(1))


@gluon.jit
def load_a(a, row, step, at, ring, c):
    """Send for the rest of a stage that load_b has taken."""
    ring_a, ring_b, full, free = ring
    slot = at % c.S
    for w in gl.static_range(c.W):
        tma.async_copy_global_to_shared(a, [row + w * 64, step * 64], full.index(slot), ring_a.index(slot * c.W + w))


@gluon.jit
def load_steps(a, b0, b1, row, n0, n1, first, steps, at, ring, c):
    """Send for a task's steps of both operands; returns the number of stages so far."""
    for step in range(first, first + steps):
        load_b(b0, b1, n0, n1, step, at, ring, c)
        load_a(a, row, step, at, ring, c)
        at += 1
    return at


@gluon.jit
def load_behind(a, b0, b1, row, n0, n1, task, ring, c):
    """Send for a task's steps of both operands, rows only once they are there; returns the number of stages so far.

    task: its number, first step, steps, first wait, number of waits; stages so far; signals; trace. The weights of as
    many steps as the ring has stages are on their way while the rows are waited for.
    """
    number, first, steps, begin, count, at, signals, trace = task
    ahead = gl.minimum(steps, c.S)
    for step in range(ahead):
        load_b(b0, b1, n0, n1, first + step, at + step, ring, c)
    if count > 0:
        wait_for(begin, count, signals, number, 1)
        acquired()
    if c.TRACE:
        gl.store(trace + number * 4 + 1, nanoseconds(count))
    for step in range(ahead):
        load_a(a, row, first + step, at + step, ring, c)
    at += ahead
    return load_steps(a, b0, b1, row, n0, n1, first + ahead, steps - ahead, at, ring, c)


@gluon.jit
def load_partition(maps, queue, signals, trace, ring, c):
    H: gl.constexpr = c.BN // 2
    x, gate, up, down, hidden, hidden_out, y_out, front = maps
    records, first_task, num_tasks = queue
    at = 0
    for task in range(first_task, first_task + num_tasks):
        record = records + task * 16
        kind = gl.load(record)
        row = gl.load(record + 1) * (c.W * 64)
        column = gl.load(record + 2)
        first = gl.load(record + 3)
        steps = gl.load(record + 4)
        begin = gl.load(record + 6)
        count = gl.load(record + 7)
        if c.TRACE:
            gl.store(trace + task * 4, nanoseconds(kind))
        if c.TEST:
            pause(signals, task, 0)
        behind = (task, first, steps, begin, count, at, signals, trace)
        if c.AFTER_ATTENTION:
            attended, o, projected_out = front
            if kind == 2:
                if c.TRACE:
                    gl.store(trace + task * 4 + 1, nanoseconds(count))
                at = load_steps(attended, o, o, row, column * c.BN, column * c.BN + H, first, steps, at, ring, c)
            elif kind == 0:
                at = load_behind(x, gate, up, row, column * H, column * H, behind, ring, c)
            else:
                at = load_behind(hidden, down, down, row, column * c.BN, column * c.BN + H, behind, ring, c)
        elif kind == 0:
            if c.TRACE:
                gl.store(trace + task * 4 + 1, nanoseconds(count))
            if c.GATED:
                at = load_steps(x, gate, up, row, column * H, column * H, first, steps, at, ring, c)
            else:
                at = load_steps(x, up, up, row, column * c.BN, column * c.BN + H, first, steps, at, ring, c)
        else:
            at = load_behind(hidden, down, down, row, column * c.BN, column * c.BN + H, behind, ring, c)


@gluon.jit
def hand_over(value, piece, outs, wg: gl.constexpr, c):
    """Give the store warp a piece [64, BN / 2]; returns the number of pieces so far."""
    out, ofull, ofree = outs
    place = wg * c.OB + piece % c.OB
    mbarrier.wait(ofree.index(place), ((piece // c.OB) & 1) ^ 1)
    out.index(place).store(value.to(c.DTYPE))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ofull.index(place), count=1)
    return piece + 1


@gluon.jit
def multiply_partition(queue, signals, slices, ring, outs, wg: gl.constexpr, c):
    H: gl.constexpr = c.BN // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, c.BN, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, H, 16])
    records, first_task, num_tasks = queue
    partials, partial_stride, partial_slab = slices
    ring_a, ring_b, full, free = ring
    out, ofull, ofree = outs
    at = 0
    piece = 0
    for task in range(first_task, first_task + num_tasks):
        record = records + task * 16
        kind = gl.load(record)
        row = gl.load(record + 1)
        column = gl.load(record + 2)
        steps = gl.load(record + 4)
        flags = gl.load(record + 5)
        begin = gl.load(record + 8)
        count = gl.load(record + 9)
        split = gl.load(record + 12)
        acc = gl.zeros([64, c.BN], gl.float32, ACC)
        for step in range(steps):
            slot = at % c.S
            mbarrier.wait(full.index(slot), (at // c.S) & 1)
            b = ring_b.index(slot).permute((1, 0))
            acc = warpgroup_mma(ring_a.index(slot * c.W + wg), b, acc, use_acc=True, is_async=True)
            # The product before has read its stage, which is free while this one runs.
            acc = warpgroup_mma_wait(1, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(free.index((at + c.S - 1) % c.S), count=1, pred=step > 0)
            at += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(free.index((at + c.S - 1) % c.S), count=1)
        # Columns j and j + BN / 2 lie in one thread: this moves no register.
        low, high = gl.split(gl.permute(gl.reshape(acc, [64, 2, H]), (0, 2, 1)))
        low = gl.convert_layout(low, HALF)
        high = gl.convert_layout(high, HALF)
        if c.SPLIT:
            # Pointers of rows, and columns as constants beside them: one of every element would not fit the registers.
            corner = partials + (row * c.W + wg).to(gl.int64) * 64 * partial_stride + column * c.BN
            line = corner + gl.arange(0, 64, layout=gl.SliceLayout(1, HALF))[:, None] * partial_stride
            across = gl.arange(0, H, layout=gl.SliceLayout(0, HALF))[None, :]
            if flags & 1:
                wait_for(begin, count, signals, task, 4)
                gl.thread_barrier()
                for _ in range(split):
                    low += gl.load(line + across, cache_modifier=".cg")
                    high += gl.load(line + H + across, cache_modifier=".cg")
                    line += partial_slab
            if flags & 2:
                line += split.to(gl.int64) * partial_slab
                gl.store(line + across, low)
                gl.store(line + H + across, high)
                place = wg * c.OB + piece % c.OB
                mbarrier.wait(ofree.index(place), ((piece // c.OB) & 1) ^ 1)
                gl.thread_barrier()
                mbarrier.arrive(ofull.index(place), count=1)
                piece += 1
        if (flags & 2) == 0:
            if kind == 0:
                if c.AFTER_ATTENTION:
                    # As linear_swiglu rounds.
                    low = low.to(c.DTYPE).to(gl.float32)
                    high = high.to(c.DTYPE).to(gl.float32)
                if c.GATED:
                    piece = hand_over(activated(low, c.ACT) * high, piece, outs, wg, c)
                else:
                    piece = hand_over(activated(low, c.ACT), piece, outs, wg, c)
                    piece = hand_over(activated(high, c.ACT), piece, outs, wg, c)
            else:
                piece = hand_over(low, piece, outs, wg, c)
                piece = hand_over(high, piece, outs, wg, c)


@gluon.jit
def store_partition(maps, queue, signals, epochs, trace, skipped, outs, c):
    H: gl.constexpr = c.BN // 2
    x, gate, up, down, hidden, hidden_out, y_out, front = maps
    records, first_task, num_tasks = queue
    waits, totals, counters, epoch, watch, block = signals
    out, ofull, ofree = outs
    piece = 0
    for task in range(first_task, first_task + num_tasks):
        record = records + task * 16
        kind = gl.load(record)
        row = gl.load(record + 1) * (c.W * 64)
        column = gl.load(record + 2)
        flags = gl.load(record + 5)
        post = gl.load(record + 10)
        pieces = 2
        if c.GATED:
            if kind == 0:
                pieces = 1
        partial = flags & 2
        if partial != 0:
            pieces = 1
        for half in range(pieces):
            place = piece % c.OB
            for wg in gl.static_range(c.W):
                mbarrier.wait(ofull.index(wg * c.OB + place), (piece // c.OB) & 1)
                if partial == 0:
                    to = [row + wg * 64, (column * pieces + half) * H]
                    if c.AFTER_ATTENTION and kind == 2:
                        attended, o, projected_out = front
                        tma.async_copy_shared_to_global(projected_out, to, out.index(wg * c.OB + place))
                    elif kind == 0:
                        tma.async_copy_shared_to_global(hidden_out, to, out.index(wg * c.OB + place))
                    else:
                        tma.async_copy_shared_to_global(y_out, to, out.index(wg * c.OB + place))
            tma.store_wait(0)
            for wg in gl.static_range(c.W):
                mbarrier.arrive(ofree.index(wg * c.OB + place), count=1)
            piece += 1
        landed()
        if c.TEST:
            pause(signals, task, 77)
        if (post >= 0) & ((task != skipped) | (c.TEST == 0)):
            gl.atomic_add(counters + post, 1, sem="release", scope="gpu")
        if c.TRACE:
            gl.store(trace + task * 4 + 2, nanoseconds(post))
    gl.store(epochs + block, epoch + 1)


@gluon.jit
def allocate(c):
    """The ring and the pieces that go out, with their mbarriers ready."""
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring_a = gl.allocate_shared_memory(c.DTYPE, [c.S * c.W, 64, 64], OPERAND)
    ring_b = gl.allocate_shared_memory(c.DTYPE, [c.S, c.BN, 64], OPERAND)
    out = gl.allocate_shared_memory(c.DTYPE, [c.W * c.OB, 64, c.BN // 2], OPERAND)
    full = gl.allocate_shared_memory(gl.int64, [c.S, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [c.S, 1], mbarrier.MBarrierLayout())
    ofull = gl.allocate_shared_memory(gl.int64, [c.W * c.OB, 1], mbarrier.MBarrierLayout())
    ofree = gl.allocate_shared_memory(gl.int64, [c.W * c.OB, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(c.S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=c.W)
    for i in gl.static_range(c.W * c.OB):
        mbarrier.init(ofull.index(i), count=1)
        mbarrier.init(ofree.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return (ring_a, ring_b, full, free), (out, ofull, ofree)


@gluon.jit(do_not_specialize=["skipped"])
def chain_kernel(
    x, gate, up, down, hidden, hidden_out, y_out, records, lanes, waits, totals, counters, epochs, watch, started,
    trace, partials, partial_stride, partial_slab, skipped,
    DTYPE: gl.constexpr, BN: gl.constexpr, W: gl.constexpr, S: gl.constexpr, OB: gl.constexpr, ACT: gl.constexpr,
    GATED: gl.constexpr, SPLIT: gl.constexpr, MARK: gl.constexpr, TEST: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Run every block's tasks once.

    x, hidden: descriptors [rows, K] in boxes [64, 64]; gate, up, down: [N, K] in boxes [BN / 2, 64]; hidden_out, y_out:
    [rows, N] in boxes [64, BN / 2]; all of DTYPE. records, lanes, waits, totals: see chain_plan.py. counters, epochs
    (one a block): int32, zeros before the first launch. watch: see wave/kernel/spin.py. started: a counter of blocks
    that have begun (MARK). trace: int32 [tasks, 4], nanoseconds (TRACE). partials: float32 [slices but the last, rows,
    partial_stride] of whole tiles, partial_slab elements a slice (SPLIT). skipped: the task whose post a test build
    (TEST) keeps back, -1 for none.
    """
    # Annotated, because Triton would turn the constants into values otherwise.
    c: gl.constexpr = Constants(
        DTYPE=DTYPE, BN=BN, W=W, S=S, OB=OB, ACT=ACT, GATED=GATED, SPLIT=SPLIT, TEST=TEST, TRACE=TRACE
    )
    ring, outs = allocate(c)
    block = gl.program_id(0)
    first_task = gl.load(lanes + block * 2)
    num_tasks = gl.load(lanes + block * 2 + 1)
    epoch = gl.load(epochs + block)
    if MARK:
        gl.atomic_add(started, 1, sem="release", scope="gpu")
    maps = (x, gate, up, down, hidden, hidden_out, y_out, ())
    queue = (records, first_task, num_tasks)
    signals = (waits, totals, counters, epoch, watch, block)
    slices = (partials, partial_stride, partial_slab)
    gl.warp_specialize(
        [
            (multiply_partition, (queue, signals, slices, ring, outs, 0, c)),
            (multiply_partition, (queue, signals, slices, ring, outs, W - 1, c)),  # the only one, if there is one
            (load_partition, (maps, queue, signals, trace, ring, c)),
            (store_partition, (maps, queue, signals, epochs, trace, skipped, outs, c)),
        ][2 - W :],
        [4, 1, 1][2 - W :],
        # Two warpgroups, with the first one's 240, are all that three groups of four warps may hold.
        [64, 64] if W == 1 else [216, 48, 48],
    )  # fmt: skip


@gluon.jit
def started_kernel(started, epochs, watch, blocks):
    """One warp that ends once all blocks of the launch beside it have begun. epochs: one int32, as in chain_kernel."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, layout=LANES)
    epoch = gl.load(epochs)
    pointer = gl.where(lane == 0, (started + lane * 0).to(gl.int64), 0)
    spin_counter(pointer, lane * 0 + (epoch + 1) * blocks, watch, lane * 0, 0)
    gl.thread_barrier()
    gl.store(epochs, epoch + 1)
