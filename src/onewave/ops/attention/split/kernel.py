"""Attention of few queries over many keys on Hopper (sm_90), in two launches; in Gluon.

A head's P V is summed key tile by key tile, from the last to the first (hopper/kernel.py), and so a row's bits come
about. Behind a long prefix a short chunk leaves most SMs idle: a head is one tile of rows. But only P V and the sums of
P need that order. Scores and P of a key tile need nothing of another one, except the row's reference m. So

weigh_kernel     a program takes 64 rows and every `splits`-th key tile. It works out m from the last key tile (and the
                 one before, where some rows end there), then P of its own tiles. It writes P in the queries' dtype and
                 each row's 4 partial sums.
combine_kernel   a program takes 64 rows and COLUMNS columns of the output. It adds P V and the sums tile by tile, from
                 the last one on, and divides. Where a row's scores exceeded m, which its sums show, P is of no use: the
                 program starts again from queries and keys, and moves m.

Both give the bits of hopper/kernel.py. Row r is head r % group of query r // group, of a KV head. A program asks for
its first STAGES key tiles, or tiles of P and values, at once. Bound: L2, which reads each P D / COLUMNS times.

Constants:

    D             columns of a head                                              128
    COLUMNS       columns of the output, of a program                            32, 64
    BN            keys of a key tile: hopper/kernel.py's                         128
    STAGES        places in shared memory                                        2 to 8
    PAGE          keys of a page                                                 128, 256
    HEADROOM      hopper/kernel.py's                                             40
"""
# (What is decided by a constant must stay a statement of its own.)

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
from triton.language.extra import cuda

from onewave.ops.attention.hopper.softmax import hidden, lazy_softmax, partial_sums
from onewave.ops.attention.hopper.start import nothing_yet
from onewave.ops.attention.hopper.tiles import boxed, place_in_page

_ACROSS = gl.constexpr(64)


class Chunk(namedtuple("Chunk", (
    "q queries block_table q_token q_head group first_query num_queries num_keys right D COLUMNS BN STAGES PAGE "
    "HEADROOM LEFT RIGHT"
))):  # fmt: skip
    """Facts of a call, of one sequence. q: a descriptor in the queries' dtype, for softmax.py; queries: a pointer."""


@gluon.jit
def bring(chunk, descriptor, page_rows, kv_head, tile, place, full, column, COLUMNS: gl.constexpr):
    """Copy a key tile's columns from `column` on to a place [BN, COLUMNS]; the bytes arrive at `full`."""
    ACROSS: gl.constexpr = COLUMNS if COLUMNS < _ACROSS else _ACROSS
    BN: gl.constexpr = chunk.BN
    PAGE: gl.constexpr = chunk.PAGE
    first = tile * BN
    nth = first // PAGE
    page = gl.load(chunk.block_table + nth)
    used = gl.minimum(chunk.num_keys - nth * PAGE, PAGE)
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ACROSS, element_bitwidth=16, rank=2)
    blocks = place._reinterpret(descriptor.dtype, [COLUMNS // ACROSS, BN, ACROSS], layout)
    for across in gl.static_range(COLUMNS // ACROSS):
        at = place_in_page(page, page_rows, kv_head, used, first - nth * PAGE, column + across * ACROSS)
        tma.async_copy_global_to_shared(descriptor, at, full, boxed(blocks.index(across), descriptor))


@gluon.jit
def place_queries(chunk, kv_head, first_row, place):
    """Write 64 rows' queries to a place [64, D]; zeros for rows beyond the last."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))
    column = gl.arange(0, chunk.D, layout=gl.SliceLayout(0, LOADED))
    token = (chunk.first_query + row // chunk.group).to(gl.int64)
    at = token * chunk.q_token + (kv_head * chunk.group + row % chunk.group).to(gl.int64) * chunk.q_head
    exists = row < chunk.num_queries * chunk.group
    values = gl.load(chunk.queries + at[:, None] + column[None, :], mask=exists[:, None], other=0.0)
    place.store(values)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def scores(chunk, place_of_queries, place_of_keys):
    """Begin the product of queries and keys, [64, BN], as hopper/columns.py has it."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, chunk.BN, 16])
    nothing = gl.zeros([64, chunk.BN], gl.float32, LS)
    return warpgroup_mma(place_of_queries, place_of_keys.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def masked(chunk, s, first_row, tile):
    """Scores of a key tile, -inf where a row does not see the key."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, chunk.BN, 16])
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
    lane = gl.arange(0, chunk.BN, layout=gl.SliceLayout(0, LS))
    row_place = chunk.num_keys - chunk.num_queries + row // chunk.group
    return hidden(chunk, s, row_place[:, None], (tile * chunk.BN + lane)[None, :], chunk.num_keys)


@gluon.jit
def first_place(chunk, first_row):
    """The key at which the first of 64 rows stands."""
    return gl.maximum(chunk.num_keys - chunk.num_queries + first_row // chunk.group, 0)


@gluon.jit
def tile_at(n, lead, last, split, splits):
    """The n-th key tile of a program of weigh_kernel: `lead` from the last one on, then its own."""
    return gl.where(n < lead, last - n, last - split - (n - lead) * splits)


@gluon.jit
def lengths(starts_q, starts_k, max_keys):
    """The sequence's first query, and its numbers of queries and keys, of which there is memory for max_keys."""
    first_query, first_key = gl.load(starts_q), gl.load(starts_k)
    num_keys = gl.minimum(gl.load(starts_k + 1) - first_key, max_keys)
    return first_query, gl.load(starts_q + 1) - first_query, num_keys


@gluon.jit
def weigh(chunk, k, weights, sums, k_page_rows, max_tiles, unit):
    """weigh_kernel of a sequence."""
    D: gl.constexpr = chunk.D
    BN: gl.constexpr = chunk.BN
    STAGES: gl.constexpr = chunk.STAGES
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    row_tile, kv_head, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    splits = gl.num_programs(2)
    first_row = row_tile * 64
    first_box = (kv_head * gl.num_programs(0) + row_tile).to(gl.int64) * max_tiles
    sq = gl.allocate_shared_memory(weights.dtype, [64, D], flat)
    sp = gl.allocate_shared_memory(weights.dtype, [2, 64, BN], flat)
    sk = gl.allocate_shared_memory(weights.dtype, [STAGES, BN, D], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    num_tiles = (chunk.num_keys + BN - 1) // BN
    last = num_tiles - 1
    place = first_place(chunk, first_row)
    cut = (place + 1) // BN
    # Rows that end before the last key tile have their reference in the one before.
    lead = gl.where(place // BN < last, 2, 1)
    total = lead + (num_tiles - split + splits - 1) // splits
    if (first_row >= chunk.num_queries * chunk.group) | (split >= num_tiles):
        total = total * 0
    for n in range(gl.minimum(STAGES, total)):
        mbarrier.expect(full.index(n), BN * D * 2)
        bring(chunk, k, k_page_rows, kv_head, tile_at(n, lead, last, split, splits), sk.index(n), full.index(n), 0, D)
    place_queries(chunk, kv_head, first_row, sq)
    m, unused = nothing_yet(chunk)
    mbarrier.wait(full.index(0), 0, pred=total > 0)
    s = warpgroup_mma_wait(0, deps=[scores(chunk, sq, sk.index(0))])
    for n in range(total):
        tile = tile_at(n, lead, last, split, splits)
        # Beside this tile's exponentials; behind the last tile for nothing, whatever lies there.
        mbarrier.wait(full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=n + 1 < total)
        coming = scores(chunk, sq, sk.index((n + 1) % STAGES))
        # All warps' products with this tile have ended, and the copy before last from P's two places.
        tma.store_wait(1)
        gl.thread_barrier()
        if n + STAGES < total:
            free = n % STAGES
            mbarrier.expect(full.index(free), BN * D * 2)
            after = tile_at(n + STAGES, lead, last, split, splits)
            bring(chunk, k, k_page_rows, kv_head, after, sk.index(free), full.index(free), 0, D)
        if tile >= cut:
            s = masked(chunk, s, first_row, tile)
        if n < lead:
            _, m, _, _ = lazy_softmax(chunk, s, m, unused, unit, BN)
        else:
            reference = gl.where(m == -float("inf"), 0.0, m)
            p = gl.exp2(s * unit - reference[:, None])
            parts = partial_sums(p, BN)
            box = first_box + (last - tile)
            row = gl.arange(0, 64, layout=gl.SliceLayout(1, parts.type.layout))
            quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, parts.type.layout))
            gl.store(sums + box * 256 + row[:, None] * 4 + quarter[None, :], parts)
            sp.index(n % 2).store(p.to(weights.dtype))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(
                weights, [0, 0, (box * 64).to(gl.int32), 0], boxed(sp.index(n % 2), weights)
            )
        s = warpgroup_mma_wait(0, deps=[coming])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["k_page_rows", "group", "max_tiles"])
def weigh_kernel(
    q, k, weights, sums, starts_q, starts_k, block_table, k_page_rows, q_token, q_head, group, max_tiles, scale_log2,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr, HEADROOM: gl.constexpr,
):  # fmt: skip
    """See the top of this file. weights: a descriptor of [.., 64, BN] boxes; sums: float32 [.., 64, 4]; one of each for
    a KV head, 64 rows and a key tile, counted from the last one. max_tiles: key tiles that there is memory for."""
    cuda.gdc_wait()
    # Not before: combine_kernel reads lengths and the block table as soon as it begins.
    cuda.gdc_launch_dependents()
    first_query, num_queries, num_keys = lengths(starts_q, starts_k, max_tiles * BN)
    # Not assigned to a name first: constants would become values.
    weigh(Chunk(
        weights, q, block_table, q_token, q_head, group, first_query, num_queries, num_keys, first_query * 0, D, D, BN,
        STAGES, PAGE, HEADROOM, False, True,
    ), k, weights, sums, k_page_rows, max_tiles, scale_log2)  # fmt: skip


@gluon.jit
def begin_again(chunk, k, v, k_page_rows, v_page_rows, kv_head, first_row, column, num_tiles, sq, sk, sv, full, unit):
    """The output [64, COLUMNS], from `column` on, and the sums, of rows that may exceed their m: (o, total)."""
    COLUMNS: gl.constexpr = chunk.COLUMNS
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    BYTES: gl.constexpr = chunk.BN * (chunk.D + COLUMNS) * 2
    place_queries(chunk, kv_head, first_row, sq)
    cut = (first_place(chunk, first_row) + 1) // chunk.BN
    o = gl.zeros([64, COLUMNS], gl.float32, LO)
    m, total = nothing_yet(chunk)
    for n in range(num_tiles):
        tile = num_tiles - 1 - n
        mbarrier.expect(full, BYTES)
        bring(chunk, k, k_page_rows, kv_head, tile, sk, full, 0, chunk.D)
        bring(chunk, v, v_page_rows, kv_head, tile, sv, full, column, COLUMNS)
        mbarrier.wait(full, n & 1)
        s = warpgroup_mma_wait(0, deps=[scores(chunk, sq, sk)])
        if tile >= cut:
            s = masked(chunk, s, first_row, tile)
        p, m, total, kept = lazy_softmax(chunk, s, m, total, unit, chunk.BN)
        o = o * gl.convert_layout(kept, gl.SliceLayout(1, LO))[:, None]
        p = gl.convert_layout(p.to(chunk.q.dtype), gl.DotOperandLayout(0, LO, 2))
        o = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, sv, o, is_async=True)])
        gl.thread_barrier()
    return o, total


@gluon.jit
def sums_at(sums, first, n, num_tiles, row, quarter):
    """The n-th key tile's sums of P, [64, 4]; zeros behind the last."""
    return gl.load(sums + (first + n) * 256 + row * 4 + quarter, mask=n + row * 0 + quarter * 0 < num_tiles, other=0.0)


@gluon.jit
def load_tiles(chunk, v, weights, v_page_rows, kv_head, column, num_tiles, first_box, sp, sv, full, free):
    """The loading warp of combine_kernel."""
    BYTES: gl.constexpr = chunk.BN * (64 + chunk.COLUMNS) * 2
    STAGES: gl.constexpr = chunk.STAGES
    # Copies by TMA after it only: behind one the wait does not hold (docs/log/correctness.md).
    cuda.gdc_wait()
    for n in range(num_tiles):
        stage = n % STAGES
        mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        box = [0, 0, (first_box * 64).to(gl.int32) + n * 64, 0]
        tma.async_copy_global_to_shared(weights, box, full.index(stage), boxed(sp.index(stage), weights))
        tile = num_tiles - 1 - n
        bring(chunk, v, v_page_rows, kv_head, tile, sv.index(stage), full.index(stage), column, chunk.COLUMNS)


@gluon.jit
def add_up(
    chunk, k, v, out, weights, sums, k_page_rows, v_page_rows, out_token, out_head, kv_head, first_row, column,
    num_tiles, first_box, sp, sv, full, free, unit,
):  # fmt: skip
    """The warpgroup of combine_kernel that multiplies."""
    D: gl.constexpr = chunk.D
    BN: gl.constexpr = chunk.BN
    COLUMNS: gl.constexpr = chunk.COLUMNS
    STAGES: gl.constexpr = chunk.STAGES
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # hopper/kernel.py's: where it would move m, sums are beyond it.
    TOO_MUCH: gl.constexpr = 2.0 ** (chunk.HEADROOM - 1)
    cuda.gdc_wait()
    o = gl.zeros([64, COLUMNS], gl.float32, LO)
    _, total = nothing_yet(chunk)
    highest = total
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, total.type.layout))[:, None]
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, total.type.layout))[None, :]
    # Asked for four tiles ahead.
    a = sums_at(sums, first_box, 0, num_tiles, row, quarter)
    b = sums_at(sums, first_box, 1, num_tiles, row, quarter)
    c = sums_at(sums, first_box, 2, num_tiles, row, quarter)
    d = sums_at(sums, first_box, 3, num_tiles, row, quarter)
    for n in range(num_tiles):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        o = warpgroup_mma(sp.index(stage), sv.index(stage), o, is_async=True)
        o = warpgroup_mma_wait(1, deps=[o])
        mbarrier.arrive(free.index((n + STAGES - 1) % STAGES), count=1, pred=n > 0)
        if n % 4 == 0:
            total = (((total + a) + b) + c) + d
            highest = gl.maximum(gl.maximum(gl.maximum(gl.maximum(highest, a), b), c), d)
            a = sums_at(sums, first_box, n + 4, num_tiles, row, quarter)
            b = sums_at(sums, first_box, n + 5, num_tiles, row, quarter)
            c = sums_at(sums, first_box, n + 6, num_tiles, row, quarter)
            d = sums_at(sums, first_box, n + 7, num_tiles, row, quarter)
    o = warpgroup_mma_wait(0, deps=[o])
    if gl.max(gl.max(highest, 1), 0) > TOO_MUCH:
        keys = sp._reinterpret(weights.dtype, [STAGES // 2, BN, D], flat).index(0)
        o, total = begin_again(
            chunk, k, v, k_page_rows, v_page_rows, kv_head, first_row, column, num_tiles, sp.index(2), keys,
            sv.index(0), full.index(STAGES), unit,
        )  # fmt: skip
    sum_of_row = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, LO))
    empty = sum_of_row == 0.0
    share = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, sum_of_row))
    own_row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, LO))
    of_column = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LO))
    at = (chunk.first_query + own_row // chunk.group).to(gl.int64) * out_token
    at += (kv_head * chunk.group + own_row % chunk.group).to(gl.int64) * out_head
    values = (o * share[:, None]).to(weights.dtype)
    exists = own_row < chunk.num_queries * chunk.group
    gl.store(out + at[:, None] + of_column[None, :], values, mask=exists[:, None])


@gluon.jit
def combine(chunk, k, v, out, weights, sums, k_page_rows, v_page_rows, out_token, out_head, max_tiles, unit):
    """combine_kernel of a sequence."""
    BN: gl.constexpr = chunk.BN
    COLUMNS: gl.constexpr = chunk.COLUMNS
    STAGES: gl.constexpr = chunk.STAGES
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    of_values: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, 2 * COLUMNS), element_bitwidth=16, rank=2
    )
    row_tile, kv_head, column = gl.program_id(0), gl.program_id(1), gl.program_id(2) * COLUMNS
    first_row = row_tile * 64
    num_tiles = gl.where(first_row < chunk.num_queries * chunk.group, (chunk.num_keys + BN - 1) // BN, 0)
    first_box = (kv_head * gl.num_programs(0) + row_tile).to(gl.int64) * max_tiles
    sp = gl.allocate_shared_memory(weights.dtype, [STAGES, 64, BN], flat)
    sv = gl.allocate_shared_memory(weights.dtype, [STAGES, BN, COLUMNS], of_values)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (add_up, (
                chunk, k, v, out, weights, sums, k_page_rows, v_page_rows, out_token, out_head, kv_head, first_row,
                column, num_tiles, first_box, sp, sv, full, free, unit,
            )),
            (load_tiles, (
                chunk, v, weights, v_page_rows, kv_head, column, num_tiles, first_box, sp, sv, full, free,
            )),
        ],
        [1],
        [48],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["k_page_rows", "v_page_rows", "group", "max_tiles"])
def combine_kernel(
    q, k, v, out, weights, sums, starts_q, starts_k, block_table, k_page_rows, v_page_rows, q_token, q_head, out_token,
    out_head, group, max_tiles, scale_log2,
    D: gl.constexpr, COLUMNS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
    HEADROOM: gl.constexpr,
):  # fmt: skip
    """See the top of this file, and weigh_kernel. v: a descriptor of boxes of at most COLUMNS columns."""
    first_query, num_queries, num_keys = lengths(starts_q, starts_k, max_tiles * BN)
    combine(Chunk(
        weights, q, block_table, q_token, q_head, group, first_query, num_queries, num_keys, first_query * 0, D,
        COLUMNS, BN, STAGES, PAGE, HEADROOM, False, True,
    ), k, v, out, weights, sums, k_page_rows, v_page_rows, out_token, out_head, max_tiles, scale_log2)  # fmt: skip
