"""Split-KV decode attention on Hopper (sm_90), in Gluon: one warp streams keys and values, four others work on them.

Work, splits, partial results and every rounding are those of triton/split_kv.py: a row gets the same bits from either
kernel, so either may be chosen. What differs is how the bytes come.

Both partitions begin before the launch before has ended, wait for that by themselves, and find out by themselves which
rows and keys are theirs. Of a call's only row everything follows from its length: it is worked out from the length of
before the wait, and behind it only if that has changed. While the workers wait, where keys lie one after another, the
program's first tile comes into L2 (bring_nearer).

loader (1 warp)    goes over the program's list of rows and their tiles of BLOCK_N keys by itself, and has TMA bring
                   each into one of STAGES places of shared memory as soon as it is free, at most FLIGHT tiles under
                   way. A new row, or the end of one, is nothing to it: the memory is never without a request. The first
                   FLIGHT tiles are guessed where that is possible (load.py).
consume (4 warps)  for each tile: S^T = K q^T (m16n8k16, keys as the tall side) straight from the ring, the running
                   maximum, P, and O^T = V^T P^T; at a split's and a row's end what split_kv.py does there.

K and V of a tile have a barrier each ("full"), so that scores do not wait for values; both are let go at once
("empty"), as soon as the values are in registers. Keys that no query sees come along with their tile, whatever they
hold: their scores are masked, and their values replaced by zeros in the tiles where there are any.

Roofline: the bytes of keys and values, each read once.

constexpr    meaning [unit] (allowed values); the others: split_kv.py
STAGES       tiles of keys and values in shared memory (3, 4)
FLIGHT       tiles under way, at most (up to STAGES)
KV           numbers of the cache (0: 16 bits, 1: int8, 2: e4m3, which are widened in registers: widen.py)
PAGE         keys of a page smaller than BLOCK_N (a divisor of it from 8 on; 0: none)
LOADER       registers of a loading thread (a multiple of 8)
GUESSES      whether the first tiles are asked for before the lengths are known (PAGING 0 and not FUSED)
"""
# (What is decided by a constant must stay a statement of its own.)

# No deferred annotations: an aggregate reads the types of its fields.

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra import cuda

from onewave.gpu.ptx.hook import install
from onewave.ops.decode_attention.hopper.load import load_tiles, next_place
from onewave.ops.decode_attention.hopper.merge import merged_by_lanes
from onewave.ops.decode_attention.hopper.parts import (
    Call,
    bring_nearer,
    bytes_of_number,
    columns_across,
    early_part,
    own_share,
    part_here,
    part_of_only_row,
)
from onewave.ops.decode_attention.hopper.widen import column_of_row, in_order, keys_of, operand, values_of
from onewave.ops.decode_attention.triton.merge import finish, fold, store_output, store_stats
from onewave.ops.decode_attention.triton.projection import projected_row, row_loads
from onewave.ops.decode_attention.triton.shares import listed_keys, row_lengths

_LOG2E = gl.constexpr(1.4426950408889634)
_NEGATIVE_INFINITY = gl.constexpr(float("-inf"))


@gluon.jit
def consume(c):
    """The four warps that work: see the top of this file."""
    if c.ROWS == 1:
        early_row, early_length, early = early_part(c)
    if c.PAGING == 0:
        if c.head_dim >= 64:
            if c.ROWS > 1:
                early_row, early_length, early = early_part(c)
            bring_nearer(c, early_row, early.begin, early.end)
    head_tile, head_tiles = gl.program_id(1), gl.num_programs(1)
    kv_head = head_tile // c.TILES
    BLOCK_M: gl.constexpr = c.BLOCK_M
    BLOCK_N: gl.constexpr = c.BLOCK_N
    BLOCK_D: gl.constexpr = c.BLOCK_D
    BLOCK_H: gl.constexpr = c.BLOCK_H
    PER_LANE: gl.constexpr = 8
    ACROSS: gl.constexpr = BLOCK_D // PER_LANE
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    LEFT: gl.constexpr = operand(0, MMA, c.KV)
    RIGHT: gl.constexpr = operand(1, MMA, c.KV)
    # Rows of queries and of outputs, 16 bytes a thread.
    ROWS_OF: gl.constexpr = gl.BlockedLayout([1, PER_LANE], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    # The warps' maxima, each thread all four of its columns.
    OF_WARPS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [2, 0]], lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]], block_bases=[], shape=[4, BLOCK_M],
    )  # fmt: skip
    OF_KEY: gl.constexpr = gl.SliceLayout(1, MMA)
    OF_ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    DTYPE: gl.constexpr = c.q.dtype.element_ty if c.KV else c.k_tiles.dtype
    extra: gl.constexpr = 1 if c.FUSED else 0

    query_rows = c.GROUP * c.num_queries
    first_member = head_tile % c.TILES * BLOCK_M
    member = first_member + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS_OF))
    head, query = kv_head * c.GROUP + member % c.GROUP, member // c.GROUP
    dim = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, ROWS_OF))
    # head_dim is a multiple of 8: so that a thread's eight are loaded and stored at once.
    in_head = gl.max_constancy(dim < c.head_dim, [PER_LANE])
    inside = (member < query_rows)[:, None] & in_head[None, :]
    slots = gl.arange(0, BLOCK_M, layout=OF_ROW)
    members = first_member + slots
    lane = gl.arange(0, BLOCK_N, layout=OF_KEY)
    lane_of_values = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LEFT))
    dims = column_of_row(gl.arange(0, BLOCK_D, layout=OF_KEY), c)
    nothing = gl.full([BLOCK_M], _NEGATIVE_INFINITY, gl.float32, OF_ROW)
    none_of = gl.zeros([BLOCK_M], gl.float32, OF_ROW)
    one_each = none_of + 1.0
    of_head = (kv_head * c.GROUP + members % c.GROUP).to(gl.int64)
    nowhere = gl.zeros([BLOCK_D, BLOCK_M], gl.float32, MMA)

    cuda.gdc_wait()
    score_scale = c.scale_log2
    if c.KV_SCALES:
        score_scale *= gl.load(c.k_scale + kv_head)
        v_scale = gl.load(c.v_scale + kv_head)
    if c.ROWS == 1:
        first_row, last_row, row_at = early_row, early_row, 0
        loads = row_loads(early_row.to(gl.int64), head, query, kv_head, dim, inside, in_head, c.head_dim, c)
        length = row_lengths(early_row, True, c)
        part = early
        if length != early_length:
            part = part_of_only_row(c, length)
    else:
        first_row, last_row, row_at, share_begin, share_end = own_share(c)
    place = 0
    phase = 0
    for row in tl.range(first_row, last_row + 1, disable_licm=True):
        row64 = row.to(gl.int64)
        if c.ROWS > 1:
            length = row_lengths(row64, row >= 0, c)
            loads = row_loads(row64, head, query, kv_head, dim, inside, in_head, c.head_dim, c)
            part = part_here(c, row_at, length, share_begin, share_end)
            row_at += listed_keys(length, c)
        first_key, size, first_split, last_split, split, last_here, begin, end = part
        some = split <= last_here
        partial = (split != first_split) | (last_here != last_split)
        splits_here = last_here - split + 1
        partials = (row64 * head_tiles + head_tile) * c.max_splits - first_split
        end_cached = length - extra
        limit = length - (c.num_queries - 1) + members // c.GROUP
        next_begin = (split + 1) * size
        q = loads
        if c.FUSED:
            q, k_new, v_new = projected_row(loads, DTYPE, c)
            has_new = some & (last_here == last_split)
            v_new = gl.where(has_new, v_new, 0.0)
            if has_new:
                new_k = c.k + (row64 * c.stride_k_block + kv_head.to(gl.int64) * c.stride_k_head)
                new_v = c.v + (row64 * c.stride_v_block + kv_head.to(gl.int64) * c.stride_v_head)
                gl.store(new_k + end_cached.to(gl.int64) * c.stride_k_key + dim, k_new, mask=in_head)
                gl.store(new_v + end_cached.to(gl.int64) * c.stride_v_key + dim, v_new.to(DTYPE), mask=in_head)
            new_score = score_of_new(c, q, k_new, row64, end_cached, of_head, (members < query_rows) & has_new, OF_ROW)
            new = gl.convert_layout(v_new.to(DTYPE).to(gl.float32), OF_KEY)
        q_t = gl.convert_layout(gl.permute(q, (1, 0)), RIGHT)

        if c.GUESSES:
            mbarrier.wait(c.sure.index(0), 0)
        whole_top, whole_total, whole_acc = nothing, none_of, nowhere
        top, acc = nothing, nowhere
        sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
        for start in range(begin, end, BLOCK_N):
            key = start + lane
            present = (key >= first_key) & (key < end)
            if c.HAS_MASK:
                mask_at = row64 * c.stride_mask_row + (of_head * c.stride_mask_head)[None, :] + key[:, None]
                added = gl.load(c.mask + mask_at, mask=(members < query_rows)[None, :] & present[:, None], other=0.0)
            mbarrier.wait(c.k_full.index(place), phase)
            k = keys_of(c, place, DTYPE, MMA)
            scores = mma_v2(k, q_t, gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)) * score_scale
            mbarrier.wait(c.v_full.index(place), phase)
            v_t = values_of(c, place, DTYPE, MMA)
            if c.HAS_SOFTCAP:
                scores = c.softcap * (1.0 - 2.0 / (gl.exp2(scores / c.softcap * (2.0 * _LOG2E)) + 1.0))
            if c.HAS_MASK:
                every_one, _ = gl.broadcast((one_each * _LOG2E)[None, :], scores)
                scores = gl.fma(added.to(gl.float32), every_one, scores)
            visible = present[:, None]
            if not c.ONE_QUERY:  # each sees one key more than the one before
                visible = visible & (key[:, None] < limit[None, :]) & (key[:, None] >= (limit - c.window)[None, :])
            scores = gl.where(visible, scores, _NEGATIVE_INFINITY)
            of_warp = gl.max(gl.max(gl.reshape(scores, [BLOCK_N // 64, 4, 16, BLOCK_M]), axis=2), axis=0)
            c.tops.store(of_warp)
            gl.thread_barrier()
            highest = gl.max(c.tops.load(OF_WARPS), axis=0)
            highest = gl.maximum(top, gl.convert_layout(highest, OF_ROW, assert_trivial=True))
            finite = gl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
            weight = gl.exp2(scores - finite[None, :])
            keep = gl.exp2(top - finite)
            every_keep, sums = gl.broadcast(keep[None, :], sums)
            sums = gl.fma(sums, every_keep, weight)
            if (start + BLOCK_N > end) | (start < first_key):
                at = start + lane_of_values
                v_t = gl.where(((at >= first_key) & (at < end))[None, :], v_t, 0.0)
            c.weights.store(weight.to(DTYPE))
            # Nothing else puts TMA's next write to this place behind the loads of the tile.
            fence_async_shared()
            gl.thread_barrier()
            # All have read the tile.
            mbarrier.arrive(c.empty.index(place), count=1)
            p = c.weights.load(RIGHT)
            acc = mma_v2(v_t, p, acc * keep[None, :])
            top = highest
            place, phase = next_place(place, phase, c.STAGES)
            if (start + BLOCK_N >= next_begin) & (split < last_here):
                if c.KV_SCALES:
                    acc *= v_scale
                if partial:
                    store_output(partials + split, acc, slots, dims, c)
                total = sum_over_warps(c, sums, OF_WARPS, OF_ROW)
                if partial:
                    store_stats(partials + split, top, total, slots, c)
                else:
                    whole_top, whole_total, whole_acc = fold(whole_top, whole_total, whole_acc, top, total, acc)
                top, acc = nothing, nowhere
                sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
                split += 1
                next_begin += size

        if c.FUSED:
            highest = gl.maximum(top, gl.where(has_new, new_score, _NEGATIVE_INFINITY))
            finite = gl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
            weight = gl.where(has_new, gl.exp2(new_score - finite), 0.0)
            keep = gl.exp2(top - finite)
            rounded = weight.to(DTYPE).to(gl.float32)
            every_keep, acc = gl.broadcast(keep[None, :], acc)
            acc = gl.fma(acc, every_keep, new[:, None] * rounded[None, :])
            top = highest
        if c.KV_SCALES:
            acc *= v_scale
        # Outputs are on their way to memory while the warps' sums are added up.
        if some & partial:
            store_output(partials + split, acc, slots, dims, c)
        total = sum_over_warps(c, sums, OF_WARPS, OF_ROW)
        if c.FUSED:
            total = gl.fma(total, keep, weight)
        if some:
            if not partial:
                top, total, acc = fold(whole_top, whole_total, whole_acc, top, total, acc)
                finish(
                    gl.convert_layout(gl.permute(in_order(acc, c), (1, 0)), ROWS_OF),
                    gl.convert_layout(top, gl.SliceLayout(1, ROWS_OF)),
                    gl.convert_layout(total, gl.SliceLayout(1, ROWS_OF)), row64, head, query, dim, inside,
                    c.head_dim, c,
                )  # fmt: skip
            else:
                store_stats(partials + split, top, total, slots, c)
                count = last_split - first_split + 1
                arrived_ptr = c.counters + row64 * head_tiles + head_tile
                gl.thread_barrier()  # one thread counts for all
                arrived = gl.atomic_add(arrived_ptr, splits_here, sem="acq_rel", scope="gpu") + splits_here
                if arrived == count:
                    gl.store(arrived_ptr, 0)  # for the next launch
                    all_top, all_total, all_acc = merged_by_lanes(c, partials + first_split, count)
                    TURNED: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
                    kept = first_member + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, TURNED))
                    kept_dim = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, TURNED))
                    kept_in = (kept < query_rows)[:, None] & gl.max_constancy(kept_dim < c.head_dim, [4])[None, :]
                    finish(
                        gl.convert_layout(gl.permute(all_acc, (1, 0)), TURNED),
                        gl.convert_layout(all_top, gl.SliceLayout(1, TURNED)),
                        gl.convert_layout(all_total, gl.SliceLayout(1, TURNED)), row64,
                        kv_head * c.GROUP + kept % c.GROUP, kept // c.GROUP, kept_dim, kept_in, c.head_dim, c,
                    )  # fmt: skip


@gluon.jit
def sum_over_warps(c, sums, OF_WARPS: gl.constexpr, OF_ROW: gl.constexpr):
    """Sums of weights over keys, [BLOCK_M] in OF_ROW, in the order of gl.sum(sums, axis=0), which has three barriers.

    (Where the last ones may still be read Triton puts a barrier before the store, too.)
    """
    parts = gl.reshape(sums, [c.BLOCK_N // 64, 4, 16, c.BLOCK_M])
    of_warp = gl.sum(gl.reshape(gl.permute(parts, (1, 0, 2, 3)), [4, c.BLOCK_N // 4, c.BLOCK_M]), axis=1)
    c.totals.store(of_warp)
    gl.thread_barrier()
    pairs = gl.sum(gl.reshape(c.totals.load(OF_WARPS), [2, 2, c.BLOCK_M]), axis=0)
    return gl.convert_layout(gl.sum(pairs, axis=0), OF_ROW, assert_trivial=True)


@gluon.jit
def score_of_new(c, q, k_new, row64, end_cached, of_head, masked, OF_ROW: gl.constexpr):
    """The new token's scores, [BLOCK_M] in OF_ROW, as in split_kv_kernel. masked: where its mask is to be added."""
    products = q.to(gl.float64) * k_new.to(gl.float64)[None, :]
    score = gl.convert_layout(gl.sum(products, axis=1).to(gl.float32), OF_ROW) * c.scale_log2
    if c.HAS_MASK:
        at = c.mask + (row64 * c.stride_mask_row + end_cached) + of_head * c.stride_mask_head
        added = gl.load(at, mask=masked, other=0.0).to(gl.float32)
        score = gl.fma(added, gl.full([c.BLOCK_M], _LOG2E, gl.float32, OF_ROW), score)
    return score


@gluon.jit
def run(c, LOADER: gl.constexpr):
    """Start both partitions, while the launch before ends: that takes as long as asking for a row's length."""
    gl.warp_specialize([(consume, (c,)), (load_tiles, (c,))], [1], [LOADER])


@gluon.jit(
    do_not_specialize=[
        "num_rows", "num_queries", "num_heads", "num_kv_heads", "head_dim", "capacity", "block_size",
        "max_splits", "window", "half", "stride_table",
    ]
)  # fmt: skip
def stream_kernel(
    k_tiles, v_tiles, num_rows, lengths, finished, table, sinks, mask, q, k, v, k_scale, v_scale, qkv, bias, qkv_scale,
    rotary, shift, smooth, out, lse, part, stats, counters, num_queries, num_heads, num_kv_heads, head_dim, capacity,
    block_size, max_splits, window, half, scale_log2, softcap, out_scale, max_bound, min_bound, stride_q_row,
    stride_q_head, stride_q_query, stride_out_row, stride_out_head, stride_out_query, stride_k_block, stride_k_head,
    stride_k_key, stride_v_block, stride_v_head, stride_v_key, stride_mask_row, stride_mask_head, stride_table,
    GROUP: gl.constexpr, TILES: gl.constexpr, SPLIT: gl.constexpr, LOG_SMALLEST: gl.constexpr,
    LIMITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_H: gl.constexpr, STAGES: gl.constexpr, FLIGHT: gl.constexpr, PAGING: gl.constexpr,
    PAGE: gl.constexpr, ONE_QUERY: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_MASK: gl.constexpr, HAS_LSE: gl.constexpr, FUSED: gl.constexpr, HAS_FINISHED: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_QKV_SCALE: gl.constexpr, INTERLEAVED: gl.constexpr, IN_EIGHTS: gl.constexpr,
    HAS_SHIFT: gl.constexpr, HAS_SMOOTH: gl.constexpr, QUANTISED: gl.constexpr, HALF_AWAY: gl.constexpr,
    ROWS: gl.constexpr, UNROLL: gl.constexpr, WIDE: gl.constexpr, KV: gl.constexpr,
    KV_SCALES: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """One program: see the top of this file. Arguments: as split_kv_kernel's of the same names.

    k_tiles, v_tiles: descriptors [blocks, kv_heads, block_size, head_dim] of boxes [1, 1, BLOCK_N, BLOCK_D]. k_scale,
    v_scale: None without KV_SCALES.
    """
    BYTES: gl.constexpr = bytes_of_number(KV)
    RING: gl.constexpr = gl.NVMMASharedLayout(columns_across(KV, BLOCK_D) * BYTES, 8 * BYTES, rank=2)
    DTYPE: gl.constexpr = q.dtype.element_ty if KV else k_tiles.dtype
    k_ring = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, BLOCK_N, BLOCK_D], RING)
    v_ring = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, BLOCK_N, BLOCK_D], RING)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Where nothing is guessed no barrier for it: one without a wait would be taken for another's memory.
    GUESSES: gl.constexpr = PAGING == 0 and not FUSED
    sure = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()) if GUESSES else empty
    tops = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    totals = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    folds = gl.allocate_shared_memory(gl.float32, [UNROLL, BLOCK_H, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    weights = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    if GUESSES:
        mbarrier.init(sure.index(0), count=1)
    fence_async_shared()
    gl.thread_barrier()
    # Not assigned to a name first: constants would become values.
    run(Call(
        k_tiles, v_tiles, k_ring, v_ring, k_full, v_full, empty, sure, tops, totals, folds, weights, num_rows, lengths,
        finished, table, sinks, mask, q, k, v, k_scale, v_scale, qkv, bias, qkv_scale, rotary, shift, smooth, out, lse,
        part, stats, counters, num_queries, num_heads, num_kv_heads, head_dim, capacity, block_size, max_splits, window,
        half, scale_log2, softcap, out_scale, max_bound, min_bound, stride_q_row, stride_q_head, stride_q_query,
        stride_out_row, stride_out_head, stride_out_query, stride_k_block, stride_k_head, stride_k_key,
        stride_v_block, stride_v_head, stride_v_key, stride_mask_row, stride_mask_head, stride_table, GROUP,
        TILES, SPLIT, LOG_SMALLEST, LIMITS, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_H, STAGES, FLIGHT, PAGING, PAGE,
        ONE_QUERY, HAS_SOFTCAP, HAS_SINKS,
        HAS_MASK, HAS_LSE, FUSED, HAS_FINISHED, HAS_BIAS, HAS_QKV_SCALE, INTERLEAVED, IN_EIGHTS, HAS_SHIFT, HAS_SMOOTH,
        QUANTISED, HALF_AWAY, ROWS, UNROLL, WIDE, KV, KV_SCALES, GUESSES,
    ), LOADER)  # fmt: skip


install()  # the passes over this kernel's PTX: gpu/ptx/passes.py
