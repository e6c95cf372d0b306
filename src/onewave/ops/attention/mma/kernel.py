"""Attention on few registers: mma.sync m16n8k16 and cp.async, for sm_80 to sm_90; in Gluon, every layout written out.

The scores are computed transposed, S^T = K Q^T: keys are the rows of the product (16 an instruction), queries its
columns (8 an instruction), and so is the output, O^T = V^T P^T. A warp owns QUERIES / WARPS queries and sees all keys
of a tile; in its registers lie Q^T (an operand, loaded once from device memory), S^T, O^T (float32) and, for the
queries of a thread, the running max. Lane 4 g + t holds, of each 8 x 8 block of S^T, row g and columns 2 t, 2 t + 1: a
query's max is a butterfly over the 8 lane groups g. Row sums stay in their threads until the end.

As operand B of the second product, lane 4 g + t holds rows (keys) 2 t, 2 t + 1 of column (query) g: the block
transposed. One movmatrix a block does that, so P never leaves the registers; the compiler is made to show that nothing
else moves (assert_trivial). The output is turned the same way, so that it leaves in whole rows.

Shared memory holds one tile of K and one of V, single-buffered, rows of head_dim with 8-element (16-byte) pieces
XOR-swizzled by the row; no access has a bank conflict (tests/ops/test_compiled_attention.py). The loop:
wait for K, S^T = K Q^T, ask for the next K, softmax, wait for V, O^T += V^T P^T, ask for the next V. So each copy runs
under the other product, and several programs fit an SM. A tile of queries leaves through the same memory.

Rows are queries, or, where there are few, all heads of a group for each (row r is query r // PACK, head r % PACK), so
that K and V are read once for the group. Tiles of keys begin at multiples of KEYS from the sequence's first key: what a
row's bits depend on is head_dim alone. Masked scores are -inf; masks are computed for cut tiles only, and what no row
of the tile sees is not read but zero. Bound: the tensor cores and the shared memory that feeds them. Source: Dao 2023,
arXiv:2307.08691, for the online softmax.

Constants (of a head_dim: mma/plan.py):

    PACK          heads of a group that share a tile                             1 or the group
    HEAD_DIM      columns of a head, in elements                                 16 to 256, by 8
    WIDTH         columns that are computed, in elements                         16, 32, 64, 128, 256
    QUERIES       rows of a tile                                                 32, 64
    KEYS          keys of a key tile                                             32, 64
    WARPS         warps of a program                                             4
    UNIT          elements that strides count; 8: rows at multiples of 16 bytes  1, 8
    FOLD          scaling is part of the exponent's multiply-add                 bool
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
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

_TURN = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
_REGISTERS = gl.constexpr("=r,r")
_LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def turned(x):
    """[R, C] of 16 bits in a product's layout -> [R / 8, 8, C / 8, 8], each 8 x 8 block transposed in registers.

    Element [i, g, j, c] is x[8 i + c, 8 j + g]: the registers hold another element than their layout says, so the axes
    must be renamed by a permutation, which costs nothing.
    """
    moved = gl.inline_asm_elementwise(_TURN, _REGISTERS, [x], dtype=x.dtype, is_pure=False, pack=2)
    return moved.reshape([x.shape[0] // 8, 8, x.shape[1] // 8, 8])


@gluon.jit
def partial_sums(p):
    """[KEYS, QUERIES] -> [8, QUERIES]; every sum stays in its thread."""
    return gl.sum(p.reshape([p.shape[0] // 8, 8, p.shape[1]]), 0)


@gluon.jit
def fetch(
    tile, lanes, row, exists, first, low, end, stride, ASYNC: gl.constexpr, COPY: gl.constexpr, LEFT: gl.constexpr
):  # fmt: skip
    """Rows first.. of K or V into a tile [KEYS, WIDTH]; zeros before low, from end on and in columns that aren't.

    lanes: pointers [1, ROWS, WIDTH] to the sequence's first rows, as many as all threads copy at once; row: their
    numbers [1, ROWS, 1]; exists: of the columns. So a thread keeps one pointer, and what it adds to it for its other
    rows is the same for all threads.
    """
    SPREAD: gl.constexpr = lanes.type.layout
    ROWS: gl.constexpr = lanes.shape[1]
    TURNS: gl.constexpr = tile.shape[0] // ROWS
    turn = gl.arange(0, TURNS, layout=gl.SliceLayout(1, gl.SliceLayout(2, SPREAD)))[:, None][:, :, None]
    mask = (row < end - first - turn * ROWS) & exists
    if LEFT:
        mask = mask & (row >= low - first - turn * ROWS)
    # The compiler does not see through a reshape that eight columns are one piece.
    mask = gl.max_constancy(mask.reshape(tile.shape), [1, 8])
    mask = gl.convert_layout(mask, COPY, assert_trivial=True)
    at = (lanes + first * stride + turn * (ROWS * stride)).reshape(tile.shape)
    if ASYNC:
        at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])
        at = gl.convert_layout(at, COPY, assert_trivial=True)
        async_copy.async_copy_global_to_shared(tile, at, mask=mask)
    else:
        at = gl.convert_layout(at, COPY, assert_trivial=True)
        tile.store(gl.load(at, mask=mask, other=0.0))
    async_copy.commit_group()


@gluon.jit
def finished(best, total, sink, SINKS: gl.constexpr):
    """(factor of the output, log-sum in units of log2) of each row; 0 and -inf of one that saw no key, sink or not."""
    empty = total == 0.0
    share = gl.where(empty, 0.0, 1.0)
    if SINKS:
        # One more key, of this score and with a value of zero.
        higher = gl.where(empty, 0.0, gl.maximum(best, sink))
        share = gl.where(empty, 0.0, gl.exp2(best - higher))
        total = total * share + gl.exp2(sink - higher)
        best = higher
    total = gl.where(empty, 1.0, total)
    return share / total, gl.where(empty, -float("inf"), best + gl.log2(total))


@gluon.jit(
    do_not_specialize=[
        "q_batch", "q_head", "q_step", "k_batch", "k_head", "k_step", "v_batch", "v_head", "v_step", "out_batch",
        "out_head", "out_step", "lse_batch", "lse_head", "lse_step", "num_queries", "num_keys", "tiles", "shift",
        "left", "right", "num_heads", "group",
    ]
)  # fmt: skip
def mma_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, starts_q_ptr, starts_k_ptr,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, out_batch, out_head, out_step,
    lse_batch, lse_head, lse_step,
    num_heads, group, num_queries, num_keys, tiles, shift, left, right, scale_log2, inner, outer,
    PACK: gl.constexpr, HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
    WARPS: gl.constexpr, UNIT: gl.constexpr, RAGGED: gl.constexpr, TOP_LEFT: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, FOLD: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """*_batch, *_head, *_step: strides of batch, head, and query or key; in units of UNIT elements, lse's in elements.

    They are no tuples, since Triton compiles anew for what divides an element of a tuple: that is, for most lengths.

    UNIT: 8 where every row lies at a multiple of 16 bytes, and then copies are asynchronous; else 1. RAGGED: packed
    sequences, of which num_queries is the longest's.
    """
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    TALL: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    WIDE: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    OF_QUERY: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    PIECES: gl.constexpr = WIDTH // 8
    ROWS: gl.constexpr = WARPS * 32 // PIECES
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // PIECES, PIECES], [WARPS, 1], [1, 0])
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // PIECES, PIECES], [1, WARPS, 1], [2, 1, 0])
    # Rows of less than 128 bytes share a line of the 32 banks.
    LINE: gl.constexpr = 1 if WIDTH >= 64 else 64 // WIDTH
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=LINE, max_phase=8 // LINE, order=[1, 0])
    ASYNC: gl.constexpr = UNIT == 8
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    program = gl.program_id(0)
    tile, rest = program % tiles, program // tiles
    head_groups = num_heads // PACK
    batch, head = rest // head_groups, rest % head_groups * PACK
    kv_head = (head // group).to(gl.int64)
    page, start_q, start_k = batch.to(gl.int64), head * 0, head * 0
    if RAGGED:
        start_q, start_k = gl.load(starts_q_ptr + batch), gl.load(starts_k_ptr + batch)
        length = gl.load(starts_q_ptr + batch + 1) - start_q
        num_keys = gl.load(starts_k_ptr + batch + 1) - start_k
        num_queries = gl.minimum(num_queries, length)
        tiles = (num_queries * PACK + QUERIES - 1) // QUERIES
        if tile >= tiles:
            return
        if not TOP_LEFT:
            shift = num_keys - length
        page = page * 0
    if RIGHT:
        # The longest rows first.
        tile = tiles - 1 - tile
    rows = num_queries * PACK
    first_row = tile * QUERIES

    # Keys from low to end are seen by some row, those from whole_start to whole_end by all.
    first_place = first_row // PACK + shift
    last_place = (gl.minimum(first_row + QUERIES, rows) - 1) // PACK + shift
    low, end, whole_start, whole_end = head * 0, num_keys, head * 0, num_keys
    if RIGHT:
        end = gl.maximum(gl.minimum(end, last_place + right + 1), 0)
        whole_end = gl.minimum(whole_end, first_place + right + 1)
    if LEFT:
        low = gl.maximum(first_place - left, 0)
        whole_start = last_place - left

    own = first_row + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, WIDE))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, WIDE))
    own_head, in_q = (head + own % PACK).to(gl.int64), (start_q + own // PACK).to(gl.int64)
    q_row = (page * q_batch + own_head * q_head + in_q * q_step) * UNIT
    q_mask = (own < rows)[None, :] & (column < HEAD_DIM)[:, None]
    q = gl.load(q_ptr + q_row[None, :] + column[:, None], mask=q_mask, other=0.0)

    k_tile = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], SWIZZLED)
    v_tile = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], SWIZZLED)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, SPREAD)))[None, :][:, :, None]
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, SPREAD)))[None, :][:, None, :]
    exists = columns < HEAD_DIM
    k_row, v_row = (page * 0 + k_step) * UNIT, (page * 0 + v_step) * UNIT
    k_first = k_ptr + (page * k_batch + kv_head * k_head) * UNIT + start_k * k_row
    v_first = v_ptr + (page * v_batch + kv_head * v_head) * UNIT + start_k * v_row
    k_lanes = k_first + row * k_row + columns
    v_lanes = v_first + row * v_row + columns

    own = first_row + gl.arange(0, QUERIES, layout=OF_QUERY)
    place = own // PACK + shift
    last_key = place * 0 + (num_keys - 1)
    if RIGHT:
        last_key = gl.minimum(last_key, place + right)
    best = gl.full([QUERIES], -float("inf"), gl.float32, OF_QUERY)
    total = partial_sums(gl.zeros([KEYS, QUERIES], gl.float32, PRODUCT))
    acc = gl.zeros([WIDTH, QUERIES], gl.float32, PRODUCT)
    begin = low // KEYS * KEYS
    fetch(k_tile, k_lanes, row, exists, begin, low, end, k_row, ASYNC, COPY, LEFT)
    fetch(v_tile, v_lanes, row, exists, begin, low, end, v_row, ASYNC, COPY, LEFT)
    for first in range(begin, end, KEYS):
        async_copy.wait_group(1)
        s = mma_v2(k_tile.load(TALL), q, gl.zeros([KEYS, QUERIES], gl.float32, PRODUCT))
        fetch(k_tile, k_lanes, row, exists, first + KEYS, low, end, k_row, ASYNC, COPY, LEFT)
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + e^2x), right for every x: e^2x may be 0 or inf.
            s = outer * (1.0 - 2.0 / (1.0 + gl.exp2(s * inner)))
        elif not FOLD:
            s = s * scale_log2
        if (first + KEYS > whole_end) | (first < whole_start):
            key = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, PRODUCT))[:, None]
            seen = key <= last_key[None, :]
            if LEFT:
                seen = seen & (key >= place[None, :] - left)
            s = gl.where(seen, s, -float("inf"))
        higher = gl.max(s, 0)
        if FOLD:
            higher = higher * scale_log2
        higher = gl.maximum(best, higher)
        # A row that has seen no key yet subtracts 0.
        reference = gl.where(higher == -float("inf"), 0.0, higher)
        if FOLD:
            s = s * scale_log2
        p = gl.exp2(s - reference[None, :])
        kept = gl.exp2(best - reference)
        kept_in_total = gl.convert_layout(kept, gl.SliceLayout(0, total.type.layout), assert_trivial=True)
        total = total * kept_in_total[None, :] + partial_sums(p)
        best = higher
        p = turned(p.to(dtype)).permute((0, 3, 2, 1)).reshape([KEYS, QUERIES])
        p = gl.convert_layout(p, WIDE, assert_trivial=True)
        acc = acc * kept[None, :]
        async_copy.wait_group(1)
        acc = mma_v2(v_tile.permute((1, 0)).load(TALL), p, acc)
        fetch(v_tile, v_lanes, row, exists, first + KEYS, low, end, v_row, ASYNC, COPY, LEFT)

    total = gl.convert_layout(gl.sum(total, 0), OF_QUERY, assert_trivial=True)
    own_head = (head + own % PACK).to(gl.int64)
    sink = best
    if SINKS:
        sink = gl.load(sinks_ptr + own_head, mask=own < rows, other=0.0).to(gl.float32) * _LOG2E
    share, lse = finished(best, total, sink, SINKS)
    if LSE:
        in_lse = (start_q + own // PACK).to(gl.int64)
        lse_at = lse_ptr + page * lse_batch + own_head * lse_head + in_lse * lse_step
        gl.store(lse_at, lse * _LN2, mask=own < rows)

    async_copy.wait_group(0)
    # K and V are done with: it takes their place.
    out_tile = gl.allocate_shared_memory(dtype, [QUERIES, WIDTH], SWIZZLED)
    out_tile.store(turned((acc * share[None, :]).to(dtype)).permute((2, 1, 0, 3)).reshape([QUERIES, WIDTH]))
    own = first_row + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, COPY))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    own_head, in_out = (head + own % PACK).to(gl.int64), (start_q + own // PACK).to(gl.int64)
    out_row = (page * out_batch + own_head * out_head + in_out * out_step) * UNIT
    out_mask = (own < rows)[:, None] & (column < HEAD_DIM)[None, :]
    gl.store(out_ptr + out_row[:, None] + column[None, :], out_tile.load(COPY), mask=out_mask)
