"""The attention kernel of Hopper (sm_90): TMA, asynchronous wgmma, warp-specialised, persistent; in Gluon.

A program is one SM. Its tiles of work are fixed before: by a table dealt on the host, each tile to the least busy
program; or as position k * programs + p of round k, p turned round every other round, so that with tiles sorted by
length each program gets as much (LPT's effect in closed form). Packed sequences' tiles are sorted by a kernel before
this one, and taken from a queue by free programs. A tile is WARPGROUPS x 64 queries of one head. Tiles are ordered in
sections of G heads whose K and V fit the L2, longest first inside.

One warp loads (hopper/load.py): Q K0 K1 V0 K2 V1 ..., as they are used, into a ring of K and one of V
(mbarriers "full" and "free" a slot), Q into two buffers that alternate over tiles. It alone looks for tiles, and posts
what it finds in shared memory before Q's barriers; a tile's successor is found, and its Q asked for, when the tile has
begun. Another warp stores: outputs leave through Q's buffer and TMA, and no other warp waits for them. The warpgroups
each own 64 rows: Q, S, P and the output stay in registers; the product of the next K tile runs under the exponentials
and under P V of the last one, and the first product of the next tile under the end of this one; with ping-pong so do
its first exponentials. A tile's first product with values does not look at what the accumulator holds, so it is not
set to zero. A warpgroup without rows (the last of a sequence) only keeps step. Ping-pong: named barriers let one
warpgroup issue its products while another computes exponentials; the turn is passed on half way through P V, as the
other one needs a moment to begin.

Warpgroups run one copy of their code (gpu/ptx/shared_warpgroups.py): a half or a third of the instructions, to
be compiled and to be brought to the SM's instruction caches. With turns each has a loop of whole steps of its own in
it, as barriers whose numbers are in registers keep what stands behind them waiting. Where not, and why: at SHARED,
below.

With HALF_TILES, a warpgroup that sees no more than half of its last key tile multiplies and exponentiates that half
alone: of a causal tile's 128 rows the first 64. (With three warpgroups the two halves of a whole one cost more; where
two share their code, the second one takes its whole one in halves.)

Softmax without a running max: a row keeps its reference m until a score exceeds it by more than 2^HEADROOM, and only
then is the accumulator rescaled ("lazy", exact: P and float32 sums keep their relative precision). m is the max of the
first tile of keys that the row sees, with bf16 2^24 above it, so that later scores have 2^64 of room instead of 2^40;
tiles go by from the last key to the first. The loop of whole tiles needs no max, no shuffle and no rescale: after the
exponentials one vote over sums finds out whether any row exceeded; then the loop ends, the tile's scores are computed
anew (K is not yet released), m is moved, and the remaining tiles go through the loop with the max. Rows that did not
exceed are multiplied by exactly 1: a row's bits never depend on its neighbours.

Tiles that a mask cuts take the loop with the max, with -inf for hidden scores; tiles that no row of the CTA sees are
never loaded. TMA returns zeros beyond Sq, Sk and head_dim and drops what is written there. Packed sequences use
descriptors of five axes whose third bound is the end of the sequence: address = base + y * stride + (x - 2^30) * stride
with x = 2^30 - length + row and y = first row + length, by wrapping of 64-bit addresses; so row `length` is out of
bounds wherever the sequence lies. Bound: the tensor cores. Source: Shah et al. 2024, arXiv:2407.08608.

Constants (of a head_dim: tuned.json):

    D             columns of a head, in elements; 192: see hopper/columns.py     64, 128, 192, 256
    BN            keys of a key tile                                             128; 64 from D = 192 on
    WARPGROUPS    warpgroups that multiply, 64 queries each                      2; 2 or 3 at D = 64
    K_STAGES      slots of K's ring                                              3; 2 at D = 256
    V_STAGES      slots of V's ring                                              2; 3 at D = 64
    Q_STAGES      buffers of Q                                                   2; 2 or 3 at D = 64; 1 at D = 256
    PING_PONG     warpgroups issue products in turns                             bool
    Q_REGISTERS   Q is an operand from registers; needs PING_PONG                bool
    HALF_TILES    see above                                                      bool
    HEADROOM      octaves that a score may exceed its row's reference by         12 in fp16, 40 in bf16
    ORDER         tiles: in closed form, by table, sorted in turns, from queue   0, 1, 2, 3
    PAGE          keys of a page; 0 where keys lie in rows                       0, 16, 32, 64, 128, 256
    RAGGED        packed sequences                                               bool
    TOP_LEFT      query i stands at key i, not at i + Sk - Sq                     bool
    LEFT, RIGHT   keys are hidden on that side of a query                        bool
    SOFTCAP       scores become softcap * tanh(score / softcap)                  bool
    SINKS         a logit without a value joins each row                         bool
    LSE           the LSE is written                                             bool
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from onewave.gpu.ptx.hook import install
from onewave.ops.attention.hopper.columns import (
    loaded_queries,
    no_output,
    output_comes,
    place_in,
    products,
    queries,
    ring_shape,
    scores,
    times,
    weighed,
    wide_columns,
)
from onewave.ops.attention.hopper.load import load_all, store_all
from onewave.ops.attention.hopper.softmax import capped, hidden, lazy_softmax, partial_sums
from onewave.ops.attention.hopper.start import (
    beside,
    end,
    first_product,
    first_step,
    halves,
    pass_values_beyond,
    tile_comes,
)
from onewave.ops.attention.hopper.tiles import (
    ROWS,
    WARP_THREADS,
    WARPGROUP_THREADS,
    Problem,
    allocate_posts,
    posted,
)
from onewave.ops.attention.hopper.warpgroup import (
    SHARES,
    barrier_arrive,
    barrier_sync,
    cast_ballots,
    declare_vote,
    only_warpgroup,
    own_warpgroup,
    twin,
    vote,
    voted,
)

_FIRST_BARRIER = gl.constexpr(13)


@gluon.jit
def values_in_turn(wg, problem, p, v, o, onto):
    """P times the values at place v, on top of o if `onto`, the turn passed on amid it: the other warpgroup begins to
    issue before this one's products have ended."""
    HALF: gl.constexpr = problem.BN // 2
    LP: gl.constexpr = p.type.layout
    early, late = halves(p)
    values = place_in(problem, problem.sv, v)
    o = weighed(problem, gl.convert_layout(early, LP), values, o, 0, HALF, onto)
    barrier_arrive(_FIRST_BARRIER + (wg + 1) % problem.WARPGROUPS)
    return weighed(problem, gl.convert_layout(late, LP), values, o, HALF, HALF, True)


@gluon.jit
def both_products(wg, problem, q, p, o, i, j):
    """Step i's products: Q times the keys of place j + 1, and P, of those at j, times their values, on top of o from
    the second step on: what the first one finds there is the last tile's.

    Returns (the scores, capped, which have come; the output, which has not).
    """
    KS: gl.constexpr = problem.K_STAGES
    VS: gl.constexpr = problem.V_STAGES
    keys = place_in(problem, problem.sk, (j + 1) % KS)
    if problem.PING_PONG:
        barrier_sync(_FIRST_BARRIER + wg)
    sn = scores(problem, q, keys)
    v = j % VS
    mbarrier.wait(problem.bv.index(v), (j // VS) & 1)
    if problem.PING_PONG:
        oa = values_in_turn(wg, problem, p, v, o, i > 1)
        sn = warpgroup_mma_wait(2 * products(problem.D), deps=[sn])
    else:
        oa = weighed(problem, p, place_in(problem, problem.sv, v), o, 0, problem.BN, onto=i > 1)
        sn = warpgroup_mma_wait(products(problem.D), deps=[sn])
    return capped(problem, sn), oa


@gluon.jit
def step_with_max(
    wg, problem, q, p, o, m, total, unit, i, j, steps, cut_right, whole_steps, last, num_keys, row_place, lane
):
    """Step i, whatever its keys; m may move. Returns (o, m, total, the step's P)."""
    KS: gl.constexpr = problem.K_STAGES
    VS: gl.constexpr = problem.V_STAGES
    bk = problem.bk
    # Behind the last keys there may be none to come: then it is these, which have.
    ahead = gl.where(i + 1 < steps, j + 2, j + 1)
    sn, oa = both_products(wg, problem, q, p, o, i, j)
    if (i < cut_right) | (i >= whole_steps):
        sn = hidden(problem, sn, row_place, (last - i) * problem.BN + lane, num_keys)
    pn, m, total, kept = lazy_softmax(problem, sn, m, total, unit, problem.BN)
    mbarrier.wait(bk.index(ahead % KS), (ahead // KS) & 1)
    o = output_comes(problem, oa, 0)
    mbarrier.arrive(bk.index(KS + (j + 1) % KS), count=1)
    mbarrier.arrive(problem.bv.index(VS + j % VS), count=1)
    return times(problem, o, kept), m, total, gl.convert_layout(pn.to(problem.q.dtype), p.type.layout)


@gluon.jit
def whole_step(wg, problem, q, p, o, m, total, unit, i, j, steps):
    """Step i, of keys that every row sees. Returns (o, total, the step's P, whether any row exceeded its m).

    If one did, total and P are to come (step_again), and the keys are not released.
    """
    BN: gl.constexpr = problem.BN
    KS: gl.constexpr = problem.K_STAGES
    VS: gl.constexpr = problem.V_STAGES
    # Half of 2^HEADROOM: where the loop with a max, which rounds another way, would move m, sums must be beyond it, or
    # a row's bits depended on its neighbours. A vote for nothing is harmless (a sum of 32 may well cause one).
    TOO_MUCH: gl.constexpr = 2.0 ** (problem.HEADROOM - 1)
    bk = problem.bk
    # Behind the last keys there may be none to come: then it is these, which have.
    ahead = gl.where(i + 1 < steps, j + 2, j + 1)
    sn, oa = both_products(wg, problem, q, p, o, i, j)
    pn = gl.exp2(sn * unit - m[:, None])
    sums = partial_sums(pn, BN)
    # Rows r and r + 8 of a warp's 16 belong to one thread.
    most = gl.max(sums.reshape([4, 2, 8, 4]), 1)
    COPY: gl.constexpr = 0 if problem.SHARED else wg
    cast_ballots(COPY, (most > TOO_MUCH).to(gl.int32))
    # It also ends the basic block: without it ptxas hoists the wait for P V above the exponentials.
    mbarrier.wait(bk.index(ahead % KS), (ahead // KS) & 1)
    o = output_comes(problem, oa, 0)
    vote(wg, COPY)
    p = gl.convert_layout(pn.to(problem.q.dtype), p.type.layout)
    exceeded = voted(COPY)
    total = gl.where(exceeded == 0, total + sums, total)
    mbarrier.arrive(bk.index(KS + (j + 1) % KS), count=1, pred=exceeded == 0)
    mbarrier.arrive(problem.bv.index(VS + j % VS), count=1)
    return o, total, p, exceeded


@gluon.jit
def whole_run(wg, problem, q, p, o, m, total, unit, i, j, steps, whole_steps):
    """Steps i to whole_steps, of keys that every row sees, up to the first in which a row exceeds its m."""
    exceeded = 0
    while (i < whole_steps) & (exceeded == 0):
        o, total, p, exceeded = whole_step(wg, problem, q, p, o, m, total, unit, i, j, steps)
        j += 1
        i += 1
    return o, total, p, i, j, exceeded


@gluon.jit
def step_again(problem, q, p, o, m, total, unit, j):
    """Do a whole step with the keys of place j left to come. Returns (o, m, total, the step's P)."""
    KS: gl.constexpr = problem.K_STAGES
    s = scores(problem, q, place_in(problem, problem.sk, j % KS))
    s = capped(problem, warpgroup_mma_wait(0, deps=[s]))
    pn, m, total, kept = lazy_softmax(problem, s, m, total, unit, problem.BN)
    mbarrier.arrive(problem.bk.index(KS + j % KS), count=1)
    return times(problem, o, kept), m, total, gl.convert_layout(pn.to(problem.q.dtype), p.type.layout)


@gluon.jit
def consume(wg, problem):
    """Warpgroup wg."""
    W: gl.constexpr = problem.WARPGROUPS
    BN: gl.constexpr = problem.BN
    KS: gl.constexpr = problem.K_STAGES
    VS: gl.constexpr = problem.V_STAGES
    QS: gl.constexpr = problem.Q_STAGES
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, wide_columns(problem.D), 16])
    LP: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    LQ: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    # A tile's first product runs under the last one's end, unless that end has Q's only buffer. Where warpgroups take
    # turns, for which there are two, so do its first exponentials: the turn should not wait for a tile's end. Elsewhere
    # that was slower.
    CHAIN: gl.constexpr = QS > 1
    TURNS: gl.constexpr = problem.PING_PONG
    gl.static_assert(CHAIN or not TURNS)
    gl.static_assert(TURNS or not problem.Q_REGISTERS)  # they are filled where a tile ends
    # With a limit to the right a warpgroup may see no more than half of its last key tile. Of two warpgroups the last
    # sees all of it, unless lengths are odd.
    BOTH: gl.constexpr = problem.SHARED or W % 2 == 1
    NARROW: gl.constexpr = problem.HALF_TILES and problem.RIGHT and CHAIN and (BOTH or wg < W - 1)
    COPY: gl.constexpr = 0 if problem.SHARED else wg
    SPLIT: gl.constexpr = TURNS and problem.SHARED
    gl.static_assert(W == 2 or not SPLIT)
    bk, bv = problem.bk, problem.bv
    unit = problem.scale_log2
    if problem.SOFTCAP:
        unit = problem.outer
    declare_vote(COPY)
    if TURNS:
        if wg == W - 1:
            barrier_arrive(_FIRST_BARRIER)
    tile = 0
    j = 0
    exists, j = tile_comes(wg, problem, tile, j)
    if problem.Q_REGISTERS:
        loaded_q = loaded_queries(problem, wg, LQ)
    sf = warpgroup_mma_wait(0, deps=[first_product(wg, problem, NARROW, 0, j)])
    # With turns a tile's first step runs under the end of the one before, in the same turn of the loop: ptxas waits for
    # each product behind it, all over the kernel, where one is under way from a turn to the next.
    if TURNS:
        first, shift, num_keys, last, steps, cut_right, slow, whole_steps, m, total, pn = first_step(
            wg, problem, NARROW, 0, sf, j, unit
        )
        pass_values_beyond(wg, problem, 0, j)
        # Otherwise Triton puts one into every loop, before the wait for keys, that only this first tile would need.
        gl.thread_barrier()
    o = no_output(problem)
    while exists != 0:
        slot = tile % QS
        if not TURNS:
            first, shift, num_keys, last, steps, cut_right, slow, whole_steps, m, total, pn = first_step(
                wg, problem, NARROW, slot, sf, j, unit
            )
            pass_values_beyond(wg, problem, slot, j)
        if problem.Q_REGISTERS:
            q = loaded_q
        else:
            q = queries(problem, slot * W + wg)
        # Rounded only here: bfloat16 carried from one turn of this loop to the next is split and rebuilt.
        p = gl.convert_layout(pn.to(problem.q.dtype), LP)
        row_place = (first + shift + gl.arange(0, 64, layout=gl.SliceLayout(1, LS)))[:, None]
        lane = gl.arange(0, BN, layout=gl.SliceLayout(0, LS))[None, :]
        i = 1
        if first >= posted(problem.posts, slot, ROWS, 4):
            # Rows beyond the last query: nothing more to compute.
            while i < steps:
                if TURNS:
                    barrier_sync(_FIRST_BARRIER + wg)
                    barrier_arrive(_FIRST_BARRIER + (wg + 1) % W)
                mbarrier.wait(bk.index((j + 1) % KS), ((j + 1) // KS) & 1)
                mbarrier.arrive(bk.index(KS + (j + 1) % KS), count=1)
                mbarrier.wait(bv.index(j % VS), (j // VS) & 1)
                mbarrier.arrive(bv.index(VS + j % VS), count=1)
                j += 1
                i += 1
        slow = gl.minimum(slow, steps)
        if not TURNS:
            # As before the loop with turns, for the words and Q that are read above.
            gl.thread_barrier()
        for _ in range(problem.phases):
            while i < slow:
                o, m, total, p = step_with_max(
                    wg, problem, q, p, o, m, total, unit, i, j, steps, cut_right, whole_steps, last, num_keys,
                    row_place, lane,
                )  # fmt: skip
                j += 1
                i += 1
            # Where one copy of the code takes turns, these have one for each warpgroup: barriers whose numbers are in
            # registers keep what stands behind them waiting.
            if SPLIT:
                if wg == 0:
                    only_warpgroup(0)
                    o, total, p, i, j, exceeded = whole_run(
                        0, problem, q, p, o, m, total, unit, i, j, steps, whole_steps
                    )
                else:
                    only_warpgroup(1)
                    o, total, p, i, j, exceeded = whole_run(
                        1, problem, q, p, o, m, total, unit, i, j, steps, whole_steps
                    )
            else:
                o, total, p, i, j, exceeded = whole_run(wg, problem, q, p, o, m, total, unit, i, j, steps, whole_steps)
            if exceeded != 0:
                o, m, total, p = step_again(problem, q, p, o, m, total, unit, j)
            slow = steps
        v = j % VS
        passes = (j // VS) & 1
        j += 1
        tile += 1
        after = tile % QS
        # Leftovers in the buffers after the last tile are multiplied too, for nothing.
        if TURNS:
            exists, j = tile_comes(wg, problem, tile, j)
            mbarrier.wait(bv.index(v), passes)
            barrier_sync(_FIRST_BARRIER + wg)
            sf = first_product(wg, problem, NARROW, after, j)
            oa = values_in_turn(wg, problem, p, v, o, i > 1)
            sf = warpgroup_mma_wait(2 * products(problem.D), deps=[sf])
            ended_m, ended_total = m, total
            if exists != 0:
                first, shift, num_keys, last, steps, cut_right, slow, whole_steps, m, total, pn = first_step(
                    wg, problem, NARROW, after, sf, j, unit
                )
            else:
                # Meaningless values in registers of their own: those of the tile before would be kept all the while.
                if NARROW:
                    pn = gl.convert_layout(beside(sf, sf), LS)
                else:
                    pn = sf
            o = end(wg, problem, slot, v, oa, ended_m, ended_total, 0)
            if problem.Q_REGISTERS:
                loaded_q = loaded_queries(problem, after * W + wg, LQ)
            pass_values_beyond(wg, problem, after, j)
        else:
            mbarrier.wait(bv.index(v), passes)
            oa = weighed(problem, p, place_in(problem, problem.sv, v), o, 0, BN, onto=i > 1)
            if CHAIN:
                exists, j = tile_comes(wg, problem, tile, j)
                sf = first_product(wg, problem, NARROW, after, j)
            o = end(wg, problem, slot, v, oa, m, total, products(problem.D) if CHAIN else 0)
            if not CHAIN:
                exists, j = tile_comes(wg, problem, tile, j)
                sf = first_product(wg, problem, NARROW, after, j)
            sf = warpgroup_mma_wait(0, deps=[sf])
    if TURNS:
        if wg == 0:
            barrier_sync(_FIRST_BARRIER)


@gluon.jit
def consume_as_one(REGISTERS: gl.constexpr, problem):
    """All warpgroups."""
    consume(own_warpgroup(problem.WARPGROUPS, REGISTERS), problem)


@gluon.jit(
    do_not_specialize=[
        "pages_a_row", "k_page_rows", "v_page_rows", "lse_batch", "lse_head", "num_heads", "group", "section",
        "num_queries", "num_keys", "skipped", "sequences", "search_steps", "slots", "tiles", "rounds", "shift", "left",
        "right", "phases",
    ]
)  # fmt: skip
def attention_kernel(
    q, k, v, out, lse, sinks, starts_q, starts_k, order, block_table, pages_a_row, k_page_rows, v_page_rows, lse_batch,
    lse_head, num_heads, group, section, num_queries, num_keys, skipped, sequences, search_steps, slots, tiles, rounds,
    shift, left, right, phases, scale_log2, inner, outer,
    D: gl.constexpr, BN: gl.constexpr, WARPGROUPS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, PING_PONG: gl.constexpr, Q_REGISTERS: gl.constexpr, HALF_TILES: gl.constexpr,
    HEADROOM: gl.constexpr, ORDER: gl.constexpr, PAGE: gl.constexpr, RAGGED: gl.constexpr, TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """See the top of this file; descriptors q, k, v, out of [.., rows, D] boxes (k, v by page: [.., rows, 64]).

    lse_*: strides in elements, int64. order, block_table: int32, see hopper/tiles.py; pages_a_row: block_table's
    columns; *_page_rows: from one page to the next, in rows.
    """
    W: gl.constexpr = WARPGROUPS
    # With turns and a limit to the right, a copy each takes up to 3 % less where a table deals many tiles: of two
    # warpgroups the first alone sees no more than half of its last key tile. (In closed form they are mostly few, which
    # matters more, or too many; from a queue both take as long.) With a softcap there is no register for the number.
    DEALT: gl.constexpr = ORDER == 1
    SHARED: gl.constexpr = SHARES and not (PING_PONG and RIGHT and DEALT) and not (SOFTCAP and (PING_PONG or W == 3))
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    sq = gl.allocate_shared_memory(q.dtype, ring_shape(Q_STAGES * W, 64, D), flat)
    sk = gl.allocate_shared_memory(q.dtype, ring_shape(K_STAGES, BN, D), flat)
    sv = gl.allocate_shared_memory(q.dtype, ring_shape(V_STAGES, BN, D), flat)
    bq = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES * W, 1], mbarrier.MBarrierLayout())
    bk = gl.allocate_shared_memory(gl.int64, [2 * K_STAGES, 1], mbarrier.MBarrierLayout())
    bv = gl.allocate_shared_memory(gl.int64, [2 * V_STAGES, 1], mbarrier.MBarrierLayout())
    bz = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    bo = gl.allocate_shared_memory(gl.int64, [Q_STAGES * W, 1], mbarrier.MBarrierLayout())
    posts = allocate_posts(Q_STAGES)
    mbarrier.init(bz.index(0), count=1)
    for i in gl.static_range(2 * Q_STAGES * W):
        mbarrier.init(bq.index(i), count=WARP_THREADS)
    for i in gl.static_range(Q_STAGES * W):
        mbarrier.init(bo.index(i), count=WARPGROUP_THREADS)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(bk.index(i), count=1)
        mbarrier.init(bk.index(K_STAGES + i), count=W)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(bv.index(i), count=1)
        mbarrier.init(bv.index(V_STAGES + i), count=W)
    fence_async_shared()
    gl.thread_barrier()
    problem = Problem(
        q, k, v, out, lse, sinks, starts_q, starts_k, order, block_table, sq, sk, sv, bq, bk, bv, bz, bo, posts,
        pages_a_row, k_page_rows, v_page_rows, lse_batch, lse_head, num_heads, group, section, num_queries, num_keys,
        skipped, sequences, search_steps, slots, tiles, rounds, shift, left, right, phases, scale_log2, inner, outer, D,
        BN, WARPGROUPS, K_STAGES, V_STAGES, Q_STAGES, PING_PONG, SHARED, Q_REGISTERS, HALF_TILES, HEADROOM, ORDER, PAGE,
        RAGGED, TOP_LEFT, LEFT, RIGHT, SOFTCAP, SINKS, LSE,
    )  # fmt: skip
    # Looking up pages takes more registers than a loader otherwise needs.
    OTHERS: gl.constexpr = 48 if PAGE > 0 and W == 2 else 32
    if SHARED and W == 2:
        TWO: gl.constexpr = 224 if PAGE > 0 else 232
        gl.warp_specialize(
            [(consume_as_one, (TWO, problem)), (twin, ()), (load_all, (problem,)), (store_all, (problem,))],
            [4, 1, 1],
            [TWO, OTHERS, OTHERS],
        )
    elif SHARED:
        gl.warp_specialize(
            [
                (consume_as_one, (160, problem)),
                (twin, ()),
                (twin, ()),
                (load_all, (problem,)),
                (store_all, (problem,)),
            ],
            [4, 4, 1, 1],
            [160, 160, OTHERS, OTHERS],
        )
    elif W == 2:
        OWN: gl.constexpr = 232 if PAGE > 0 else 240
        gl.warp_specialize(
            [(consume, (0, problem)), (consume, (1, problem)), (load_all, (problem,)), (store_all, (problem,))],
            [4, 1, 1],
            [OWN, OTHERS, OTHERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, problem)),
                (consume, (1, problem)),
                (consume, (2, problem)),
                (load_all, (problem,)),
                (store_all, (problem,)),
            ],
            [4, 4, 1, 1],
            [160, 160, OTHERS, OTHERS],
        )


install()  # the passes over this kernel's PTX: gpu/ptx/passes.py
