"""Split-KV decode attention in Triton, with the prologue and epilogue of masked multi-head attention.

Work. The visible keys of all rows lie in one list, and each program of a KV head takes an equal share of it, so a long
row keeps no SM waiting and a short one leaves none idle. Shares are found from the lengths on the device, whatever they
become between two replays of a graph. The query heads that share the KV head, times the query tokens, are one tile, so
keys and values are read once a group.

Bits. A row is cut into splits whose size depends on nothing but its own length (or the caller's split_size); tiles
start at a split's begin, and the splits' partial results are folded in order, with the same arithmetic whether one
program has all of the row or several do. A product that is not rounded before something is added to it is a tl.fma:
left to the compiler (enable_fp_fusion), kernels for one row and for many, and Hopper's, could differ. A row's
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

constexpr    meaning [unit] (allowed values)
GROUP        query heads of a KV head; a constant, since a program that began with divisions would ask for keys later
TILES        tiles of a KV head's query rows
SPLIT        keys of a split (whole tiles of 64 or 128; 0: by the row's length)
LOG_SMALLEST log2 of the smallest split's keys
LIMITS       splits of a row up to which a size will do, of each size but the largest; each is twice the one before
BLOCK_M      query rows of a tile (8, 16, 32)
BLOCK_N      keys of a tile (64, 128; 16 where strides are no multiples of 8 elements)
BLOCK_D      head_dim, padded (a power of two from 16 to 256)
BLOCK_H      query rows of a tile that a partial result keeps (a power of two up to BLOCK_M)
NUM_STAGES   tiles of keys and values in shared memory (1 to 4)
CHUNK        elements of a key that lie together (head_dim, or the packed layout's x)
PAGING       how a key's block is found (0: a row is a block, 1: one block a row by the table, 2: blocks hold a multiple
             of BLOCK_N keys, 3: any block size)
ONE_QUERY    whether rows have one query token (False, True)
KV_SCALES    whether keys and values have scales (False, True)
HAS_..       whether there is a soft cap, sinks, a mask, an LSE to write, finished rows, a bias, scales of the
             projection, a shift, a smoothing (False, True)
FUSED        whether the prologue and epilogue of masked multi-head attention run (False, True)
INTERLEAVED  whether rotary pairs are neighbours, or halves apart (True, False)
IN_EIGHTS    whether pairs are halves apart and `half` is a multiple of 8 (False, True)
QUANTISED    whether the output is int8 (False, True)
HALF_AWAY    how that is rounded (False: half to even, True: half away from zero)
ROWS         rows whose lengths a program looks at, padded (a power of two up to 256)
MANY         whether there are more than 256 rows: then each is a share (False, True)
PDL          whether launches overlap (programmatic dependent launch; False, True)
AHEAD        keys of the next row that are asked for before they are due (0: none)
AT_ONCE      keys that one request to L2 takes (1, 8; 0 where AHEAD is 0)
WIDE         whether the keys of all rows are counted in 64 bits (False, True)
NARROW       whether 32 bits count the elements of a head in a block (False, True)
TRIGGER      keys before the program's end at which the next kernel may be launched
UNROLL       partial results that are loaded at a time to be merged (a power of two up to 16; 32 on Hopper)
UNIT         unit of head_dim and of the strides of K and V [elements] (1, 8)
AXIS         the grid's axis of shares (gpu/grid.py)
"""

from __future__ import annotations

from collections import namedtuple

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


class Call(namedtuple("Call", (
    "q k v lengths finished table k_scale v_scale sinks mask qkv bias qkv_scale rotary shift smooth out lse part "
    "stats counters num_queries num_heads num_kv_heads head_dim capacity block_size max_splits num_rows window "
    "half scale_log2 softcap out_scale max_bound min_bound stride_q_row stride_q_head stride_q_query stride_out_row "
    "stride_out_head stride_out_query stride_k_block stride_k_head stride_k_key stride_k_chunk stride_v_block "
    "stride_v_head stride_v_key stride_mask_row stride_mask_head stride_table GROUP TILES SPLIT LOG_SMALLEST "
    "LIMITS BLOCK_M BLOCK_N BLOCK_D BLOCK_H NUM_STAGES CHUNK PAGING ONE_QUERY KV_SCALES HAS_SOFTCAP HAS_SINKS "
    "HAS_MASK HAS_LSE FUSED HAS_FINISHED HAS_BIAS HAS_QKV_SCALE INTERLEAVED IN_EIGHTS HAS_SHIFT HAS_SMOOTH QUANTISED "
    "HALF_AWAY ROWS MANY PDL AHEAD AT_ONCE WIDE NARROW TRIGGER UNROLL UNIT AXIS"
))):  # fmt: skip
    """The arguments of a launch, by the kernel's names."""


@triton.jit
def split_kv_kernel(
    q, k, v, lengths, finished, table, k_scale, v_scale, sinks, mask, qkv, bias, qkv_scale, rotary, shift, smooth, out,
    lse, part, stats, counters, num_queries, num_heads, num_kv_heads, head_dim, capacity, block_size, max_splits,
    num_rows, window, half, scale_log2, softcap, out_scale, max_bound, min_bound, stride_q_row, stride_q_head,
    stride_q_query, stride_out_row, stride_out_head, stride_out_query, stride_k_block, stride_k_head, stride_k_key,
    stride_k_chunk, stride_v_block, stride_v_head, stride_v_key, stride_mask_row, stride_mask_head, stride_table,
    GROUP: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, LOG_SMALLEST: tl.constexpr, LIMITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr, CHUNK: tl.constexpr, PAGING: tl.constexpr, ONE_QUERY: tl.constexpr,
    KV_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_LSE: tl.constexpr, FUSED: tl.constexpr, HAS_FINISHED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_QKV_SCALE: tl.constexpr, INTERLEAVED: tl.constexpr, IN_EIGHTS: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_SMOOTH: tl.constexpr, QUANTISED: tl.constexpr, HALF_AWAY: tl.constexpr, ROWS: tl.constexpr, MANY: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, AT_ONCE: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
    TRIGGER: tl.constexpr, UNROLL: tl.constexpr, UNIT: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """One program: see the top of this file."""
    # Not assigned to a name first: constants would become values.
    attend_rows(Call(
        q, k, v, lengths, finished, table, k_scale, v_scale, sinks, mask, qkv, bias, qkv_scale, rotary, shift, smooth,
        out, lse, part, stats, counters, num_queries, num_heads, num_kv_heads, head_dim, capacity, block_size,
        max_splits, num_rows, window, half, scale_log2, softcap, out_scale, max_bound, min_bound, stride_q_row,
        stride_q_head, stride_q_query, stride_out_row, stride_out_head, stride_out_query, stride_k_block, stride_k_head,
        stride_k_key, stride_k_chunk, stride_v_block, stride_v_head, stride_v_key, stride_mask_row, stride_mask_head,
        stride_table, GROUP, TILES, SPLIT, LOG_SMALLEST, LIMITS, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_H, NUM_STAGES,
        CHUNK, PAGING, ONE_QUERY, KV_SCALES, HAS_SOFTCAP, HAS_SINKS, HAS_MASK, HAS_LSE, FUSED, HAS_FINISHED, HAS_BIAS,
        HAS_QKV_SCALE, INTERLEAVED, IN_EIGHTS, HAS_SHIFT, HAS_SMOOTH, QUANTISED, HALF_AWAY, ROWS, MANY, PDL, AHEAD,
        AT_ONCE, WIDE, NARROW, TRIGGER, UNROLL, UNIT, AXIS,
    ))  # fmt: skip


@triton.jit
def attend_rows(c):
    """The rows of a program's share, one after another."""
    share, head_tile = tl.program_id(c.AXIS), tl.program_id(1 - c.AXIS)
    num_shares, head_tiles = tl.num_programs(c.AXIS), tl.num_programs(1 - c.AXIS)
    extra: tl.constexpr = 1 if c.FUSED else 0  # the new token
    tile_rows = c.GROUP * c.num_queries
    kv_head, tile = head_tile // c.TILES, head_tile % c.TILES
    kv_head64 = kv_head.to(tl.int64)
    # Multiplied last, so that Triton knows what they are multiples of: copies of whole pieces hang on it.
    k_head, v_head = c.k + kv_head64 * c.stride_k_head * c.UNIT, c.v + kv_head64 * c.stride_v_head * c.UNIT
    head_dim = c.head_dim * c.UNIT
    item: tl.constexpr = c.k.dtype.element_ty.primitive_bitwidth // 8
    if c.PDL:
        cuda.gdc_wait()
    member = tile * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    head, query = kv_head * c.GROUP + member % c.GROUP, member // c.GROUP
    real = member < tile_rows
    slots, dim = tl.arange(0, c.BLOCK_M), tl.arange(0, c.BLOCK_D)
    in_head = dim < head_dim
    inside = real[:, None] & in_head[None, :]
    chunk = dim // c.CHUNK if c.NARROW else (dim // c.CHUNK).to(tl.int64)
    chunk_at = chunk * c.stride_k_chunk * c.UNIT + dim % c.CHUNK
    score_scale, v_scale = c.scale_log2, 1.0
    if c.KV_SCALES:
        score_scale, v_scale = c.scale_log2 * tl.load(c.k_scale + kv_head), tl.load(c.v_scale + kv_head)
    empty, nowhere = tl.full([c.BLOCK_M], _NEGATIVE_INFINITY, tl.float32), tl.zeros([c.BLOCK_D, c.BLOCK_M], tl.float32)

    if c.ROWS == 1:
        # Asked for before the length: without the barrier ptxas waits for the length first.
        only_loads = row_loads(tl.cast(0, tl.int64), head, query, kv_head, dim, inside, in_head, head_dim, c)
        tl.debug_barrier()
    if c.MANY:  # more rows than a program wants to look at: each is one share
        first_row, last_row, share_begin, share_end, starts = share, share, share, share, share
    else:
        starts, ends = row_starts(tl.arange(0, c.ROWS), c)
        first_row, last_row, share_begin, share_end = rows_of_share(share, num_shares, starts, ends)
        if c.ROWS == 1:  # known before the length is
            first_row, last_row = 0, 0

    for row in tl.range(first_row, last_row + 1, disable_licm=True):
        row64 = tl.cast(row, tl.int64)  # the interpreter's row is an int
        length = row_lengths(row64, row64 >= 0, c)
        loads = only_loads if c.ROWS == 1 else row_loads(row64, head, query, kv_head, dim, inside, in_head, head_dim, c)
        row_at = share if c.MANY else start_of_row(row, tl.arange(0, c.ROWS), starts)
        first_key, size, first_split, last_split, split, last_here, begin = part_of_row(
            row_at, length, share_begin, share_end, c, c.MANY
        )  # fmt: skip
        some = split <= last_here
        whole = (split == first_split) & (last_here == last_split)
        splits_here = last_here - split + 1
        partials = (row64 * head_tiles + head_tile) * c.max_splits - first_split

        # With FUSED the last key is not in the cache yet.
        end_cached = length - extra
        limit = length - (c.num_queries - 1) + query
        end = tl.where(some, tl.minimum((last_here + 1) * size, end_cached), begin)
        next_begin = (split + 1) * size
        block = row64
        if c.PAGING == 1:
            block = tl.load(c.table + row64 * c.stride_table).to(tl.int64)
        q = loads
        if c.FUSED:
            # Every program reads the new key and value, so that no load waits for the length.
            q, k_new, v_new = projected_row(loads, c.k.dtype.element_ty, c)
            has_new = some & (last_here == last_split)
            v_new = tl.where(has_new, v_new, 0.0)
            if has_new & (tile == 0):
                new_k = k_head + (block * c.stride_k_block + tl.cast(end_cached, tl.int64) * c.stride_k_key) * c.UNIT
                new_v = v_head + (block * c.stride_v_block + tl.cast(end_cached, tl.int64) * c.stride_v_key) * c.UNIT
                tl.store(new_k + chunk_at, k_new, mask=in_head)
                tl.store(new_v + dim, v_new.to(c.v.dtype.element_ty), mask=in_head)
            # In float64, where the order of the additions, which is the compiler's to choose, does not show.
            products = q.to(tl.float64) * k_new.to(tl.float64)[None, :]
            new_score = tl.sum(products, axis=1).to(tl.float32) * score_scale
            if c.HAS_MASK:
                new_mask = c.mask + row64 * c.stride_mask_row + head.to(tl.int64) * c.stride_mask_head + end_cached
                new_added = tl.load(new_mask, mask=real & has_new, other=0.0).to(tl.float32)
                new_score = tl.fma(new_added, tl.full(new_score.shape, _LOG2E, tl.float32), new_score)
        if c.AHEAD > 0:  # where the program's next row begins and ends
            next_length = row_lengths(row64 + 1, row < last_row, c)
            _, _, _, _, _, _, next_key = part_of_row(row_at, next_length, share_begin, share_end, c, True)
            next_end = next_length - extra
            next_block = row64 + 1
            if c.PAGING == 1:
                next_block = tl.load(c.table + next_block * c.stride_table, mask=row < last_row, other=0).to(tl.int64)
            next_k = (k_head + next_block * c.stride_k_block * c.UNIT).to(tl.int64)
            next_v = (v_head + next_block * c.stride_v_block * c.UNIT).to(tl.int64)
            # Its first tile is due AHEAD keys before the end of this row's last tile.
            next_due = next_key + c.AHEAD - (begin + tl.cdiv(end - begin, c.BLOCK_N) * c.BLOCK_N)

        # Keys are the tall side of both products, S^T = K q^T and O^T = V^T P^T, so that the few query rows fill the
        # short side of a matrix instruction and not a sixteenth of its tall side.
        q_t = tl.trans(q)
        whole_top, whole_total, whole_acc = empty, tl.zeros([c.BLOCK_M], tl.float32), nowhere
        top, acc = empty, nowhere
        # Sums stay apart for each key of the tile: adding over keys crosses warps, and once at the end is enough.
        sums = tl.zeros([c.BLOCK_N, c.BLOCK_M], tl.float32)
        for start in tl.range(begin, end, c.BLOCK_N, num_stages=c.NUM_STAGES):
            if c.PDL:
                if (row == last_row) & (start + c.TRIGGER >= end):
                    cuda.gdc_launch_dependents()
            if c.AHEAD > 0:
                due = next_due + start
                if (due >= next_key) & (due < next_end):
                    ask_for(
                        next_k, next_v, c.stride_k_key * c.UNIT * item, c.stride_v_key * c.UNIT * item, due,
                        tl.minimum(due + c.BLOCK_N, next_end), head_dim * item, c.AT_ONCE,
                    )  # fmt: skip
            key = start + tl.arange(0, c.BLOCK_N)
            present = (key >= first_key) & (key < end)
            # Where a block's elements can be counted in 32 bits only its begin needs 64.
            within = key
            if c.PAGING <= 1:
                k_block, v_block = (
                    k_head + block * c.stride_k_block * c.UNIT,
                    v_head + block * c.stride_v_block * c.UNIT,
                )
            elif c.PAGING == 2:
                page = tl.load(c.table + row64 * c.stride_table + start // c.block_size).to(tl.int64)
                k_block, v_block = k_head + page * c.stride_k_block * c.UNIT, v_head + page * c.stride_v_block * c.UNIT
                within = start % c.block_size + tl.arange(0, c.BLOCK_N)
            else:
                pages = tl.load(c.table + row64 * c.stride_table + key // c.block_size, mask=present, other=0)
                k_block = k_head + (pages.to(tl.int64) * c.stride_k_block * c.UNIT)[:, None]
                v_block = v_head + (pages.to(tl.int64) * c.stride_v_block * c.UNIT)[None, :]
                within = key % c.block_size
            if not c.NARROW:
                within = within.to(tl.int64)
            loaded = present[:, None] & in_head[None, :]
            k_at = (within * c.stride_k_key * c.UNIT)[:, None] + chunk_at[None, :]
            k = tl.load(k_block + k_at, mask=loaded, other=0.0)
            loaded_t = present[None, :] & in_head[:, None]
            v_at = (within * c.stride_v_key * c.UNIT)[None, :] + dim[:, None]
            v_t = tl.load(v_block + v_at, mask=loaded_t, other=0.0)
            if c.HAS_MASK:
                # Before the product: a 16-bit mask loaded after it draws the scores, and the order in which they are
                # summed, out of the product's layout.
                mask_at = row64 * c.stride_mask_row + head.to(tl.int64)[None, :] * c.stride_mask_head + key[:, None]
                added = tl.load(c.mask + mask_at, mask=real[None, :] & present[:, None], other=0.0)
            scores = tl.dot(k.to(q.dtype), q_t, input_precision="ieee") * score_scale
            if c.HAS_SOFTCAP:
                # softcap is in units of log2, as the scores are; tanh(x) = 1 - 2 / (e^2x + 1).
                scores = c.softcap * (1.0 - 2.0 / (tl.exp2(scores / c.softcap * (2.0 * _LOG2E)) + 1.0))
            if c.HAS_MASK:
                scores = tl.fma(added.to(tl.float32), tl.full(scores.shape, _LOG2E, tl.float32), scores)
            visible = present[:, None]
            if not c.ONE_QUERY:  # each sees one key more than the one before
                visible = visible & (key[:, None] < limit[None, :]) & (key[:, None] >= (limit - c.window)[None, :])
            scores = tl.where(visible, scores, _NEGATIVE_INFINITY)
            highest = tl.maximum(top, tl.max(scores, axis=0))
            # A row may see nothing of this tile: -inf - -inf would be NaN.
            finite = tl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
            weight = tl.exp2(scores - finite[None, :])
            keep = tl.exp2(top - finite)
            sums = tl.fma(sums, tl.broadcast_to(keep[None, :], sums.shape), weight)
            acc = tl.dot(v_t.to(q.dtype), weight.to(q.dtype), acc * keep[None, :], input_precision="ieee")
            top = highest
            if (start + c.BLOCK_N >= next_begin) & (split < last_here):
                # The next split begins with nothing from this one; its loads are under way.
                acc, total = acc * v_scale, tl.sum(sums, axis=0)
                if whole:
                    whole_top, whole_total, whole_acc = fold(whole_top, whole_total, whole_acc, top, total, acc)
                else:
                    store_output(partials + split, acc, slots, dim, c)
                    store_stats(partials + split, top, total, slots, c)
                top, acc = empty, nowhere
                sums = tl.zeros([c.BLOCK_N, c.BLOCK_M], tl.float32)
                split += 1
                next_begin += size

        total = tl.sum(sums, axis=0)
        if c.FUSED:
            highest = tl.maximum(top, tl.where(has_new, new_score, _NEGATIVE_INFINITY))
            finite = tl.where(highest == _NEGATIVE_INFINITY, 0.0, highest)
            weight = tl.where(has_new, tl.exp2(new_score - finite), 0.0)
            keep = tl.exp2(top - finite)
            total = tl.fma(total, keep, weight)
            rounded, new = weight.to(q.dtype).to(tl.float32), v_new.to(c.v.dtype.element_ty).to(tl.float32)
            acc = tl.fma(acc, tl.broadcast_to(keep[None, :], acc.shape), new[:, None] * rounded[None, :])
            top = highest
        acc *= v_scale
        if some:
            if whole:
                top, total, acc = fold(whole_top, whole_total, whole_acc, top, total, acc)
                finish(tl.trans(acc), top, total, row64, head, query, dim, inside, head_dim, c)
            else:
                store_output(partials + split, acc, slots, dim, c)
                store_stats(partials + split, top, total, slots, c)
                count = last_split - first_split + 1
                arrived_ptr = c.counters + row64 * head_tiles + head_tile
                tl.debug_barrier()  # one thread counts for all
                arrived = tl.atomic_add(arrived_ptr, splits_here, sem="acq_rel", scope="gpu") + splits_here
                if arrived == count:
                    tl.store(arrived_ptr, 0)  # for the next launch
                    slot = tl.arange(0, c.BLOCK_H)
                    kept = tile * c.BLOCK_M + slot
                    kept_in = (kept < tile_rows)[:, None] & in_head[None, :]
                    all_top, all_total, all_acc = merged(partials + first_split, slot, dim, count, c)
                    finish(
                        tl.trans(all_acc), all_top, all_total, row64, kv_head * c.GROUP + kept % c.GROUP,
                        kept // c.GROUP, dim, kept_in, head_dim, c,
                    )  # fmt: skip
