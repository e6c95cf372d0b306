"""Split-KV decode attention in Triton, with the prologue and epilogue of masked multi-head attention.

Work. The visible keys of all rows lie in one list, and each program of a KV head takes an equal share of it, so a long
row keeps no SM waiting and a short one leaves none idle. Shares are found from the lengths on the device, whatever they
become between two replays of a graph. The query heads that share the KV head, times the query tokens, are one tile, so
keys and values are read once a group.

Bits. A row is cut into splits whose size depends on nothing but its own length (or the caller's split_size); tiles
start at a split's begin, and the splits' partial results are folded in order: by the program that has all of the row,
else by a second kernel with the same arithmetic. A row's result does not see its batch.

A program streams BLOCK_N keys and values at a time through NUM_STAGES buffers of shared memory, from one split to the
next without a pause, and leaves partial results (maximum, sum, unnormalised output) in float32, which stay in L2. The
second kernel is launched as a dependent of the first, so that its start is hidden; merging in the last program to
arrive was slower (docs/log.md).

Masked multi-head attention (FUSED): each program computes the group's queries from the fused projection itself; the
program that has the last split also computes the new key and value, attends to them from registers and appends them.

Roofline: the bytes of keys and values, each read once.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# (Triton ships no type information.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from onewave.ops.decode_attention.merge_impl import finish, fold, row_starts, splits, store_partial
from onewave.ops.decode_attention.projection_impl import projected, rotated

__all__ = ["split_kv_kernel"]

_LOG2E = tl.constexpr(1.4426950408889634)
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def split_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
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
    SPLIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGING: tl.constexpr,
    KV_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FUSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_QKV_SCALE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    QUANTISED: tl.constexpr,
    HALF_AWAY: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """CHUNK: elements of K that lie together: head_dim, or the packed layout's x. PAGING: 0 a row is a block, 1 one
    block a row by the table, 2 blocks hold a multiple of BLOCK_N keys, 3 any block size. See the module for the rest.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    share, head_tile = tl.program_id(0), tl.program_id(1)
    num_shares, head_tiles = tl.num_programs(0), tl.num_programs(1)
    extra: tl.constexpr = 1 if FUSED else 0  # the new token
    group = num_heads // num_kv_heads
    tile_rows = group * num_queries
    tiles = tl.cdiv(tile_rows, BLOCK_M)
    kv_head, tile = head_tile // tiles, head_tile % tiles
    kv_head64 = kv_head.to(tl.int64)
    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    head, query = kv_head * group + member % group, member // group
    real = member < tile_rows
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < head_dim
    inside = real[:, None] & in_head[None, :]
    chunk_at = (dim // CHUNK).to(tl.int64) * stride_k_chunk + dim % CHUNK
    k_head, v_head = k_ptr + kv_head64 * stride_k_head, v_ptr + kv_head64 * stride_v_head
    score_scale, v_scale = scale_log2, 1.0
    if KV_SCALES:
        score_scale, v_scale = scale_log2 * tl.load(k_scale_ptr + kv_head), tl.load(v_scale_ptr + kv_head)
    empty, nowhere = tl.full([BLOCK_M], _NEGATIVE_INFINITY, tl.float32), tl.zeros([BLOCK_D, BLOCK_M], tl.float32)

    if MANY:  # more rows than a program wants to look at: each is one share
        first_row, last_row = share, share
    else:
        starts, ends = row_starts(
            lengths_ptr, num_rows, extra, capacity, window, num_queries, SPLIT, SMALLEST, DOUBLINGS, target, ROWS
        )
        keys = tl.max(ends, axis=0)
        share_begin, share_end = tl.cdiv(share * keys, num_shares), tl.cdiv((share + 1) * keys, num_shares)
        first_row = tl.sum((ends <= share_begin).to(tl.int32), axis=0)
        last_row = tl.sum((starts < share_end).to(tl.int32), axis=0) - 1

    for row in range(first_row, last_row + 1):
        row64 = tl.cast(row, tl.int64)  # the interpreter's row is an int
        length = tl.load(lengths_ptr + row).to(tl.int32)
        if FUSED:
            qkv_row = row64 * (num_heads + 2 * num_kv_heads) * head_dim
            q = rotated(
                qkv_ptr, bias_ptr, qkv_scale_ptr, rotary_ptr, qkv_row, row64, head[:, None], dim[None, :], inside,
                head_dim, half, HAS_BIAS, HAS_QKV_SCALE, INTERLEAVED,
            ).to(k_ptr.dtype.element_ty)  # fmt: skip
        else:
            q_at = row64 * stride_q_row + head.to(tl.int64) * stride_q_head + query * stride_q_query
            q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=inside, other=0.0)
        # A length beyond the cache would read what is not there.
        length = tl.where(length < 0, -1, tl.minimum(length + extra, capacity))
        first_key, size, first_split, count = splits(length, window, num_queries, SPLIT, SMALLEST, DOUBLINGS, target)
        last_split = first_split + count - 1
        if MANY:
            split, last_here = first_split, last_split
        else:
            # The splits that begin in this share.
            row_at = tl.sum(tl.where(tl.arange(0, ROWS) == row, starts, 0), axis=0)
            split = first_split + tl.cdiv(tl.maximum(share_begin - row_at, 0), size).to(tl.int32)
            last_here = tl.minimum(first_split + tl.cdiv(share_end - row_at, size).to(tl.int32) - 1, last_split)
        some = split <= last_here
        whole = (split == first_split) & (last_here == last_split)
        partials = (row64 * head_tiles + head_tile) * max_splits - first_split

        # With FUSED the last key is not in the cache yet.
        end_cached = length - extra
        limit = length - (num_queries - 1) + query
        begin = split * size
        end = tl.where(some, tl.minimum((last_here + 1) * size, end_cached), begin)
        next_begin = begin + size
        # Tiles wholly before the window are skipped; the others stay where the split's begin puts them.
        begin += tl.maximum(first_key - begin, 0) // BLOCK_N * BLOCK_N
        block = row64
        if PAGING == 1:
            block = tl.load(table_ptr + row64 * stride_table).to(tl.int64)

        # Keys are the tall side of both products, S^T = K q^T and O^T = V^T P^T, so that the few query rows fill the
        # short side of a matrix instruction and not a sixteenth of its tall side.
        q_t = tl.trans(q)
        whole_top, whole_total, whole_acc = empty, tl.zeros([BLOCK_M], tl.float32), nowhere
        top, acc = empty, nowhere
        # Sums stay apart for each key of the tile: adding over keys crosses warps, and once at the end is enough.
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
            key = start + tl.arange(0, BLOCK_N)
            present = (key >= first_key) & (key < end)
            if PAGING <= 1:
                k_at = block * stride_k_block + key.to(tl.int64) * stride_k_key
                v_at = block * stride_v_block + key.to(tl.int64) * stride_v_key
            elif PAGING == 2:
                page = tl.load(table_ptr + row64 * stride_table + start // block_size).to(tl.int64)
                within = (start % block_size + tl.arange(0, BLOCK_N)).to(tl.int64)
                k_at, v_at = (
                    page * stride_k_block + within * stride_k_key,
                    page * stride_v_block + within * stride_v_key,
                )
            else:
                pages = tl.load(table_ptr + row64 * stride_table + key // block_size, mask=present, other=0).to(
                    tl.int64
                )
                within = (key % block_size).to(tl.int64)
                k_at, v_at = (
                    pages * stride_k_block + within * stride_k_key,
                    pages * stride_v_block + within * stride_v_key,
                )
            loaded = present[:, None] & in_head[None, :]
            k = tl.load(k_head + k_at[:, None] + chunk_at[None, :], mask=loaded, other=0.0)
            v_t = tl.load(v_head + v_at[None, :] + dim[:, None], mask=present[None, :] & in_head[:, None], other=0.0)
            scores = tl.dot(k.to(q.dtype), q_t, input_precision="ieee") * score_scale
            if HAS_SOFTCAP:
                # softcap is in units of log2, as the scores are; tanh(x) = 1 - 2 / (e^2x + 1).
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores / softcap * (2.0 * _LOG2E)) + 1.0))
            if HAS_MASK:
                mask_at = row64 * stride_mask_row + head.to(tl.int64)[None, :] * stride_mask_head + key[:, None]
                added = tl.load(mask_ptr + mask_at, mask=real[None, :] & present[:, None], other=0.0)
                scores += added.to(tl.float32) * _LOG2E
            visible = present[:, None] & (key[:, None] < limit[None, :]) & (key[:, None] >= (limit - window)[None, :])
            scores = tl.where(visible, scores, _NEGATIVE_INFINITY)
            highest = tl.maximum(top, tl.max(scores, axis=0))
            # A row may see nothing of this tile: -inf - -inf would be NaN.
            finite = tl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
            weight = tl.exp2(scores - finite[None, :])
            keep = tl.exp2(top - finite)
            sums = sums * keep[None, :] + weight
            acc = tl.dot(v_t.to(q.dtype), weight.to(q.dtype), acc * keep[None, :], input_precision="ieee")
            top = highest
            if (start + BLOCK_N >= next_begin) & (split < last_here):
                # The next split begins with nothing from this one; its loads are under way.
                acc, total = acc * v_scale, tl.sum(sums, axis=0)
                if whole:
                    whole_top, whole_total, whole_acc = fold(whole_top, whole_total, whole_acc, top, total, acc)
                else:
                    store_partial(part_ptr, stats_ptr, partials + split, top, total, acc, BLOCK_M, BLOCK_H, BLOCK_D)
                top, acc = empty, nowhere
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                split += 1
                next_begin += size

        total = tl.sum(sums, axis=0)
        if FUSED:  # noqa: SIM102 - the first is known when compiling
            if some & (last_here == last_split):
                key_index = end_cached
                k_new = rotated(
                    qkv_ptr, bias_ptr, qkv_scale_ptr, rotary_ptr, qkv_row, row64, num_heads + kv_head, dim, in_head,
                    head_dim, half, HAS_BIAS, HAS_QKV_SCALE, INTERLEAVED,
                ).to(k_ptr.dtype.element_ty)  # fmt: skip
                v_new = projected(
                    qkv_ptr, bias_ptr, qkv_scale_ptr, qkv_row, num_heads + num_kv_heads + kv_head, dim, in_head,
                    head_dim, HAS_BIAS, HAS_QKV_SCALE,
                ).to(v_ptr.dtype.element_ty)  # fmt: skip
                if tile == 0:
                    k_at = block * stride_k_block + tl.cast(key_index, tl.int64) * stride_k_key
                    v_at = block * stride_v_block + tl.cast(key_index, tl.int64) * stride_v_key
                    tl.store(k_head + k_at + chunk_at, k_new, mask=in_head)
                    tl.store(v_head + v_at + dim, v_new, mask=in_head)
                score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * score_scale
                if HAS_MASK:
                    mask_at = mask_ptr + row64 * stride_mask_row + head.to(tl.int64) * stride_mask_head + key_index
                    score += tl.load(mask_at, mask=real, other=0.0).to(tl.float32) * _LOG2E
                highest = tl.maximum(top, score)
                finite = tl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
                weight = tl.exp2(score - finite)
                keep = tl.exp2(top - finite)
                total = total * keep + weight
                rounded = weight.to(q.dtype).to(tl.float32)
                acc = acc * keep[None, :] + v_new.to(tl.float32)[:, None] * rounded[None, :]
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
                store_partial(part_ptr, stats_ptr, partials + split, top, total, acc, BLOCK_M, BLOCK_H, BLOCK_D)
