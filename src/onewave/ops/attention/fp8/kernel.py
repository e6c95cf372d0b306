"""Attention in float8 (e4m3) on Hopper (sm_90): hopper/kernel.py's programs, tiles and masks, with products in fp8.

What differs. Products of fp8 want both operands with the summed axis contiguous: Q and K lie so, V does not, so a
kernel before this one writes V^T, tile by tile of BN keys, zeros where no query sees a key. It also puts the 16 keys of
a group into the order in which a thread holds its scores: then P goes from the scores' registers to the next product's
without leaving its thread.

P's exponentials are not computed. From one power of two to the next e4m3's bits count eighths, so as a function of the
number's log2 they are nearly a line, and a score's distance to the highest of its row and tile, times eight, is rounded
to bits: the highest's are those of 448, and 15.7 octaves lie below. A weight is between 1 and 1.0615 times its power of
two, 1.04 on average, and is divided by the sum of such weights: an error of 1.9 % of a weight beside the 2.6 % of
rounding to e4m3, both of which cancel over many keys. That sum is one of float16 numbers, each a weight's bits moved to
their place there, and of float32 from step to step. Source: Schraudolph 1999, Neural Computation 11(4). Where the LSE
is asked for, weights are exponentials, added before they are rounded to e4m3, with the highest at 2^8.

What is accumulated is relative to the last tile's highest score, not to all tiles': at no cost, as the output is
multiplied at each step anyway. Many keys far below a row's highest keep their weights so, unless they share its tile;
e4m3 would not hold them. No reference lies over 60 octaves below it: sums fit float32.

Tensor cores add fp8 products with some 14 bits, so no accumulator may live long: each tile's P V starts from zero and
is added to the output in float32, by the multiply-add that rescales it to the tile's highest score. Per-head scales
stand in the exponent (Q's times K's) and in the last division (V's). A product takes half of bf16's time and the rest
as long as ever, so a warpgroup does one thing after another, and its products run under the others' softmax: there are
three, and nothing holds them in step; each lets go by the key tiles that none of its rows sees. No operand of fp8 lives
from one step to the next (the compiler would split such a one into bytes). Bound: power and a warp's latencies. See
docs/log/float8-attention.md. Source: Shah et al. 2024, arXiv:2407.08608.

Constants:

    D             columns of a head, in elements                                 128
    BN            keys of a key tile                                             128
    K_STAGES      slots of K's ring                                              3
    V_STAGES      slots of V's ring                                              3
    ORDER         tiles: in closed form, by table                                0, 1
    RAGGED        packed sequences                                               bool
    TOP_LEFT      query i stands at key i, not at i + Sk - Sq                     bool
    LEFT, RIGHT   keys are hidden on that side of a query                        bool
    SOFTCAP       scores become softcap * tanh(score / softcap)                  bool
    SINKS         a logit without a value joins each row                         bool
    LSE           the LSE is written                                             bool
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onewave.gpu.ptx.hook import install
from onewave.ops.attention.hopper.softmax import capped, hidden, partial_sums
from onewave.ops.attention.hopper.tiles import Problem, boxed, place, place_of_keys, tile_of
from onewave.ops.attention.hopper.warpgroup import SHARES, own_warpgroup, twin

# fp8/plan.py deals tiles of as many times 64 rows.
_WARPGROUPS = gl.constexpr(3)
# Octaves that a row's reference may lie below its highest score so far.
_BEHIND = gl.constexpr(60.0)
# A row that no descriptor has.
_BEYOND = gl.constexpr(1 << 30)
# The weight of a row's maximum as an exponential (log2), and as bits: e4m3's largest number.
_OFFSET = gl.constexpr(8.0)
_LARGEST, _TOP = gl.constexpr(448.0), gl.constexpr(126.0)
# A float16 below 2^-13 holds, as its bits, how many of these it is: rounding to float16 rounds to bits.
_BIT = gl.constexpr(2.0**-24)
_OCTAVE = gl.constexpr(8 * 2.0**-24)
# More than roundings to float32 may lift a row's maximum above its place, as a share of its distance from 0: bits above
# those of 448 would be NaN.
_SLACK = gl.constexpr(2.0**-22)
# Four float32 numbers of _BIT each -> their bits as bytes, and the weights that these are as float16, divided by 2^8.
_WEIGHTS = gl.constexpr(
    "{ .reg .b32 low, high; cvt.rn.relu.f16x2.f32 low, $4, $3; cvt.rn.relu.f16x2.f32 high, $6, $5;"
    " prmt.b32 $0, low, high, 0x6420; shl.b32 $1, low, 7; shl.b32 $2, high, 7; }"
)
_UNIT_OF_SUMS = gl.constexpr(256.0)
# Four float32 numbers -> their bytes.
_ROUND = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)
_LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_keys", "first_key", "sequences", "search_steps", "tiles", "shift", "left", "right"])
def turn_values(
    v, turned, starts_q, starts_k, stride_batch, stride_head, stride_row, num_keys, first_key, sequences, search_steps,
    tiles, left, right, head_dim: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, RAGGED: tl.constexpr,
    TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """turned[batch, head, tile] = V^T of the tile's keys, [D, BN] bytes; programs: batch * tiles + tile (AXIS), head.

    v: bytes; strides in elements. Key n = 16 a + 8 b + 2 c + d of a tile stands at 16 a + 4 c + 2 b + d. Packed: tiles
    of sequence s are those from starts_k[s] // BN + s on. Zeros from keys and columns that no query sees.
    """
    tile, head, batch = tl.program_id(AXIS) % tiles, tl.program_id(1 - AXIS), tl.program_id(AXIS) // tiles
    start = tile * 0
    own = tile
    first, end = first_key, num_keys
    if RAGGED:
        low = tile * 0
        high = low + sequences
        for _ in range(search_steps):
            middle = (low + high) // 2
            below = tl.load(starts_k + middle) // BN + middle <= tile
            low = tl.where(below & (middle < high), middle, low)
            high = tl.where(below, high, middle)
        start = tl.load(starts_k + low)
        own = tile - (start // BN + low)
        end = tl.load(starts_k + low + 1) - start
        num_queries = tl.load(starts_q + low + 1) - tl.load(starts_q + low)
        shift = end - num_queries
        if TOP_LEFT:
            shift = low * 0
        first = low * 0
        if LEFT:
            first = tl.maximum(shift - left, 0)
        if RIGHT:
            end = tl.minimum(end, num_queries + shift + right)
    at = tl.arange(0, BN)
    key = own * BN + at // 16 * 16 + at // 2 % 2 * 8 + at // 4 % 4 * 2 + at % 2
    column = tl.arange(0, D)
    rows = v + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    rows += (start + key).to(tl.int64)[:, None] * stride_row + column[None, :]
    seen = ((key >= first) & (key < end))[:, None] & (column < head_dim)[None, :]
    values = tl.load(rows, mask=seen, other=0)
    to = turned + ((batch.to(tl.int64) * tl.num_programs(1 - AXIS) + head) * tiles + tile) * (D * BN)
    tl.store(to + column[:, None] * BN + at[None, :], tl.trans(values))


@gluon.jit
def first_tile(problem, batch, kv_head, start_k, v_tiles):
    """The tile of values that holds a sequence's first key."""
    if problem.RAGGED:
        at = kv_head * v_tiles + start_k // problem.BN + batch
    else:
        at = (batch * (problem.num_heads // problem.group) + kv_head) * v_tiles
    return at


@gluon.jit
def load_bytes(problem, v_tiles):
    """The loading warp: K0 Q K1 V0 K2 V1 ..."""
    W: gl.constexpr = problem.WARPGROUPS
    KS: gl.constexpr = problem.K_STAGES
    VS: gl.constexpr = problem.V_STAGES
    bk, bv, bq = problem.bk, problem.bv, problem.bq
    tile = 0
    jk = 0
    jv = 0
    for turn in range(problem.rounds):
        batch, head, first, start_q, rows, start_k, num_keys, _, begin, count, exists = tile_of(problem, turn)
        if exists:
            kv_head = head // problem.group
            values = first_tile(problem, batch, kv_head, start_k, v_tiles) + begin + count
            for i in range(count + 1):
                if i < count:
                    at = place_of_keys(problem, batch, kv_head, start_k, num_keys, begin + count - 1 - i)
                    s = jk % KS
                    mbarrier.wait(bk.index(KS + s), ((jk // KS) & 1) ^ 1)
                    mbarrier.expect(bk.index(s), problem.BN * problem.D)
                    tma.async_copy_global_to_shared(problem.k, at, bk.index(s), boxed(problem.sk.index(s), problem.k))
                    jk += 1
                if i == 0:
                    b = tile % 2 * W
                    for w in gl.static_range(W):
                        mbarrier.wait(bq.index(2 * W + b + w), ((tile // 2) & 1) ^ 1)
                        mbarrier.expect(bq.index(b + w), 64 * problem.D)
                        at_q = place(problem, batch, head, start_q, rows, first + w * 64)
                        tma.async_copy_global_to_shared(
                            problem.q, at_q, bq.index(b + w), boxed(problem.sq.index(b + w), problem.q)
                        )
                else:
                    s = jv % VS
                    mbarrier.wait(bv.index(VS + s), ((jv // VS) & 1) ^ 1)
                    mbarrier.expect(bv.index(s), problem.BN * problem.D)
                    row = (values - i) * problem.D
                    if problem.RAGGED and problem.LEFT:
                        # Rows whose window begins beyond their sequence's last key: zeros, not what a neighbour holds.
                        row = gl.where((begin + count - i) * problem.BN < gl.maximum(num_keys, 1), row, _BEYOND)
                    tma.async_copy_global_to_shared(problem.v, [row, 0], bv.index(s), problem.sv.index(s))
                    jv += 1
            tile += 1


@gluon.jit
def in_order(p, layout: gl.constexpr, BN: gl.constexpr):
    """[64, BN] in the layout of the next product's operand: keys in the order of turn_values."""
    return gl.convert_layout(p.reshape([64, BN // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, BN]), layout)


@gluon.jit
def rounded(p):
    """Exponentials as e4m3, four at a time: in the order of scores the compiler would split and rebuild them."""
    return gl.inline_asm_elementwise(_ROUND, "=r,r,r,r,r", [p], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def weights_of(bits):
    """(e4m3 numbers of these bits, as bits_of gives them, and the same as float16 over 2^8); four at a time."""
    return gl.inline_asm_elementwise(
        _WEIGHTS, "=r,=r,=r,r,r,r,r", [bits], dtype=(gl.float8e4nv, gl.float16), is_pure=True, pack=4
    )


@gluon.jit
def sums_of(weights, BN: gl.constexpr):
    """Float16 [64, BN] in the operand's order -> float32 [64, 4]; every sum stays in its thread."""
    # Pairs last: so an SM adds two at a time.
    pairs = gl.sum(gl.sum(weights.reshape([64, BN // 16, 4, 2, 2]), 1), 2)
    return gl.sum(pairs.to(gl.float32), 2)


@gluon.jit
def moved(s, m, highest, unit):
    """Returns (m moved to this tile's highest scores, that or 0 where there is none yet, the highest of all so far,
    factor of what was accumulated before)."""
    top = gl.max(s, 1) * unit
    highest = gl.maximum(highest, top)
    # A row that sees nothing of this tile stays where it is.
    to = gl.where(top == -float("inf"), m, gl.maximum(top, highest - _BEHIND))
    reference = gl.where(to == -float("inf"), 0.0, to)
    return to, reference, highest, gl.exp2(m - reference)


@gluon.jit
def bits_of(s, reference, unit):
    """Bits of the weights as e4m3, in _BIT each and not rounded."""
    at = _OCTAVE * reference
    return s * (_OCTAVE * unit) + (_TOP * _BIT - at - gl.abs(at * _SLACK))[:, None]


@gluon.jit
def steps_of(problem, first, rows, num_keys, shift, begin, count):
    """The tile's steps, of which step i takes key tile begin + count - 1 - i, with keys that a warpgroup's rows see:
    from the first one to the one before the second. first: its first row."""
    beyond = gl.where(first < rows, 0, count)
    steps = count
    if problem.RIGHT:
        end = gl.minimum(num_keys, gl.minimum(first + 64, rows) + shift + problem.right)
        seen = (gl.maximum(end, 0) + problem.BN - 1) // problem.BN
        beyond = gl.minimum(gl.maximum(beyond, begin + count - seen), count)
    if problem.LEFT:
        seen = gl.maximum(first + shift - problem.left, 0) // problem.BN
        steps = gl.maximum(gl.minimum(count, begin + count - seen), beyond)
    return beyond, steps


@gluon.jit
def pass_keys(problem, j, count):
    """Let the next `count` tiles of keys and values go as they come: no row of this warpgroup sees them."""
    KS: gl.constexpr = problem.K_STAGES
    VS: gl.constexpr = problem.V_STAGES
    for i in range(j, j + count):
        mbarrier.wait(problem.bk.index(i % KS), (i // KS) & 1)
        mbarrier.arrive(problem.bk.index(KS + i % KS), count=1)
        mbarrier.wait(problem.bv.index(i % VS), (i // VS) & 1)
        mbarrier.arrive(problem.bv.index(VS + i % VS), count=1)
    return j + count


@gluon.jit
def consume_bytes(wg, problem, so, q_scale, k_scale, v_scale):
    """Warpgroup wg. so: shared memory of the output, [warpgroups, 64, D]."""
    W: gl.constexpr = problem.WARPGROUPS
    BN: gl.constexpr = problem.BN
    D: gl.constexpr = problem.D
    KS: gl.constexpr = problem.K_STAGES
    VS: gl.constexpr = problem.V_STAGES
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    LP: gl.constexpr = gl.DotOperandLayout(0, LO, 4)
    bq, bk, bv, sk, sv = problem.bq, problem.bk, problem.bv, problem.sk, problem.sv
    tile = 0
    j = 0
    for turn in range(problem.rounds):
        batch, head, first, start_q, rows, _, num_keys, shift, begin, count, exists = tile_of(problem, turn)
        if exists:
            kv_head = head // problem.group
            both = gl.load(q_scale + head) * gl.load(k_scale + kv_head)
            unit = problem.scale_log2 * both
            if problem.SOFTCAP:
                unit = problem.outer
            first += wg * 64
            row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
            row_place = (row + shift)[:, None]
            lane = gl.arange(0, BN, layout=gl.SliceLayout(0, LS))[None, :]
            whole_end = num_keys // BN
            last = begin + count - 1
            if problem.RIGHT:
                whole_end = gl.minimum(whole_end, gl.maximum(first + shift + problem.right + 1, 0) // BN)
            cut_right = gl.maximum(last + 1 - whole_end, 0)
            whole_steps = count
            if problem.LEFT:
                whole_start = (gl.maximum(first + 63 + shift - problem.left, 0) + BN - 1) // BN
                whole_steps = gl.minimum(count, last + 1 - whole_start)
            beyond, steps = steps_of(problem, first, rows, num_keys, shift, begin, count)
            m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, LS))
            highest = m
            o = gl.zeros([64, D], gl.float32, LO)
            if problem.LSE:
                total = partial_sums(gl.zeros([64, BN], gl.float32, LS), BN)
            else:
                total = sums_of(gl.zeros([64, BN], gl.float16, LP), BN)
            b = tile % 2 * W + wg
            mbarrier.wait(bq.index(b), (tile // 2) & 1)
            q = problem.sq.index(b)
            j = pass_keys(problem, j, beyond)
            for i in range(beyond, steps):
                s = j % KS
                mbarrier.wait(bk.index(s), (j // KS) & 1)
                z = gl.zeros([64, BN], gl.float32, LS)
                sn = warpgroup_mma(q, sk.index(s).permute([1, 0]), z, use_acc=False, is_async=True)
                sn = warpgroup_mma_wait(0, deps=[sn])
                mbarrier.arrive(bk.index(KS + s), count=1)
                if problem.SOFTCAP:
                    sn = capped(problem, sn * both)
                if (i < cut_right) | (i >= whole_steps):
                    sn = hidden(problem, sn, row_place, (last - i) * BN + lane, num_keys)
                m, reference, highest, kept = moved(sn, m, highest, unit)
                if problem.LSE:
                    pn = gl.exp2(sn * unit - (reference - _OFFSET)[:, None])
                    sums = partial_sums(pn, BN)
                    p = rounded(in_order(pn, LP, BN))
                else:
                    p, weights = weights_of(in_order(bits_of(sn, reference, unit), LP, BN))
                    sums = sums_of(weights, BN)
                total = total * gl.convert_layout(kept, gl.SliceLayout(1, total.type.layout))[:, None] + sums
                v = j % VS
                mbarrier.wait(bv.index(v), (j // VS) & 1)
                zo = gl.zeros([64, D], gl.float32, LO)
                part = warpgroup_mma(p, sv.index(v).permute([1, 0]), zo, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(bv.index(VS + v), count=1)
                o = o * gl.convert_layout(kept, gl.SliceLayout(1, LO))[:, None] + part
                j += 1
            j = pass_keys(problem, j, count - steps)
            mbarrier.arrive(bq.index(2 * W + b), count=1)
            sum_of_row = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, LS))
            heaviest = 2.0**_OFFSET if problem.LSE else _LARGEST / _UNIT_OF_SUMS
            # A row that sees no key gives 0 and -inf, sink or not.
            empty = sum_of_row == 0.0
            share = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, LS))
            if problem.SINKS:
                # One more key, of this score and with a value of zero.
                sink = gl.load(problem.sinks + head).to(gl.float32) * _LOG2E
                higher = gl.where(empty, 0.0, gl.maximum(m, sink))
                share = gl.exp2(m - higher)
                sum_of_row = sum_of_row * share + gl.exp2(sink - higher) * heaviest
                m = higher
            share = gl.where(empty, 0.0, share / gl.where(empty, 1.0, sum_of_row)) * gl.load(v_scale + kv_head)
            if problem.LSE:
                lse = (m - _OFFSET + gl.log2(gl.where(empty, 1.0, sum_of_row))) * _LN2
                base = batch.to(gl.int64) * problem.lse_batch + head.to(gl.int64) * problem.lse_head
                if problem.RAGGED:
                    base = head.to(gl.int64) * problem.lse_head + start_q
                gl.store(problem.lse + base + row, gl.where(empty, -float("inf"), lse), mask=row < rows)
            else:
                share *= 1.0 / _UNIT_OF_SUMS
            # The last tile's output has left its buffer.
            tma.store_wait(0)
            gl.thread_barrier()
            so.index(wg).store((o * gl.convert_layout(share, gl.SliceLayout(1, LO))[:, None]).to(problem.out.dtype))
            fence_async_shared()
            gl.thread_barrier()
            if first < rows:
                at = place(problem, batch, head, start_q, rows, first)
                tma.async_copy_shared_to_global(problem.out, at, boxed(so.index(wg), problem.out))
            tile += 1
    tma.store_wait(0)


@gluon.jit
def consume_bytes_as_one(REGISTERS: gl.constexpr, problem, so, q_scale, k_scale, v_scale):
    """All warpgroups."""
    consume_bytes(own_warpgroup(problem.WARPGROUPS, REGISTERS), problem, so, q_scale, k_scale, v_scale)


@gluon.jit(
    do_not_specialize=[
        "v_tiles", "lse_batch", "lse_head", "num_heads", "group", "section", "num_queries", "num_keys", "skipped",
        "sequences", "search_steps", "slots", "tiles", "rounds", "shift", "left", "right",
    ]
)  # fmt: skip
def fp8_kernel(
    q, k, v, out, q_scale, k_scale, v_scale, lse, sinks, starts_q, starts_k, order, v_tiles, lse_batch, lse_head,
    num_heads, group, section, num_queries, num_keys, skipped, sequences, search_steps, slots, tiles, rounds, shift,
    left, right, scale_log2, inner, outer,
    D: gl.constexpr, BN: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, ORDER: gl.constexpr,
    RAGGED: gl.constexpr, TOP_LEFT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """As hopper/kernel.py's attention_kernel; v: descriptor of turn_values' tiles, [rows, BN] in boxes of [D, BN].

    q_scale: float32 [heads]; k_scale, v_scale: [kv_heads]. v_tiles: tiles of one head.
    """
    W: gl.constexpr = _WARPGROUPS
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    sq = gl.allocate_shared_memory(q.dtype, [2 * W, 64, D], flat)
    sk = gl.allocate_shared_memory(q.dtype, [K_STAGES, BN, D], flat)
    sv = gl.allocate_shared_memory(q.dtype, [V_STAGES, D, BN], flat)
    so = gl.allocate_shared_memory(out.dtype, [W, 64, D], wide)
    bq = gl.allocate_shared_memory(gl.int64, [4 * W, 1], mbarrier.MBarrierLayout())
    bk = gl.allocate_shared_memory(gl.int64, [2 * K_STAGES, 1], mbarrier.MBarrierLayout())
    bv = gl.allocate_shared_memory(gl.int64, [2 * V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4 * W):
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
        q, k, v, out, lse, sinks, starts_q, starts_k, order, starts_q, sq, sk, sv, bq, bk, bv, bv, bv, bv, v_tiles,
        v_tiles, v_tiles, lse_batch, lse_head, num_heads, group, section, num_queries, num_keys, skipped, sequences,
        search_steps, slots, tiles, rounds, shift, left, right, v_tiles, scale_log2, inner, outer, D, BN, W, K_STAGES,
        V_STAGES, 2, False, SHARES, False, False, 0, ORDER, 0, RAGGED, TOP_LEFT, LEFT, RIGHT, SOFTCAP, SINKS, LSE,
    )  # fmt: skip
    if SHARES:
        gl.warp_specialize(
            [
                (consume_bytes_as_one, (160, problem, so, q_scale, k_scale, v_scale)),
                (twin, ()),
                (twin, ()),
                (load_bytes, (problem, v_tiles)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (consume_bytes, (0, problem, so, q_scale, k_scale, v_scale)),
                (consume_bytes, (1, problem, so, q_scale, k_scale, v_scale)),
                (consume_bytes, (2, problem, so, q_scale, k_scale, v_scale)),
                (load_bytes, (problem, v_tiles)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


install()  # the passes over this kernel's PTX: gpu/ptx/passes.py
