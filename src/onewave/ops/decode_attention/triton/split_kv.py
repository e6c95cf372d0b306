"""Split-KV decode attention in Triton, with the prologue and epilogue of masked multi-head attention.

Work. The visible keys of all rows lie in one list, and each program of a KV head takes an equal share of it, so a long
row keeps no SM waiting and a short one leaves none idle. Shares are found from the lengths on the device, whatever they
become between two replays of a graph. The query heads that share the KV head, times the query tokens, are one tile, so
keys and values are read once a group.

Bits. A row is cut into splits whose size depends on nothing but its own length (or the caller's split_size); tiles
start at a split's begin, and the splits' partial results are folded in order, with the same arithmetic whether one
program has all of the row or several do. A product that is not rounded before something is added to it is a tl.fma:
left to the compiler (enable_fp_fusion), kernels for one row and for many, and stream_impl's, could differ. A row's
result is batch-invariant.

A program streams BLOCK_N keys and values at a time through NUM_STAGES buffers of shared memory, from one split to the
next without a pause. Where it has only some of a row's splits it leaves partial results (maximum, sum, unnormalised
output) in float32, which stay in L2, and counts them; the program that counts the row's last one merges them all and
sets the count back to zero. A second kernel that merges cost a launch more (docs/log/decode-attention.md). From one row
to the next the buffers run empty; on sm_90 the first keys of the next row are therefore asked for, into L2, while the
last tiles of this one are worked on, so that the memory has something to do meanwhile.

Masked multi-head attention (FUSED): each program computes the group's queries from the fused projection itself; the
program that has the last split appends the new key and value and attends to them from registers. All programs read
them, since a load that waited for the row's length would come too late.

Roofline: the bytes of keys and values, each read once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from onewave.ops.decode_attention.triton.merge import finish, fold, merged, store_output, store_stats
from onewave.ops.decode_attention.triton.projection import projected_row, row_loads
from onewave.ops.decode_attention.triton.shares import (
    ask_for,
    part_of_row,
    row_lengths,
    row_starts,
    rows_of_share,
    start_of_row,
)

_LOG2E = tl.constexpr(1.4426950408889634)
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def split_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    finished_ptr,
    table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    mask_ptr,
    qkv_ptr,
    bias_ptr,
    qkv_scale_ptr,
    rotary_ptr,
    shift_ptr,
    smooth_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    stats_ptr,
    counters_ptr,
    num_queries,
    num_heads,
    num_kv_heads,
    head_dim,
    capacity,
    block_size,
    max_splits,
    num_rows,
    window,
    target,
    half,
    scale_log2,
    softcap,
    out_scale,
    max_bound,
    min_bound,
    stride_q_row,
    stride_q_head,
    stride_q_query,
    stride_out_row,
    stride_out_head,
    stride_out_query,
    stride_k_block,
    stride_k_head,
    stride_k_key,
    stride_k_chunk,
    stride_v_block,
    stride_v_head,
    stride_v_key,
    stride_mask_row,
    stride_mask_head,
    stride_table,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    LOG_SMALLEST: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGING: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    KV_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FUSED: tl.constexpr,
    HAS_FINISHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_QKV_SCALE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_EIGHTS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    QUANTISED: tl.constexpr,
    HALF_AWAY: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    TRIGGER: tl.constexpr,
    UNROLL: tl.constexpr,
    UNIT: tl.constexpr,
    AXIS: tl.constexpr,
):
    """GROUP: query heads of a KV head, TILES: tiles of its query rows; constants, since a program that began with
    divisions would ask for its keys later. CHUNK: elements of K that lie together: head_dim, or the packed layout's x.
    PAGING: 0 a row is a block, 1 one block a row by the table, 2 blocks hold a multiple of BLOCK_N keys, 3 any block
    size. UNIT: elements that head_dim and the strides of K and V are counted in. AXIS: gpu/grid.py. See the module.
    """
    share, head_tile = tl.program_id(AXIS), tl.program_id(1 - AXIS)
    num_shares, head_tiles = tl.num_programs(AXIS), tl.num_programs(1 - AXIS)
    extra: tl.constexpr = 1 if FUSED else 0  # the new token
    tile_rows = GROUP * num_queries
    kv_head, tile = head_tile // TILES, head_tile % TILES
    kv_head64 = kv_head.to(tl.int64)
    # Multiplied last, so that Triton knows what they are multiples of: copies of whole pieces hang on it.
    k_head, v_head = k_ptr + kv_head64 * stride_k_head * UNIT, v_ptr + kv_head64 * stride_v_head * UNIT
    head_dim *= UNIT
    item: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    if PDL:
        cuda.gdc_wait()
    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    head, query = kv_head * GROUP + member % GROUP, member // GROUP
    real = member < tile_rows
    slots, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_head = dim < head_dim
    inside = real[:, None] & in_head[None, :]
    chunk_at = (dim // CHUNK if NARROW else (dim // CHUNK).to(tl.int64)) * stride_k_chunk * UNIT + dim % CHUNK
    score_scale, v_scale = scale_log2, 1.0
    if KV_SCALES:
        score_scale, v_scale = scale_log2 * tl.load(k_scale_ptr + kv_head), tl.load(v_scale_ptr + kv_head)
    empty, nowhere = tl.full([BLOCK_M], _NEGATIVE_INFINITY, tl.float32), tl.zeros([BLOCK_D, BLOCK_M], tl.float32)

    if ROWS == 1:
        # Asked for before the length: without the barrier ptxas waits for the length first.
        only_loads = row_loads(
            q_ptr, qkv_ptr, bias_ptr, qkv_scale_ptr, rotary_ptr, tl.cast(0, tl.int64), head, query, kv_head, dim,
            inside, in_head, num_heads, num_kv_heads, head_dim, half, stride_q_row, stride_q_head, stride_q_query,
            FUSED, HAS_BIAS, HAS_QKV_SCALE, INTERLEAVED, IN_EIGHTS,
        )  # fmt: skip
        tl.debug_barrier()
    if MANY:  # more rows than a program wants to look at: each is one share
        first_row, last_row, share_begin, share_end, starts = share, share, share, share, share
    else:
        starts, ends = row_starts(
            lengths_ptr, finished_ptr, num_rows, extra, capacity, window, num_queries, SPLIT, LOG_SMALLEST, DOUBLINGS,
            target, tl.arange(0, ROWS), WIDE, HAS_FINISHED,
        )  # fmt: skip
        first_row, last_row, share_begin, share_end = rows_of_share(share, num_shares, starts, ends)
        if ROWS == 1:  # known before the length is
            first_row, last_row = 0, 0

    for row in tl.range(first_row, last_row + 1, disable_licm=True):
        row64 = tl.cast(row, tl.int64)  # the interpreter's row is an int
        length = row_lengths(lengths_ptr, finished_ptr, row64, row64 >= 0, extra, capacity, HAS_FINISHED)
        if ROWS == 1:
            loads = only_loads
        else:
            loads = row_loads(
                q_ptr, qkv_ptr, bias_ptr, qkv_scale_ptr, rotary_ptr, row64, head, query, kv_head, dim, inside, in_head,
                num_heads, num_kv_heads, head_dim, half, stride_q_row, stride_q_head, stride_q_query, FUSED, HAS_BIAS,
                HAS_QKV_SCALE, INTERLEAVED, IN_EIGHTS,
            )  # fmt: skip
        row_at = share if MANY else start_of_row(row, tl.arange(0, ROWS), starts)
        first_key, size, first_split, last_split, split, last_here, begin = part_of_row(
            row_at, length, share_begin, share_end, window, num_queries, SPLIT, LOG_SMALLEST, DOUBLINGS, target,
            BLOCK_N, MANY,
        )  # fmt: skip
        some = split <= last_here
        whole = (split == first_split) & (last_here == last_split)
        splits_here = last_here - split + 1
        partials = (row64 * head_tiles + head_tile) * max_splits - first_split

        # With FUSED the last key is not in the cache yet.
        end_cached = length - extra
        limit = length - (num_queries - 1) + query
        end = tl.where(some, tl.minimum((last_here + 1) * size, end_cached), begin)
        next_begin = (split + 1) * size
        block = row64
        if PAGING == 1:
            block = tl.load(table_ptr + row64 * stride_table).to(tl.int64)
        q = loads
        if FUSED:
            # Every program reads the new key and value, so that no load waits for the length.
            q, k_new, v_new = projected_row(loads, k_ptr.dtype.element_ty, HAS_BIAS, HAS_QKV_SCALE)
            has_new = some & (last_here == last_split)
            v_new = tl.where(has_new, v_new, 0.0)
            if has_new & (tile == 0):
                new_k = k_head + (block * stride_k_block + tl.cast(end_cached, tl.int64) * stride_k_key) * UNIT
                new_v = v_head + (block * stride_v_block + tl.cast(end_cached, tl.int64) * stride_v_key) * UNIT
                tl.store(new_k + chunk_at, k_new, mask=in_head)
                tl.store(new_v + dim, v_new.to(v_ptr.dtype.element_ty), mask=in_head)
            # In float64, where the order of the additions, which is the compiler's to choose, does not show.
            products = q.to(tl.float64) * k_new.to(tl.float64)[None, :]
            new_score = tl.sum(products, axis=1).to(tl.float32) * score_scale
            if HAS_MASK:
                new_mask = mask_ptr + row64 * stride_mask_row + head.to(tl.int64) * stride_mask_head + end_cached
                new_added = tl.load(new_mask, mask=real & has_new, other=0.0).to(tl.float32)
                new_score = tl.fma(new_added, tl.full(new_score.shape, _LOG2E, tl.float32), new_score)
        if AHEAD > 0:  # where the program's next row begins and ends
            next_length = row_lengths(
                lengths_ptr, finished_ptr, row64 + 1, row < last_row, extra, capacity, HAS_FINISHED
            )
            _, _, _, _, _, _, next_key = part_of_row(
                row_at, next_length, share_begin, share_end, window, num_queries, SPLIT, LOG_SMALLEST, DOUBLINGS,
                target, BLOCK_N, True,
            )  # fmt: skip
            next_end = next_length - extra
            next_block = row64 + 1
            if PAGING == 1:
                next_block = tl.load(table_ptr + next_block * stride_table, mask=row < last_row, other=0).to(tl.int64)
            next_k = (k_head + next_block * stride_k_block * UNIT).to(tl.int64)
            next_v = (v_head + next_block * stride_v_block * UNIT).to(tl.int64)
            # Its first tile is due AHEAD keys before the end of this row's last tile.
            next_due = next_key + AHEAD - (begin + tl.cdiv(end - begin, BLOCK_N) * BLOCK_N)

        # Keys are the tall side of both products, S^T = K q^T and O^T = V^T P^T, so that the few query rows fill the
        # short side of a matrix instruction and not a sixteenth of its tall side.
        q_t = tl.trans(q)
        whole_top, whole_total, whole_acc = empty, tl.zeros([BLOCK_M], tl.float32), nowhere
        top, acc = empty, nowhere
        # Sums stay apart for each key of the tile: adding over keys crosses warps, and once at the end is enough.
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
            if PDL:
                if (row == last_row) & (start + TRIGGER >= end):
                    cuda.gdc_launch_dependents()
            if AHEAD > 0:
                due = next_due + start
                if (due >= next_key) & (due < next_end):
                    ask_for(
                        next_k, next_v, stride_k_key * UNIT * item, stride_v_key * UNIT * item, due,
                        tl.minimum(due + BLOCK_N, next_end), head_dim * item, AT_ONCE,
                    )  # fmt: skip
            key = start + tl.arange(0, BLOCK_N)
            present = (key >= first_key) & (key < end)
            # Where a block's elements can be counted in 32 bits only its begin needs 64.
            within = key
            if PAGING <= 1:
                k_block, v_block = k_head + block * stride_k_block * UNIT, v_head + block * stride_v_block * UNIT
            elif PAGING == 2:
                page = tl.load(table_ptr + row64 * stride_table + start // block_size).to(tl.int64)
                k_block, v_block = k_head + page * stride_k_block * UNIT, v_head + page * stride_v_block * UNIT
                within = start % block_size + tl.arange(0, BLOCK_N)
            else:
                pages = tl.load(table_ptr + row64 * stride_table + key // block_size, mask=present, other=0)
                k_block = k_head + (pages.to(tl.int64) * stride_k_block * UNIT)[:, None]
                v_block = v_head + (pages.to(tl.int64) * stride_v_block * UNIT)[None, :]
                within = key % block_size
            if not NARROW:
                within = within.to(tl.int64)
            loaded = present[:, None] & in_head[None, :]
            k_at = (within * stride_k_key * UNIT)[:, None] + chunk_at[None, :]
            k = tl.load(k_block + k_at, mask=loaded, other=0.0)
            loaded_t = present[None, :] & in_head[:, None]
            v_at = (within * stride_v_key * UNIT)[None, :] + dim[:, None]
            v_t = tl.load(v_block + v_at, mask=loaded_t, other=0.0)
            if HAS_MASK:
                # Before the product: a 16-bit mask loaded after it draws the scores, and the order in which they are
                # summed, out of the product's layout.
                mask_at = row64 * stride_mask_row + head.to(tl.int64)[None, :] * stride_mask_head + key[:, None]
                added = tl.load(mask_ptr + mask_at, mask=real[None, :] & present[:, None], other=0.0)
            scores = tl.dot(k.to(q.dtype), q_t, input_precision="ieee") * score_scale
            if HAS_SOFTCAP:
                # softcap is in units of log2, as the scores are; tanh(x) = 1 - 2 / (e^2x + 1).
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores / softcap * (2.0 * _LOG2E)) + 1.0))
            if HAS_MASK:
                scores = tl.fma(added.to(tl.float32), tl.full(scores.shape, _LOG2E, tl.float32), scores)
            visible = present[:, None]
            if not ONE_QUERY:  # each sees one key more than the one before
                visible = visible & (key[:, None] < limit[None, :]) & (key[:, None] >= (limit - window)[None, :])
            scores = tl.where(visible, scores, _NEGATIVE_INFINITY)
            highest = tl.maximum(top, tl.max(scores, axis=0))
            # A row may see nothing of this tile: -inf - -inf would be NaN.
            finite = tl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
            weight = tl.exp2(scores - finite[None, :])
            keep = tl.exp2(top - finite)
            sums = tl.fma(sums, tl.broadcast_to(keep[None, :], sums.shape), weight)
            acc = tl.dot(v_t.to(q.dtype), weight.to(q.dtype), acc * keep[None, :], input_precision="ieee")
            top = highest
            if (start + BLOCK_N >= next_begin) & (split < last_here):
                # The next split begins with nothing from this one; its loads are under way.
                acc, total = acc * v_scale, tl.sum(sums, axis=0)
                if whole:
                    whole_top, whole_total, whole_acc = fold(whole_top, whole_total, whole_acc, top, total, acc)
                else:
                    store_output(part_ptr, partials + split, acc, slots, dim, BLOCK_H, BLOCK_D)
                    store_stats(stats_ptr, partials + split, top, total, slots, BLOCK_H)
                top, acc = empty, nowhere
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                split += 1
                next_begin += size

        total = tl.sum(sums, axis=0)
        if FUSED:
            highest = tl.maximum(top, tl.where(has_new, new_score, _NEGATIVE_INFINITY))
            finite = tl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
            weight = tl.where(has_new, tl.exp2(new_score - finite), 0.0)
            keep = tl.exp2(top - finite)
            total = tl.fma(total, keep, weight)
            rounded, new = weight.to(q.dtype).to(tl.float32), v_new.to(v_ptr.dtype.element_ty).to(tl.float32)
            acc = tl.fma(acc, tl.broadcast_to(keep[None, :], acc.shape), new[:, None] * rounded[None, :])
            top = highest
        acc *= v_scale
        if some:
            if whole:
                top, total, acc = fold(whole_top, whole_total, whole_acc, top, total, acc)
                finish(
                    tl.trans(acc), top, total, row64, head, query, dim, inside, out_ptr, lse_ptr, sinks_ptr, shift_ptr,
                    smooth_ptr, stride_out_row, stride_out_head, stride_out_query, num_heads, num_queries, head_dim,
                    out_scale, max_bound, min_bound, HAS_SINKS, HAS_LSE, HAS_SHIFT, HAS_SMOOTH, QUANTISED, HALF_AWAY,
                )  # fmt: skip
            else:
                store_output(part_ptr, partials + split, acc, slots, dim, BLOCK_H, BLOCK_D)
                store_stats(stats_ptr, partials + split, top, total, slots, BLOCK_H)
                count = last_split - first_split + 1
                arrived_ptr = counters_ptr + row64 * head_tiles + head_tile
                tl.debug_barrier()  # one thread counts for all
                arrived = tl.atomic_add(arrived_ptr, splits_here, sem="acq_rel", scope="gpu") + splits_here
                if arrived == count:
                    tl.store(arrived_ptr, 0)  # for the next launch
                    slot = tl.arange(0, BLOCK_H)
                    kept = tile * BLOCK_M + slot
                    kept_in = (kept < tile_rows)[:, None] & in_head[None, :]
                    all_top, all_total, all_acc = merged(
                        part_ptr, stats_ptr, partials + first_split, slot, dim, count, BLOCK_H, BLOCK_D, UNROLL
                    )
                    finish(
                        tl.trans(all_acc), all_top, all_total, row64, kv_head * GROUP + kept % GROUP, kept // GROUP,
                        dim, kept_in, out_ptr, lse_ptr, sinks_ptr, shift_ptr, smooth_ptr, stride_out_row,
                        stride_out_head, stride_out_query, num_heads, num_queries, head_dim, out_scale, max_bound,
                        min_bound, HAS_SINKS, HAS_LSE, HAS_SHIFT, HAS_SMOOTH, QUANTISED, HALF_AWAY,
                    )  # fmt: skip
