"""Attention in Triton: online softmax over tiles of keys, for sm_80 and newer.

A program owns one tile of rows: BLOCK_M queries of one head, or, where there are few queries, all heads of a group for
each of them (row r is query r // PACK, head r % PACK), so that K and V are read once for the group. Programs of one
head are neighbours, those with most keys first. q, the running max and sum, and the output (float32) stay in registers.

Keys go by in tiles of BLOCK_N that begin at multiples of BLOCK_N from the sequence's first key, in up to three loops:
tiles that a window cuts on the left, tiles that every row sees whole (no mask is computed), and the cut ones on the
right. Tiles that no row sees are never loaded. K and V come through tensor descriptors (TMA on Hopper), which return
zeros beyond the last key, or through pointers with any strides. Triton pipelines the loads of a loop. Values that no
query of the sequence sees may hold NaN and are zeros here: those beyond the last seen key, which counts as the last,
and, of the tiles that a window cuts on the left, those before the first.

head_dim is padded with zeros to a power of two. (As a sum of two, 96 = 64 + 32, with a product for each, Triton
3.6's code gave wrong values and wild addresses on sm_90.)
Scores are kept in units of log2, so that exp2 serves; without ALiBi and float bias, scaling (or the softcap's product)
and the subtraction of the max are one fused multiply-add. Masked scores are -inf, and a row that has seen only those
subtracts 0 instead. P is rounded to the inputs' dtype for the second product, as V has it. Bound: the tensor cores; at
head_dim 64 exp2.

Constants (of a head_dim: triton/plan.py):

    PACK          heads of a group that share a tile                             1 or the group
    HEAD_DIM      columns of a head, in elements                                 16 to 256, by 8
    WIDTH         columns that are computed, in elements                         16, 32, 64, 128, 256
    BLOCK_M       rows of a tile                                                 64, 128
    BLOCK_N       keys of a key tile                                             32, 64, 128
    TMA           K and V come through tensor descriptors                        bool
    ALIBI         scores lose slope * distance                                   bool
    BIAS          no bias, a mask, a float bias                                  0, 1, 2
    POSITIVE      the scale is above 0                                           bool
    TAIL          the last keys may be hidden from some row                      bool
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

_GREATEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def load_tile(
    source, batch, head, start, first, seen_from, num_keys, stride, WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, CUT: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The keys first.. of a sequence that begins at row `start`; [BLOCK_N, WIDTH], zeros beyond HEAD_DIM. EDGE: and,
    through pointers, before the key seen_from."""
    if TMA:
        # Coordinates below 0 read zeros.
        tile = source.load([batch, head, start + first, 0]).reshape([BLOCK_N, WIDTH])
    else:
        key = first + tl.arange(0, BLOCK_N)
        column = tl.arange(0, WIDTH)
        at = source + key.to(tl.int64)[:, None] * stride + column[None, :]
        if CUT:
            inside = key < num_keys
            if EDGE:
                inside &= key >= seen_from
            tile = tl.load(at, mask=inside[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
        elif WIDTH > HEAD_DIM:
            tile = tl.load(at, mask=(column < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def attend(
    acc, best, total, q, k, v, batch, kv_head, start, first, last, seen_from, num_keys, place, left, right,
    stride_k, stride_v, scale_log2, inner, outer, slope, bias_row, bias_stride, row_exists,
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    CUT: tl.constexpr, EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, BIAS: tl.constexpr, POSITIVE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The keys first..last, a tile at a time. CUT: a tile may hold keys that some row must not see. EDGE: and keys
    before seen_from, the first that any row of the sequence sees. POSITIVE: whether the scale is above 0."""
    SAFE: tl.constexpr = CUT or BIAS != 0
    # Folding the unit into the exponent takes the max before scaling: only a positive one keeps its place, and a
    # softcap's always is.
    FOLD: tl.constexpr = (POSITIVE or SOFTCAP) and BIAS != 2 and not ALIBI  # pyright: ignore[reportAssignmentType]
    # Where nothing stood between a product and the subtraction below, the compiler would make one multiply-add of them
    # in tiles that are whole, and not in those that are cut: a row's bits would depend on which rows share its tile.
    UNCLEAR: tl.constexpr = BIAS == 0 and not (FOLD or ALIBI)  # pyright: ignore[reportAssignmentType]
    for n in tl.range(first, last, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        if BIAS != 0:
            # Ahead of the product: a load that follows it draws the scores into its own layout, and the layout is the
            # order in which a row is summed. With a bias that hides nothing the bits are those without one.
            bias_at = bias_row[:, None] + key.to(tl.int64)[None, :] * bias_stride
            inside = row_exists[:, None] & (key < num_keys)[None, :]
            bias = tl.load(bias_at, mask=inside, other=0 if BIAS == 1 else float("-inf"))
        k_tile = load_tile(
            k, batch, kv_head, start, n, seen_from, num_keys, stride_k, WIDTH, HEAD_DIM, BLOCK_N, TMA, CUT, False
        )
        s = tl.dot(q, tl.trans(k_tile))
        unit = scale_log2
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + e^2x), right for every x: e^2x may be 0 or inf.
            s = 1.0 - 2.0 / (1.0 + tl.exp2(s * inner))
            unit = outer
        if not FOLD:
            s = s * unit
        if ALIBI:
            s = s - slope[:, None] * tl.abs(place[:, None] - key[None, :]).to(tl.float32)
        if BIAS == 1:
            s = tl.where(bias != 0, s, float("-inf"))
        elif BIAS == 2:
            given = bias.to(tl.float32)
            added = given * 1.4426950408889634
            # The least and the greatest finite number hide nothing, as a caller that masks with the least relies on.
            added = tl.where((given > float("-inf")) & (added < -_GREATEST), -_GREATEST, added)
            added = tl.where((given < float("inf")) & (added > _GREATEST), _GREATEST, added)
            # A hidden key may hold NaN.
            s = tl.where(given == float("-inf"), given, s + added)
        if CUT or UNCLEAR:
            visible = (key < num_keys)[None, :]
            if RIGHT:
                visible &= key[None, :] <= place[:, None] + right
            if LEFT:
                visible &= key[None, :] >= place[:, None] - left
            s = tl.where(visible, s, float("-inf"))
        higher = tl.max(s, 1)
        higher = tl.maximum(best, higher * unit if FOLD else higher)
        reference = higher
        if SAFE:
            reference = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2((s * unit if FOLD else s) - reference[:, None])
        kept = tl.exp2(best - reference)
        total = total * kept + tl.sum(p, 1)
        acc = acc * kept[:, None]
        v_tile = load_tile(
            v, batch, kv_head, start, n, seen_from, num_keys, stride_v, WIDTH, HEAD_DIM, BLOCK_N, TMA, CUT, EDGE
        )
        # A key that no row sees is another sequence's or padding: it may hold NaN, and 0 * NaN is NaN.
        if BIAS != 0:
            seen = tl.max(s, 0) > float("-inf")
            v_tile = tl.where(seen[:, None], v_tile, 0.0)
        elif EDGE and TMA and RAGGED:
            v_tile = tl.where(((key >= seen_from) & (key < num_keys))[:, None], v_tile, 0.0)
        elif CUT and RAGGED and TMA:
            v_tile = tl.where((key < num_keys)[:, None], v_tile, 0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)
        best = higher
    return acc, best, total


@triton.jit(do_not_specialize=["num_queries", "num_keys", "tiles", "shift", "left", "right", "num_heads", "group"])
def attention_kernel(
    q_ptr, k, v, out_ptr, lse_ptr, sinks_ptr, slopes_ptr, bias_ptr, starts_q_ptr, starts_k_ptr,
    stride_q, stride_k, stride_v, stride_out, stride_lse, stride_slopes, stride_bias,
    num_heads, group, num_queries, num_keys, tiles, shift, left, right, scale_log2, inner, outer,
    PACK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, RAGGED: tl.constexpr, TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, POSITIVE: tl.constexpr, LSE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Strides: q, out, lse (batch, head, query); k, v (batch, head, key); bias of all four axes."""
    program = tl.program_id(0)
    tile, rest = program % tiles, program // tiles
    head_groups = num_heads // PACK
    batch, head = rest // head_groups, rest % head_groups * PACK
    kv_head = head // group
    start_q, start_k, page = 0, 0, batch
    if RAGGED:
        longest = num_queries
        start_q, start_k = tl.load(starts_q_ptr + batch), tl.load(starts_k_ptr + batch)
        num_queries = tl.load(starts_q_ptr + batch + 1) - start_q
        num_keys = tl.load(starts_k_ptr + batch + 1) - start_k
        if not TOP_LEFT:
            shift = num_keys - num_queries
        if RIGHT:
            num_keys = tl.maximum(tl.minimum(num_keys, num_queries + shift + right), 0)
        # Those beyond max_seqlen_q, for which the grid has no tiles either, are not computed.
        num_queries = tl.minimum(num_queries, longest)
        tiles = tl.minimum(tiles, tl.cdiv(num_queries * PACK, BLOCK_M))
        if tile >= tiles:
            return
        page = 0
    if RIGHT:
        tile = tiles - 1 - tile
    rows = num_queries * PACK
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = row < rows
    query, place = row // PACK, row // PACK + shift
    row_head = (head + row % PACK).to(tl.int64)
    in_q = (start_q + query).to(tl.int64)
    wide_page, wide_kv_head = tl.full([], page, tl.int64), kv_head.to(tl.int64)

    q_row = q_ptr + wide_page * stride_q[0] + row_head * stride_q[1] + in_q * stride_q[2]
    column = tl.arange(0, WIDTH)
    q_mask = row_exists[:, None] & (column < HEAD_DIM)[None, :]
    q = tl.load(q_row[:, None] + column[None, :], mask=q_mask, other=0.0)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    if not TMA:
        from_k, from_v = (
            wide_page * stride_k[0] + wide_kv_head * stride_k[1],
            wide_page * stride_v[0] + wide_kv_head * stride_v[1],
        )
        if RAGGED:
            from_k += start_k.to(tl.int64) * stride_k[2]
            from_v += start_k.to(tl.int64) * stride_v[2]
        k += from_k
        v += from_v

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    slope, bias_row = 0.0, 0
    if ALIBI:
        slope_at = slopes_ptr + batch.to(tl.int64) * stride_slopes[0] + row_head * stride_slopes[1]
        slope = tl.load(slope_at, mask=row_exists, other=0.0) * 1.4426950408889634
    bias_stride = 0
    if BIAS != 0:
        bias_head = bias_ptr + batch.to(tl.int64) * stride_bias[0] + row_head * stride_bias[1]
        bias_row = bias_head + query.to(tl.int64) * stride_bias[2]
        bias_stride = stride_bias[3]

    first_place = tile * BLOCK_M // PACK + shift
    last_place = (tl.minimum(tile * BLOCK_M + BLOCK_M, rows) - 1) // PACK + shift
    end, whole_end = num_keys, num_keys // BLOCK_N * BLOCK_N
    if RIGHT:
        end = tl.maximum(tl.minimum(end, last_place + right + 1), 0)
        whole_end = tl.minimum(whole_end, tl.maximum(first_place + right + 1, 0) // BLOCK_N * BLOCK_N)
    whole_start, seen_from = 0, 0
    if LEFT:
        seen_from = tl.maximum(shift - left, 0)
        if TMA and not RAGGED:
            # The descriptors begin there.
            start_k = -seen_from
        begin = tl.maximum(first_place - left, 0) // BLOCK_N * BLOCK_N
        whole_start = tl.cdiv(tl.maximum(last_place - left, 0), BLOCK_N) * BLOCK_N
        acc, best, total = attend(
            acc, best, total, q, k, v, page, kv_head, start_k, begin,
            tl.minimum(whole_start, end), seen_from, num_keys, place, left, right, stride_k[2], stride_v[2], scale_log2,
            inner, outer, slope, bias_row, bias_stride, row_exists, WIDTH, HEAD_DIM, BLOCK_N, TMA, True, True, LEFT,
            RIGHT, SOFTCAP, ALIBI, BIAS, POSITIVE, RAGGED,
        )  # fmt: skip
    acc, best, total = attend(
        acc, best, total, q, k, v, page, kv_head, start_k, whole_start,
        whole_end, seen_from, num_keys, place, left, right, stride_k[2], stride_v[2], scale_log2, inner, outer,
        slope, bias_row, bias_stride, row_exists, WIDTH, HEAD_DIM, BLOCK_N, TMA, False, False, LEFT, RIGHT, SOFTCAP,
        ALIBI, BIAS, POSITIVE, RAGGED,
    )  # fmt: skip
    if TAIL:
        acc, best, total = attend(
            acc, best, total, q, k, v, page, kv_head, start_k,
            tl.maximum(whole_start, whole_end), end, seen_from, num_keys, place, left, right, stride_k[2], stride_v[2],
            scale_log2, inner, outer, slope, bias_row, bias_stride, row_exists, WIDTH, HEAD_DIM, BLOCK_N, TMA, True,
            False, LEFT, RIGHT, SOFTCAP, ALIBI, BIAS, POSITIVE, RAGGED,
        )  # fmt: skip

    # A row that sees no key gives 0 and -inf, sink or not.
    empty = total == 0.0
    share = tl.full([BLOCK_M], 1.0, tl.float32)
    if SINKS:
        # One more key, of this score and with a value of zero.
        sink = tl.load(sinks_ptr + row_head, mask=row_exists, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.where(empty, 0.0, tl.maximum(best, sink))
        share = tl.exp2(best - higher)
        total = total * share + tl.exp2(sink - higher)
        best = higher
    total = tl.where(empty, 1.0, total)
    share = share / total
    out_row = out_ptr + wide_page * stride_out[0] + row_head * stride_out[1] + in_q * stride_out[2]
    tl.store(out_row[:, None] + column[None, :], (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
    if LSE:
        lse = tl.where(empty, float("-inf"), (best + tl.log2(total)) * 0.6931471805599453)
        lse_row = lse_ptr + wide_page * stride_lse[0] + row_head * stride_lse[1] + in_q * stride_lse[2]
        tl.store(lse_row, lse, mask=row_exists)
