"""The attention kernel of Hopper (sm_90): TMA, asynchronous wgmma, warp-specialised, persistent; in Gluon.

A program is one SM. Its tiles of work are fixed before: by a table dealt on the host, each tile to whoever has least;
or as position k * programs + p of round k, p turned round every other round, so that with tiles sorted by length each
program gets as much (LPT's effect in closed form); packed sequences' tiles are sorted by a kernel before this one. A
tile is WARPGROUPS x 64 queries of one head. Tiles are ordered in sections of G heads whose K and V fit the L2, longest
first inside.

One warp loads (gluon_load_impl): K0 Q K1 V0 K2 V1 ..., the order in which they are used, into a ring of K and one of V
(mbarriers "full" and "free" a slot), Q into two buffers that alternate over tiles. The warpgroups each own 64 rows: Q,
S, P and the output stay in registers; the product of the next K tile runs under the exponentials and under P V of the
last one. Outputs leave through Q's buffer and TMA while the next tile is loaded. Ping-pong: named barriers let one
warpgroup issue its products while another computes exponentials.

Softmax without a running max: a row keeps its reference m until a score exceeds it by more than 2^HEADROOM, and only
then is the accumulator rescaled ("lazy", exact: bf16 P and float32 sums keep their relative precision). m is the max of
the first tile of keys that the row sees; tiles go by from the last key to the first. The loop of whole tiles needs no
max, no shuffle and no rescale: after the exponentials one vote over sums finds out whether any row exceeded; then the
tile's scores are computed anew (K is not yet released), m is moved, and the remaining tiles go through the loop with
the max. Rows that did not exceed are multiplied by exactly 1: a row's bits never depend on its neighbours.

Tiles that a mask cuts take the loop with the max, with -inf for hidden scores; tiles that no row of the CTA sees are
never loaded. TMA returns zeros beyond Sq, Sk and head_dim and drops what is written there. Packed sequences use
descriptors of five axes whose third bound is the end of the sequence: address = base + y * stride + (x - 2^30) * stride
with x = 2^30 - length + row and y = first row + length, by wrapping of 64-bit addresses; so row `length` is out of
bounds wherever the sequence lies. Bound: the tensor cores. Source: Shah et al. 2024, arXiv:2407.08608.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportPrivateUsage=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportUntypedFunctionDecorator=false, reportUntypedClassDecorator=false
# pyright: reportConstantRedefinition=false, reportReturnType=false, reportAssignmentType=false
# ruff: noqa: SIM102, SIM108
# (Triton ships no type information; what is decided by a constant must stay a statement of its own.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onewave.ops.attention.gluon_load_impl import load_all
from onewave.ops.attention.gluon_tiles_impl import Problem, boxed, place, tile_of

__all__ = ["attention_kernel"]

# Triton's own named barriers have the ids from 0 up.
_SYNC = gl.constexpr("bar.sync $1, 256; mov.u32 $0, 0;")
_ARRIVE = gl.constexpr("bar.arrive $1, 256; mov.u32 $0, 0;")
_REGISTERS = gl.constexpr("=r,r")
_FIRST_BARRIER = gl.constexpr(13)
# BARRIER_VOTE: a vote whose result is every thread's own register, which the second statement hands on as a scalar;
# Triton's reduction goes through shared memory three times. On an H200 the barrier was faster on every shape tried.
_DECLARE = gl.constexpr(".reg .b32 onewave_vote_{0}; mov.b32 onewave_vote_{0}, 0; mov.b32 $0, 0;")
_VOTE = gl.constexpr(
    "{{ .reg .pred mine, any; setp.ne.s32 mine, $1, 0; barrier.cta.red.or.pred any, {1}, 128, mine;"
    " selp.b32 onewave_vote_{0}, 1, 0, any; mov.b32 $0, 0; }}"
)
_RESULT = gl.constexpr(
    "{{ .reg .pred any; setp.ne.s32 any, onewave_vote_{0}, 0; vote.sync.any.pred any, any, 0xffffffff;"
    " selp.b32 $0, 1, 0, any; }}"
)
_VOTE_BARRIER = gl.constexpr(10)
_LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def barrier_sync(number):
    gl.inline_asm_elementwise(_SYNC, _REGISTERS, [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(number):
    gl.inline_asm_elementwise(_ARRIVE, _REGISTERS, [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def text(pattern, wg):
    return pattern.format(wg, _VOTE_BARRIER.value + wg)


@gluon.jit
def declare_vote(wg: gl.constexpr):
    code: gl.constexpr = text(_DECLARE, wg)
    gl.inline_asm_elementwise(code, _REGISTERS, [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def any_in_warpgroup(wg: gl.constexpr, ballots):
    """1 if any of the warpgroup's [4, 8, 4] ballots, one a thread, is not 0; a barrier of the warpgroup."""
    code: gl.constexpr = text(_VOTE, wg)
    gl.inline_asm_elementwise(code, _REGISTERS, [ballots], dtype=gl.int32, is_pure=False, pack=1)
    result: gl.constexpr = text(_RESULT, wg)
    return gl.inline_asm_elementwise(result, _REGISTERS, [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def partial_sums(p, BN: gl.constexpr):
    """[64, BN] -> [64, 4]; every sum stays in its thread."""
    return gl.sum(gl.sum(p.reshape([64, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def capped(problem, s):
    """Scores whose product with unit(problem) is the exponent of 2."""
    if problem.SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x), right for every x: e^2x may be 0 or inf.
        s = problem.outer * (1.0 - 2.0 / (1.0 + gl.exp2(s * problem.inner)))
    return s


@gluon.jit
def hidden(problem, s, row_place, key, num_keys):
    """-inf where a row does not see a key. row_place [64, 1], key [1, BN]."""
    seen = key < num_keys
    if problem.RIGHT:
        seen = seen & (key <= row_place + problem.right)
    if problem.LEFT:
        seen = seen & (key >= row_place - problem.left)
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def lazy_softmax(problem, s, m, total, unit):
    """One step that moves m where a row's scores exceed it by more than HEADROOM.

    Returns (p, m, total, factor of what was accumulated before: exactly 1 for a row whose m stays).
    """
    top = gl.max(s, 1) * unit
    moved = gl.where(top > m + problem.HEADROOM, top, m)
    reference = gl.where(moved == -float("inf"), 0.0, moved)
    kept = gl.exp2(m - reference)
    p = gl.exp2(s * unit - reference[:, None])
    kept_in_total = gl.convert_layout(kept, gl.SliceLayout(1, total.type.layout))
    return p, moved, total * kept_in_total[:, None] + partial_sums(p, problem.BN), kept


@gluon.jit
def consume(wg: gl.constexpr, problem):
    """Warpgroup wg."""
    W: gl.constexpr = problem.WARPGROUPS
    BN: gl.constexpr = problem.BN
    D: gl.constexpr = problem.D
    KS: gl.constexpr = problem.K_STAGES
    VS: gl.constexpr = problem.V_STAGES
    QS: gl.constexpr = problem.Q_STAGES
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LP: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    # With more rows than keys in a tile, whole tiles may lie above a warpgroup's diagonal. Ping-pong wants equal steps.
    SKIP: gl.constexpr = problem.RIGHT and 64 * W > BN and not problem.PING_PONG
    dtype: gl.constexpr = problem.q.dtype
    # A sum of 32 exponentials below 2^HEADROOM may exceed it: then the vote is for nothing, and harmless.
    TOO_MUCH: gl.constexpr = 2.0**problem.HEADROOM
    bq, bk, bv, sk, sv = problem.bq, problem.bk, problem.bv, problem.sk, problem.sv
    unit = problem.scale_log2
    if problem.SOFTCAP:
        unit = 1.0
    if problem.BARRIER_VOTE:
        declare_vote(wg)
    tile = 0
    j = 0
    if problem.PING_PONG and wg == W - 1:
        barrier_arrive(_FIRST_BARRIER)
    for turn in range(problem.rounds):
        batch, head, first, start_q, rows, _, num_keys, shift, begin, count, exists = tile_of(problem, turn)
        if exists:
            first += wg * 64
            row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
            row_place = (row + shift)[:, None]
            lane = gl.arange(0, BN, layout=gl.SliceLayout(0, LS))[None, :]
            # Key tiles are counted from the last one: those at the start and at the end may be cut by masks.
            whole_end = num_keys // BN
            last = begin + count - 1
            steps = count
            if problem.RIGHT:
                whole_end = gl.minimum(whole_end, gl.maximum(first + shift + problem.right + 1, 0) // BN)
            if SKIP:
                own_last = gl.maximum(first + 63 + shift + problem.right, 0) // BN
                own_last = gl.maximum(gl.minimum(last, own_last), begin)
                for _ in range(last - own_last):
                    mbarrier.wait(bk.index(j % KS), (j // KS) & 1)
                    mbarrier.arrive(bk.index(KS + j % KS), count=1)
                    mbarrier.wait(bv.index(j % VS), (j // VS) & 1)
                    mbarrier.arrive(bv.index(VS + j % VS), count=1)
                    j += 1
                steps = own_last - begin + 1
                last = own_last
            cut_right = gl.maximum(last + 1 - whole_end, 0)
            # After the first tile, unless some row saw none of it, no row's m is -inf.
            slow = gl.maximum(cut_right, 1)
            if problem.RIGHT:
                slow = gl.where(last * BN > first + shift + problem.right, cut_right + 1, slow)
            whole_steps = steps
            if problem.LEFT:
                whole_start = (gl.maximum(first + 63 + shift - problem.left, 0) + BN - 1) // BN
                whole_steps = gl.minimum(steps, last + 1 - whole_start)
            m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, LS))
            o = gl.zeros([64, D], gl.float32, LO)
            b = tile % QS * W + wg
            mbarrier.wait(bq.index(b), (tile // QS) & 1)
            qs = problem.sq.index(b)
            if problem.Q_REGISTERS:
                q = qs.load(gl.DotOperandLayout(0, LS, 2))
            else:
                q = qs
            s = j % KS
            mbarrier.wait(bk.index(s), (j // KS) & 1)
            z = gl.zeros([64, BN], gl.float32, LS)
            sn = warpgroup_mma(q, sk.index(s).permute([1, 0]), z, use_acc=False, is_async=True)
            if QS > 1:
                if tile > 0:
                    # The last tile's output has left its buffer.
                    tma.store_wait(0)
                    mbarrier.arrive(bq.index(QS * W + (tile + 1) % QS * W + wg), count=1)
            sn = warpgroup_mma_wait(0, deps=[sn])
            mbarrier.arrive(bk.index(KS + s), count=1)
            sn = capped(problem, sn)
            if (cut_right > 0) | (whole_steps <= 0):
                sn = hidden(problem, sn, row_place, last * BN + lane, num_keys)
            total = partial_sums(gl.zeros([64, BN], gl.float32, LS), BN)
            pn, m, total, _ = lazy_softmax(problem, sn, m, total, unit)
            p = gl.convert_layout(pn.to(dtype), LP)
            mbarrier.wait(bk.index((j + 1) % KS), ((j + 1) // KS) & 1, pred=steps > 1)
            i = 1
            slow = gl.minimum(slow, steps)
            for _ in range(problem.phases):
                while i < slow:
                    s = (j + 1) % KS
                    if problem.PING_PONG:
                        barrier_sync(_FIRST_BARRIER + wg)
                    z = gl.zeros([64, BN], gl.float32, LS)
                    sn = warpgroup_mma(q, sk.index(s).permute([1, 0]), z, use_acc=False, is_async=True)
                    v = j % VS
                    mbarrier.wait(bv.index(v), (j // VS) & 1)
                    oa = warpgroup_mma(p, sv.index(v), o, is_async=True)
                    if problem.PING_PONG:
                        barrier_arrive(_FIRST_BARRIER + (wg + 1) % W)
                    sn = warpgroup_mma_wait(1, deps=[sn])
                    sn = capped(problem, sn)
                    if (i < cut_right) | (i >= whole_steps):
                        sn = hidden(problem, sn, row_place, (last - i) * BN + lane, num_keys)
                    pn, m, total, kept = lazy_softmax(problem, sn, m, total, unit)
                    mbarrier.wait(bk.index((j + 2) % KS), ((j + 2) // KS) & 1, pred=i + 1 < steps)
                    o = warpgroup_mma_wait(0, deps=[oa])
                    mbarrier.arrive(bk.index(KS + s), count=1)
                    mbarrier.arrive(bv.index(VS + v), count=1)
                    o = o * gl.convert_layout(kept, gl.SliceLayout(1, LO))[:, None]
                    p = gl.convert_layout(pn.to(dtype), LP)
                    j += 1
                    i += 1
                exceeded = 0
                while (i < whole_steps) & (exceeded == 0):
                    s = (j + 1) % KS
                    if problem.PING_PONG:
                        barrier_sync(_FIRST_BARRIER + wg)
                    z = gl.zeros([64, BN], gl.float32, LS)
                    sn = warpgroup_mma(q, sk.index(s).permute([1, 0]), z, use_acc=False, is_async=True)
                    v = j % VS
                    mbarrier.wait(bv.index(v), (j // VS) & 1)
                    oa = warpgroup_mma(p, sv.index(v), o, is_async=True)
                    if problem.PING_PONG:
                        barrier_arrive(_FIRST_BARRIER + (wg + 1) % W)
                    sn = warpgroup_mma_wait(1, deps=[sn])
                    sn = capped(problem, sn)
                    pn = gl.exp2(sn * unit - m[:, None])
                    sums = partial_sums(pn, BN)
                    if problem.BARRIER_VOTE:
                        # Rows r and r + 8 of a warp's 16 belong to one thread.
                        most = gl.max(sums.reshape([4, 2, 8, 4]), 1)
                        exceeded = any_in_warpgroup(wg, (most > TOO_MUCH).to(gl.int32))
                    # It also ends the basic block: without it ptxas hoists the wait for P V above the exponentials.
                    mbarrier.wait(bk.index((j + 2) % KS), ((j + 2) // KS) & 1, pred=i + 1 < steps)
                    o = warpgroup_mma_wait(0, deps=[oa])
                    if not problem.BARRIER_VOTE:
                        exceeded = gl.max((sums > TOO_MUCH).to(gl.int32).reshape([256]), 0)
                    if exceeded != 0:
                        z = gl.zeros([64, BN], gl.float32, LS)
                        sn = warpgroup_mma(q, sk.index(s).permute([1, 0]), z, use_acc=False, is_async=True)
                        sn = capped(problem, warpgroup_mma_wait(0, deps=[sn]))
                        pn, m, total, kept = lazy_softmax(problem, sn, m, total, unit)
                        o = o * gl.convert_layout(kept, gl.SliceLayout(1, LO))[:, None]
                    else:
                        total = total + sums
                    mbarrier.arrive(bk.index(KS + s), count=1)
                    mbarrier.arrive(bv.index(VS + v), count=1)
                    p = gl.convert_layout(pn.to(dtype), LP)
                    j += 1
                    i += 1
                slow = steps
            v = j % VS
            mbarrier.wait(bv.index(v), (j // VS) & 1)
            oa = warpgroup_mma(p, sv.index(v), o, is_async=True)
            sum_of_row = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, LS))
            # A row that sees no key gives 0 and -inf, sink or not.
            empty = sum_of_row == 0.0
            share = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, LS))
            if problem.SINKS:
                # One more key, of this score and with a value of zero.
                sink = gl.load(problem.sinks + head).to(gl.float32) * _LOG2E
                higher = gl.where(empty, 0.0, gl.maximum(m, sink))
                share = gl.exp2(m - higher)
                sum_of_row = sum_of_row * share + gl.exp2(sink - higher)
                m = higher
            share = gl.where(empty, 0.0, share / gl.where(empty, 1.0, sum_of_row))
            if problem.LSE:
                lse = gl.where(empty, -float("inf"), (m + gl.log2(gl.where(empty, 1.0, sum_of_row))) * _LN2)
                base = batch.to(gl.int64) * problem.lse_batch + head.to(gl.int64) * problem.lse_head
                if problem.RAGGED:
                    base = head.to(gl.int64) * problem.lse_head + start_q
                gl.store(problem.lse + base + row, lse, mask=row < rows)
            share = gl.convert_layout(share, gl.SliceLayout(1, LO))
            o = warpgroup_mma_wait(0, deps=[oa])
            mbarrier.arrive(bv.index(VS + v), count=1)
            j += 1
            qs.store((o * share[:, None]).to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            if first < rows:
                at = place(problem, batch, head, start_q, rows, first)
                tma.async_copy_shared_to_global(problem.out, at, boxed(qs, problem.out))
            if QS == 1:
                tma.store_wait(0)
                mbarrier.arrive(bq.index(W + wg), count=1)
            tile += 1
    tma.store_wait(0)
    if problem.PING_PONG and wg == 0:
        barrier_sync(_FIRST_BARRIER)


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
    Q_STAGES: gl.constexpr, PING_PONG: gl.constexpr, Q_REGISTERS: gl.constexpr, BARRIER_VOTE: gl.constexpr,
    HEADROOM: gl.constexpr, ORDER: gl.constexpr, PAGE: gl.constexpr, RAGGED: gl.constexpr, TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """See the top of this file; descriptors q, k, v, out of [.., rows, D] boxes (k, v by page: [.., rows, 64]).

    lse_*: strides in elements, int64. order, block_table: int32, see gluon_tiles_impl; pages_a_row: block_table's
    columns; *_page_rows: from one page to the next, in rows.
    """
    W: gl.constexpr = WARPGROUPS
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    sq = gl.allocate_shared_memory(q.dtype, [Q_STAGES * W, 64, D], flat)
    sk = gl.allocate_shared_memory(q.dtype, [K_STAGES, BN, D], flat)
    sv = gl.allocate_shared_memory(q.dtype, [V_STAGES, BN, D], flat)
    bq = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES * W, 1], mbarrier.MBarrierLayout())
    bk = gl.allocate_shared_memory(gl.int64, [2 * K_STAGES, 1], mbarrier.MBarrierLayout())
    bv = gl.allocate_shared_memory(gl.int64, [2 * V_STAGES, 1], mbarrier.MBarrierLayout())
    bz = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bz.index(0), count=1)
    for i in gl.static_range(2 * Q_STAGES * W):
        mbarrier.init(bq.index(i), count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(bk.index(i), count=1)
        mbarrier.init(bk.index(K_STAGES + i), count=W)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(bv.index(i), count=1)
        mbarrier.init(bv.index(V_STAGES + i), count=W)
    fence_async_shared()
    gl.thread_barrier()
    problem = Problem(
        q, k, v, out, lse, sinks, starts_q, starts_k, order, block_table, sq, sk, sv, bq, bk, bv, bz, pages_a_row,
        k_page_rows, v_page_rows, lse_batch, lse_head, num_heads, group, section, num_queries, num_keys, skipped,
        sequences, search_steps, slots, tiles, rounds, shift, left, right, phases, scale_log2, inner, outer, D, BN,
        WARPGROUPS, K_STAGES, V_STAGES, Q_STAGES, PING_PONG, Q_REGISTERS, BARRIER_VOTE, HEADROOM, ORDER, PAGE, RAGGED,
        TOP_LEFT, LEFT, RIGHT, SOFTCAP, SINKS, LSE,
    )  # fmt: skip
    if W == 2:
        # Looking up pages takes more registers than a loader otherwise needs.
        OWN: gl.constexpr = 232 if PAGE > 0 else 240
        LOADER: gl.constexpr = 40 if PAGE > 0 else 24
        gl.warp_specialize(
            [(consume, (0, problem)), (consume, (1, problem)), (load_all, (problem,))], [4, 1], [OWN, LOADER]
        )
    else:
        gl.warp_specialize(
            [(consume, (0, problem)), (consume, (1, problem)), (consume, (2, problem)), (load_all, (problem,))],
            [4, 4, 1],
            [160, 160, 32],
        )
