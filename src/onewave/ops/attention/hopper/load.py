"""The warps of hopper/kernel.py that load (Q K0 K1 V0 K2 V1 ..., as they are used but where a long tile ends, by TMA
into rings) and store.

Keys and values lie one after another, or in pages that a block table names: then a tile is fetched in pieces of a page
(of BN keys where a page holds more) by 64 columns, each to where the whole tile would have it. Rows beyond a sequence's
last key come as zeros, whatever lies there. Rows before the first key that a packed sequence's window lets anyone see
may hold NaN too, and no descriptor ends on both sides: in the one tile of values where they stand beside seen ones, the
warp waits for the copy and writes zeros over them before it hands the tile on. (Of keys only the scores of such rows
are spoilt, and those are masked.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from onewave.ops.attention.hopper.columns import ACROSS, copied, copies, place_in
from onewave.ops.attention.hopper.tiles import (
    BATCH,
    BEGIN,
    COUNT,
    EXISTS,
    FIRST,
    HEAD,
    NUM_KEYS,
    ROWS,
    SHIFT,
    START_K,
    START_Q,
    WARP_THREADS,
    boxed,
    first_seen,
    place,
    place_in_page,
    place_of_keys,
    position_of,
    post,
    posted,
    tile_at,
)

# Rows of the blocks in which swizzled shared memory repeats.
_DOWN = gl.constexpr(8)
# Key tiles of a tile that are asked for before the next tile's queries.
_STEPS_AHEAD = gl.constexpr(3)
# Key tiles of a tile up to which the next one's first keys are asked for before its last values, as they are used. In
# longer ones programs that share their keys should wait at a tile's end: those that ask at the same time are served
# once, which saves more than the wait costs.
_SHORT = gl.constexpr(16)


@gluon.jit
def fetch(problem, descriptor, page_rows, buffer, full, batch, kv_head, start_k, num_keys, first, tile):
    """Copy key tile `tile` into buffer [BN, D]; full: the barrier that its bytes arrive at. first: of the keys seen."""
    BN: gl.constexpr = problem.BN
    if problem.PAGE == 0:
        for part in gl.static_range(copies(problem.D)):
            at = place_of_keys(problem, batch, kv_head, start_k, num_keys, tile, part * ACROSS)
            tma.async_copy_global_to_shared(descriptor, at, full, boxed(copied(problem, buffer, part), descriptor))
    else:
        PAGE: gl.constexpr = problem.PAGE
        ROWS: gl.constexpr = PAGE if PAGE < BN else BN
        flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        pieces = buffer._reinterpret(descriptor.dtype, [problem.D // ACROSS * (BN // ROWS), ROWS, ACROSS], flat)
        table = problem.block_table + batch.to(gl.int64) * problem.pages_a_row
        # phases is 2, and unknown to the compiler: unrolled copies make ptxas spill the products' registers.
        for piece in range(problem.phases * (BN // ROWS) // 2):
            key = tile * BN + piece * ROWS
            nth = key // PAGE
            # The table's entries for pages that no query sees are not read.
            seen = (key < num_keys) & (nth * PAGE + PAGE > first)
            page = gl.load(table + nth, mask=seen, other=0)
            used = gl.where(seen, gl.minimum(num_keys - nth * PAGE, PAGE), 0)
            for across in gl.static_range(problem.D // ACROSS):
                at = place_in_page(page, page_rows, kv_head, used, key - nth * PAGE, across * ACROSS)
                box = pieces.index(across * (BN // ROWS) + piece)
                tma.async_copy_global_to_shared(descriptor, at, full, boxed(box, descriptor))


@gluon.jit
def zero_rows(problem, buffer, count):
    """Write zeros over the first `count` rows of buffer [BN, D]."""
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    BLOCKS: gl.constexpr = problem.BN // _DOWN
    blocks = buffer._reinterpret(problem.v.dtype, [problem.D // ACROSS * BLOCKS, _DOWN, ACROSS], flat)
    down = gl.arange(0, _DOWN, layout=gl.SliceLayout(1, layout))[:, None]
    for at in range((count + _DOWN - 1) // _DOWN):
        for across in gl.static_range(problem.D // ACROSS):
            block = blocks.index(across * BLOCKS + at)
            values = block.load(layout)
            block.store(gl.where(at * _DOWN + down < count, 0.0, values).to(problem.v.dtype))


@gluon.jit
def post_next(problem, turn, tile):
    """Find the next tile from round `turn` on, post it as this program's tile `tile` and load its Q; or post the end.

    Returns the round after. Waits until Q's buffers of tile - Q_STAGES are free.
    """
    W: gl.constexpr = problem.WARPGROUPS
    QS: gl.constexpr = problem.Q_STAGES
    bq = problem.bq
    slot = tile % QS
    b = slot * W
    found = 0
    while (turn < problem.rounds) & (found == 0):
        position = position_of(problem, turn)
        batch, head, first, start_q, rows, start_k, num_keys, shift, begin, count, exists = tile_at(problem, position)
        if exists:
            for w in gl.static_range(W):
                mbarrier.wait(bq.index(QS * W + b + w), ((tile // QS) & 1) ^ 1)
            post(problem.posts, slot, EXISTS, 1)
            post(problem.posts, slot, BATCH, batch)
            post(problem.posts, slot, HEAD, head)
            post(problem.posts, slot, FIRST, first)
            post(problem.posts, slot, START_Q, start_q)
            post(problem.posts, slot, ROWS, rows)
            post(problem.posts, slot, START_K, start_k)
            post(problem.posts, slot, NUM_KEYS, num_keys)
            post(problem.posts, slot, SHIFT, shift)
            post(problem.posts, slot, BEGIN, begin)
            post(problem.posts, slot, COUNT, count)
            gl.thread_barrier()
            for w in gl.static_range(W):
                mbarrier.expect(bq.index(b + w), 64 * problem.D * 2)
                mbarrier.arrive(bq.index(b + w), count=WARP_THREADS - 1)
                for part in gl.static_range(copies(problem.D)):
                    at_q = place(problem, batch, head, start_q, rows, first + w * 64, part * ACROSS)
                    to = copied(problem, place_in(problem, problem.sq, b + w), part)
                    tma.async_copy_global_to_shared(problem.q, at_q, bq.index(b + w), boxed(to, problem.q))
            found = 1
        turn += 1
        if problem.ORDER == 3:
            turn = gl.where(position >= problem.tiles, problem.rounds, turn)
    if found == 0:
        for w in gl.static_range(W):
            mbarrier.wait(bq.index(QS * W + b + w), ((tile // QS) & 1) ^ 1)
        post(problem.posts, slot, EXISTS, 0)
        # No reader has to ask whether the other words mean anything.
        post(problem.posts, slot, FIRST, 0)
        post(problem.posts, slot, NUM_KEYS, 0)
        post(problem.posts, slot, SHIFT, 0)
        post(problem.posts, slot, BEGIN, 0)
        post(problem.posts, slot, COUNT, 1)
        gl.thread_barrier()
        for w in gl.static_range(W):
            mbarrier.arrive(bq.index(b + w), count=WARP_THREADS)
    return turn


@gluon.jit
def keys_of(problem, slot):
    """Where a posted tile's keys are: (batch, KV head, place of the first, how many, the first that any query sees)."""
    batch = posted(problem.posts, slot, BATCH, 1)
    num_keys = posted(problem.posts, slot, NUM_KEYS, 1)
    first_key = batch * 0
    if problem.RAGGED:
        first_key = first_seen(problem, posted(problem.posts, slot, SHIFT, 1), num_keys)
    kv_head = posted(problem.posts, slot, HEAD, 1) // problem.group
    return batch, kv_head, posted(problem.posts, slot, START_K, 1), num_keys, first_key


@gluon.jit
def load_keys(problem, j, batch, kv_head, start_k, num_keys, first_key, tile):
    """Bring a key tile to the ring's place j."""
    KS: gl.constexpr = problem.K_STAGES
    s = j % KS
    mbarrier.wait(problem.bk.index(KS + s), ((j // KS) & 1) ^ 1)
    mbarrier.expect(problem.bk.index(s), problem.BN * problem.D * 2)
    fetch(
        problem, problem.k, problem.k_page_rows, place_in(problem, problem.sk, s), problem.bk.index(s), batch, kv_head,
        start_k, num_keys, first_key, tile,
    )  # fmt: skip


@gluon.jit
def load_all(problem):
    """The loading warp."""
    VS: gl.constexpr = problem.V_STAGES
    QS: gl.constexpr = problem.Q_STAGES
    BYTES: gl.constexpr = problem.BN * problem.D * 2
    bv = problem.bv
    tile = 0
    jk = 0
    jv = 0
    cleared = 0
    turn = 0
    turn = post_next(problem, turn, tile)
    asked = 0
    while posted(problem.posts, tile % QS, EXISTS, 1) != 0:
        slot = tile % QS
        after = (tile + 1) % QS
        batch, kv_head, start_k, num_keys, first_key = keys_of(problem, slot)
        begin = posted(problem.posts, slot, BEGIN, 1)
        count = posted(problem.posts, slot, COUNT, 1)
        first = asked
        asked = asked * 0
        for i in range(first, count + 1):
            if QS > 1:
                # Early enough that no warpgroup waits for the next tile's queries, late enough that their buffer,
                # which the last tile's output leaves by, is free.
                if i == gl.minimum(count, _STEPS_AHEAD):
                    turn = post_next(problem, turn, tile + 1)
            if i < count:
                load_keys(problem, jk, batch, kv_head, start_k, num_keys, first_key, begin + count - 1 - i)
                jk += 1
            elif QS > 1:
                # The next tile's first keys are multiplied before this one's last values.
                if (count <= _SHORT) & (posted(problem.posts, after, EXISTS, 1) != 0):
                    next_batch, next_head, next_start, next_keys, next_first = keys_of(problem, after)
                    last = posted(problem.posts, after, BEGIN, 1) + posted(problem.posts, after, COUNT, 1) - 1
                    load_keys(problem, jk, next_batch, next_head, next_start, next_keys, next_first, last)
                    jk += 1
                    asked = 1
                # The warp has read posts: what one thread says of values from here on, it says for all.
                gl.thread_barrier()
            if i > 0:
                s = jv % VS
                mbarrier.wait(bv.index(VS + s), ((jv // VS) & 1) ^ 1)
                unseen = 0
                if problem.RAGGED and problem.LEFT:
                    unseen = first_key - (begin + count - i) * problem.BN
                if unseen > 0:
                    mbarrier.expect(problem.bz.index(0), BYTES)
                    fetch(
                        problem, problem.v, problem.v_page_rows, place_in(problem, problem.sv, s), problem.bz.index(0),
                        batch, kv_head, start_k, num_keys, first_key, begin + count - i,
                    )  # fmt: skip
                    mbarrier.wait(problem.bz.index(0), cleared & 1)
                    cleared += 1
                    zero_rows(problem, place_in(problem, problem.sv, s), unseen)
                    fence_async_shared()
                    mbarrier.arrive(bv.index(s), count=1)
                else:
                    mbarrier.expect(bv.index(s), BYTES)
                    fetch(
                        problem, problem.v, problem.v_page_rows, place_in(problem, problem.sv, s), bv.index(s), batch,
                        kv_head, start_k, num_keys, first_key, begin + count - i,
                    )  # fmt: skip
                jv += 1
        if QS == 1:
            turn = post_next(problem, turn, tile + 1)
        tile += 1


@gluon.jit
def store_all(problem):
    """The warp that stores outputs, from where Q was, and then hands Q's buffers back to the loading warp."""
    W: gl.constexpr = problem.WARPGROUPS
    QS: gl.constexpr = problem.Q_STAGES
    tile = 0
    mbarrier.wait(problem.bq.index(0), 0)
    exists = posted(problem.posts, 0, EXISTS, 1)
    while exists != 0:
        slot = tile % QS
        batch = posted(problem.posts, slot, BATCH, 1)
        head = posted(problem.posts, slot, HEAD, 1)
        first = posted(problem.posts, slot, FIRST, 1)
        start_q = posted(problem.posts, slot, START_Q, 1)
        rows = posted(problem.posts, slot, ROWS, 1)
        for w in gl.static_range(W):
            b = slot * W + w
            mbarrier.wait(problem.bo.index(b), (tile // QS) & 1)
            if first + w * 64 < rows:
                for part in gl.static_range(copies(problem.D)):
                    at = place(problem, batch, head, start_q, rows, first + w * 64, part * ACROSS)
                    buffer = copied(problem, place_in(problem, problem.sq, b), part)
                    tma.async_copy_shared_to_global(problem.out, at, boxed(buffer, problem.out))
        tma.store_wait(0)
        for w in gl.static_range(W):
            mbarrier.arrive(problem.bq.index(QS * W + slot * W + w), count=WARP_THREADS)
        tile += 1
        mbarrier.wait(problem.bq.index(tile % QS * W), (tile // QS) & 1)
        exists = posted(problem.posts, tile % QS, EXISTS, 1)
