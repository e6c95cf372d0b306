"""Attention inside the wave kernel: split over the keys, from a cache in device memory, by the exchange partition.

attend: one task is one group of up to GP query heads that share a KV head, one sequence, one split of its keys. The
split's first keys and values, and all that queries are rotated with, are on their way before the queries exist; then
queries, new key and new value are polled at once, normalised and rotated, the new ones appended, and each of the warps
goes over its own cached keys, whole blocks of which come through the ring where the launch STREAMS (streamed.py), on
the tensor cores with an online softmax in float32. The warps' results and the new token's are merged and published with
their log2-sum-exp2; combine.py merges the splits. The new key is no warp's, so that 512 cached ones are two splits of
two rounds, not of three. A short sequence is one split, and is finished here. If the output projection merges the
splits (FEW, see merge.py), their values are published in 16 bits.

Operands never leave registers between device memory and mma: a thread loads 16 bytes of a key or a value, and what they
count as in the product's inner index (or in its columns, for values) is a matter of naming; queries go by the same
names.
"""
# ruff: noqa: RET505, SIM102, SIM108, RUF059, RUF005, B007, RUF100
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnusedVariable=false, reportReturnType=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onewave.wave.kernel.attend.cached import (
    base_of,
    blocks_pages,
    lines_pages,
    load_keys,
    numbers,
    page_of,
    prefetch_keys,
    rows_of_cache,
    words_to,
)
from onewave.wave.kernel.attend.combine import read_words, split_of_keys
from onewave.wave.kernel.attend.layouts import (
    head_words,
    key_rows,
    key_words,
    merged_words,
    product,
    query_rows,
    value_rows,
    value_words,
    warps_rows,
)
from onewave.wave.kernel.attend.show import clear_others, show_few, show_part, show_whole
from onewave.wave.kernel.attend.streamed import from_ring, let_go_of_keys, tiles_of_block, whole_blocks
from onewave.wave.kernel.finish import bits16, to_float
from onewave.wave.kernel.records import noted, place_of
from onewave.wave.kernel.words import (
    PLACE_K_NORM,
    PLACE_KEYS,
    PLACE_Q_NORM,
    PLACE_ROTARY,
    PLACE_VALUES,
    WORD_APPENDS,
    WORD_COMES,
    WORD_HEADS,
    WORD_K,
    WORD_LAYER,
    WORD_Q,
    WORD_SEQUENCE,
    WORD_SLICE,
    WORD_SOURCE,
    WORD_SOURCE_STRIDE,
    WORD_SPLITS,
    WORD_V,
    WORD_WINDOW,
)

__all__ = ["attend", "heads_memory", "prefetch_split"]

# Blocks of keys, a power of two, between the one that is multiplied and the one on its way into the second-level cache.
_AHEAD = gl.constexpr(2)
# Keys a warp multiplies at a time.
_KEYS = gl.constexpr(16)


@gluon.jit
def heads_memory(D: gl.constexpr, XW: gl.constexpr):
    """Shared memory of a decode step: queries, the new key and value, its scores, the warps' maxima and sums."""
    queries = gl.allocate_shared_memory(gl.int32, [16, D // 2], query_rows(4, D))
    fresh = gl.allocate_shared_memory(gl.int32, [16, D // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    newest = gl.allocate_shared_memory(gl.float32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Of their own, as Triton puts a barrier between stores to different parts of one buffer.
    peaks = gl.allocate_shared_memory(gl.float32, [XW, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    masses = gl.allocate_shared_memory(gl.float32, [XW, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return queries, fresh, newest, peaks, masses


@gluon.jit
def queries_and_new(
    record, new, angles, layer, has_new, places, watch, block, step,
    DTYPE: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, QKNORM: gl.constexpr, EPS: gl.constexpr,
    SYNC: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Poll the group's queries (rows 0 to GP - 1) and, if has_new, the new key (row GP) and value (row GP + 1);
    normalise and rotate (half-split pairs) all but the value. Returns 16-bit pairs as words, [rows, D / 2].
    """
    ROWS: gl.constexpr = max(4, GP * 2)
    QUARTER: gl.constexpr = D // 4
    L3: gl.constexpr = head_words(ROWS, D, XW)
    LQ: gl.constexpr = gl.SliceLayout(1, L3)
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None, None]
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None]
    word = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :]
    first = gl.where(head == GP, noted(record, WORD_K), noted(record, WORD_Q) + head * (D // 2))
    first = gl.where(head == GP + 1, noted(record, WORD_V), first)
    real = (head < noted(record, WORD_HEADS)) | (has_new & ((head == GP) | (head == GP + 1)))
    at = first + half * QUARTER + word
    pointers = gl.where(real & (at >= 0), (new + at).to(gl.int64), 0)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LQ))[:, None]
    pair = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, LQ))[None, :] * 2
    cos0 = gl.load(angles + pair)
    cos1 = gl.load(angles + pair + 1)
    sin0 = gl.load(angles + D // 2 + pair)
    sin1 = gl.load(angles + D // 2 + pair + 1)
    if QKNORM:
        of_q = place_of(places, PLACE_Q_NORM, gl.float32) + layer * D + pair
        of_k = place_of(places, PLACE_K_NORM, gl.float32) + layer * D + pair
        norm = gl.where(row < GP, of_q, of_k)
        gain0 = gl.load(norm)
        gain1 = gl.load(norm + 1)
        gain2 = gl.load(norm + D // 2)
        gain3 = gl.load(norm + D // 2 + 1)
    words = read_words(pointers, watch, block, step, SYNC, 8)
    lower, upper = gl.split(gl.permute(words, (0, 2, 1)))
    lower = gl.convert_layout(lower, LQ)
    upper = gl.convert_layout(upper, LQ)
    a0, a1 = to_float(lower, DTYPE)
    b0, b1 = to_float(upper, DTYPE)
    if QKNORM:
        total = gl.sum(a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1, axis=1)
        scale = (1.0 / gl.sqrt(total / D + EPS))[:, None]
        a0 = a0 * scale * gain0
        a1 = a1 * scale * gain1
        b0 = b0 * scale * gain2
        b1 = b1 * scale * gain3
    is_value = (row == GP + 1) & (pair >= 0)
    turned = bits16(a0 * cos0 - b0 * sin0, DTYPE) | (bits16(a1 * cos1 - b1 * sin1, DTYPE) << 16)
    and_upper = bits16(b0 * cos0 + a0 * sin0, DTYPE) | (bits16(b1 * cos1 + a1 * sin1, DTYPE) << 16)
    both = gl.join(gl.where(is_value, lower, turned), gl.where(is_value, upper, and_upper))
    return gl.reshape(gl.permute(both, (0, 2, 1)), [ROWS, D // 2])


@gluon.jit
def attend(
    record, ours, theirs, positions, slots, places, watch, block, step, batch, keep_back, heads, ring, full, empty,
    streamed, xs, DTYPE: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, QKNORM: gl.constexpr, EPS: gl.constexpr,
    SCALE: gl.constexpr, SYNC: gl.constexpr, S: gl.constexpr, XW: gl.constexpr, FEW: gl.constexpr, PAGE: gl.constexpr,
    STREAMS: gl.constexpr,
):  # fmt: skip
    """One group of heads over one split of one sequence's keys. Of a split that the sequence does not use, or for a
    sequence beyond the batch, only clear. xs: the activations' shared memory, which no step needs while one attends.
    streamed: tiles of keys and values that the ring has had so far. Returns how many of this task's it has."""
    b = noted(record, WORD_SEQUENCE)
    position, begin, end, splits = keys_of_split(record, positions, batch, FEW)
    split = noted(record, WORD_SLICE)
    if (b < batch) & (split < splits):
        layer = noted(record, WORD_LAYER)
        k_rows, v_rows, table = rows_of_cache(record, slots, places, PAGE)
        new = ours + noted(record, WORD_SOURCE) + b * noted(record, WORD_SOURCE_STRIDE)
        attend_keys(
            record, new, k_rows, v_rows, table, begin, end, position, split == splits - 1, layer, places, watch, block,
            step, keep_back, heads, ring, full, empty, noted(record, WORD_COMES) + streamed, xs, DTYPE, D, GP, QKNORM,
            EPS, SCALE, SYNC, S, XW, PAGE, STREAMS,
        )  # fmt: skip
        low, high, lse = merge_warps(heads, xs, DTYPE, D, GP, XW)
        if splits == 1:
            show_whole(record, ours, theirs, low, high, keep_back, DTYPE, D)
        else:
            if FEW > 0:
                show_few(record, ours, theirs, low, high, lse, keep_back, DTYPE, D)
            else:
                show_part(record, ours, theirs, low, high, lse, keep_back, D)
        clear_others(record, theirs, splits, D, GP, FEW, XW)
    else:
        clear_others(record, theirs, 0, D, GP, FEW, XW)
    tiles = 0
    if STREAMS:
        tiles = whole_blocks(begin, end) * tiles_of_block(D)
    return tiles


@gluon.jit
def keys_of_split(record, positions, batch, FEW: gl.constexpr):
    """The new token's position, the split's first cached key and the one after its last, and how many splits there
    are."""
    b = noted(record, WORD_SEQUENCE)
    position = gl.load(positions + b, mask=b < batch, other=0)
    length = position.to(gl.int32) + 1
    first_key, share, splits = split_of_keys(noted(record, WORD_WINDOW), noted(record, WORD_SPLITS), length, FEW)
    begin = first_key + noted(record, WORD_SLICE) * share
    return position, begin, gl.minimum(begin + share, length - 1), splits


@gluon.jit
def prefetch_split(
    record, positions, slots, places, batch, D: gl.constexpr, XW: gl.constexpr, FEW: gl.constexpr, PAGE: gl.constexpr,
    STREAMS: gl.constexpr,
):  # fmt: skip
    """Have a coming attend step's first keys and values brought into the second-level cache, as far as the ring does
    not bring them."""
    b = noted(record, WORD_SEQUENCE)
    position, begin, end, splits = keys_of_split(record, positions, batch, FEW)
    if (b < batch) & (begin < end):
        k_rows, v_rows, table = rows_of_cache(record, slots, places, PAGE)
        blocks = whole_blocks(begin, end)
        rest = begin + blocks * (XW * _KEYS)
        pages = lines_pages(table, rest, end, XW * _KEYS, D, XW, PAGE)
        prefetch_keys(k_rows, v_rows, table, pages, rest, end, XW * _KEYS, D, XW, PAGE)
        if STREAMS == 0:
            # The first block, and a second one if it is the first that is worked on.
            last = gl.minimum(rest, begin + gl.where(rest < end, 1, 2) * (XW * _KEYS))
            pages = lines_pages(table, begin, last, _AHEAD * XW * _KEYS, D, XW, PAGE)
            prefetch_keys(k_rows, v_rows, table, pages, begin, last, _AHEAD * XW * _KEYS, D, XW, PAGE)


@gluon.jit
def inner_order(words, ROWS: gl.constexpr, D: gl.constexpr):
    """Rows of words [ROWS, D / 2] under the names that a thread's packets have in the product's inner index."""
    return gl.reshape(gl.permute(gl.reshape(words, [ROWS, D // 32, 4, 4]), (0, 1, 3, 2)), [ROWS, D // 2])


@gluon.jit
def values16(words, DTYPE: gl.constexpr):
    """The two 16-bit values of each word, on a new last axis."""
    low = (words & 65535).to(gl.int16).to(DTYPE, bitcast=True)
    high = ((words >> 16) & 65535).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def keys_operand(words, DTYPE: gl.constexpr, D: gl.constexpr, KW: gl.constexpr, XW: gl.constexpr, B: gl.constexpr):
    """Keys as operand B of queries times keys, [XW, D, KW]."""
    named = gl.permute(gl.reshape(words, [XW, KW, D // 32, 4, 4]), (0, 1, 2, 4, 3))
    both = gl.reshape(values16(gl.reshape(named, [XW, KW, D // 2]), DTYPE), [XW, KW, D])
    return gl.convert_layout(gl.permute(both, (0, 2, 1)), B)


@gluon.jit
def values_operand(words, DTYPE: gl.constexpr, D: gl.constexpr, KW: gl.constexpr, XW: gl.constexpr, A: gl.constexpr):
    """Values as operand A of values times weights, [XW, D, KW], its rows named as in merge_warps."""
    LOW: gl.constexpr = min(4, D // 16)
    HIGH: gl.constexpr = D // (16 * LOW)
    both = values16(gl.reshape(words, [XW, KW, HIGH, 8, LOW]), DTYPE)
    return gl.convert_layout(gl.reshape(gl.permute(both, (0, 2, 4, 5, 3, 1)), [XW, D, KW]), A)


@gluon.jit
def first_rows(score, KW: gl.constexpr, XW: gl.constexpr):
    """The 8 of a product's 16 rows that can be heads, [XW, 8, KW]."""
    used, unused = gl.split(gl.permute(gl.reshape(score, [XW, 2, 8, KW]), (0, 2, 3, 1)))
    return used


@gluon.jit
def attend_keys(
    record, new, k_rows, v_rows, table, begin, end, position, has_new, layer, places, watch, block, step, keep_back,
    heads, ring, full, empty, tile, xs, DTYPE: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, QKNORM: gl.constexpr,
    EPS: gl.constexpr, SCALE: gl.constexpr, SYNC: gl.constexpr, S: gl.constexpr, XW: gl.constexpr, PAGE: gl.constexpr,
    STREAMS: gl.constexpr,
):  # fmt: skip
    """Each warp goes over its own keys, from begin to before end, and leaves its maxima, sums and weighted values in
    shared memory; has_new: the new key's scores, too. First what whole blocks of keys leave over, then the blocks, from
    the ring if the launch STREAMS: `tile` is the first one's place among the ring's tiles."""
    queries, fresh, newest, peaks, masses = heads
    KW: gl.constexpr = _KEYS
    ROWS: gl.constexpr = max(4, GP * 2)
    LK: gl.constexpr = key_words(KW, D, XW)
    LV: gl.constexpr = value_words(KW, D, XW)
    ACC: gl.constexpr = product(XW)
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    BLOCK: gl.constexpr = XW * KW
    blocks = whole_blocks(begin, end)
    rest = begin + blocks * BLOCK
    at = rest
    coming = begin
    ahead = 0
    if STREAMS == 0:
        at = gl.where(rest < end, rest, begin)
        coming = gl.where(rest < end, begin, begin + BLOCK)
    pages = blocks_pages(table, at, end, KW, XW, LK, PAGE)
    k_words = load_keys(k_rows, table, pages, at, end, PLACE_KEYS, D, KW, XW, LK, PAGE)
    v_words = load_keys(v_rows, table, pages, at, end, PLACE_VALUES, D, KW, XW, LV, PAGE)
    if STREAMS == 0:
        # A block ahead of the keys, which nothing then holds up.
        pages = blocks_pages(table, coming, rest, KW, XW, LK, PAGE)
        ahead = lines_pages(table, coming + (_AHEAD - 1) * BLOCK, rest, BLOCK, D, XW, PAGE)
    in_pages = 0
    if PAGE > 0:
        in_pages = words_to(table, page_of(table, position, has_new, PAGE), position, D, PAGE)
    angles = place_of(places, PLACE_ROTARY, gl.float32) + position * D
    words = queries_and_new(
        record, new, angles, layer, has_new, places, watch, block, step,
        DTYPE, D, GP, QKNORM, EPS, SYNC, XW,
    )  # fmt: skip
    some = queries._reinterpret(gl.int32, [16 // ROWS, ROWS, D // 2], query_rows(4, D))
    some.index(0).store(inner_order(words, ROWS, D))
    rows = fresh._reinterpret(gl.int32, [16 // ROWS, ROWS, D // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    rows.index(0).store(words)
    if has_new:
        LW: gl.constexpr = words.type.layout
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LW))[:, None]
        word = gl.arange(0, D // 2, layout=gl.SliceLayout(0, LW))[None, :]
        new_k, new_v = base_of(k_rows, table, PLACE_KEYS, PAGE), base_of(v_rows, table, PLACE_VALUES, PAGE)
        target = gl.where((row == GP) & (word >= 0), new_k, new_v)
        if PAGE > 0:
            target = target + in_pages + word
        else:
            target = target + position * (D // 2) + word
        writes = (noted(record, WORD_APPENDS) > 0) & (keep_back == 0)
        gl.store(target, words, mask=((row == GP) | (row == GP + 1)) & (word >= 0) & writes)
    gl.thread_barrier()
    newest.store(new_scores(fresh, has_new, DTYPE, D, GP, SCALE, XW))
    LS: gl.constexpr = first_rows(gl.zeros([XW, 16, KW], gl.float32, ACC), KW, XW).type.layout
    number = gl.expand_dims(numbers(KW, XW, gl.SliceLayout(1, LS)), 1)
    peak = gl.full([XW, 8], float("-inf"), gl.float32, gl.SliceLayout(2, LS))
    mass = gl.zeros([XW, 8], gl.float32, gl.SliceLayout(2, LS))
    acc = gl.zeros([XW, D, 8], gl.float32, ACC)
    if STREAMS:
        if (rest >= end) & (blocks > 0):
            k_words = from_ring(ring, full, tile, LK, key_rows(D, XW), D, KW, XW, S)
            v_words = from_ring(ring, full, tile + D // 64, LV, value_rows(D, XW), D, KW, XW, S)
            let_go_of_keys(empty, tile, D, S)
            tile += tiles_of_block(D)
            at = begin
            coming = begin + BLOCK
    left = end - at  # in this block and behind it
    while left > 0:
        # Read for every block: at head_dim 128 there are no registers to keep them in.
        q = queries._reinterpret(DTYPE, [16, D], query_rows(8, D)).load(gl.SliceLayout(0, A))
        q, every_warp = gl.broadcast(q[None, :, :], gl.zeros([XW, 16, D], DTYPE, A))
        if STREAMS == 0:
            prefetch_keys(k_rows, v_rows, table, ahead, coming + (_AHEAD - 1) * BLOCK, rest, BLOCK, D, XW, PAGE)
        k = keys_operand(k_words, DTYPE, D, KW, XW, B)
        score = mma_v2(q, k, gl.zeros([XW, 16, KW], gl.float32, ACC))
        score = first_rows(score, KW, XW) * (SCALE * 1.4426950408889634)
        # Loaded as soon as their registers are free: both in one place would not fit at head_dim 128.
        if STREAMS:
            if coming < rest:
                k_words = from_ring(ring, full, tile, LK, key_rows(D, XW), D, KW, XW, S)
        else:
            k_words = load_keys(k_rows, table, pages, coming, rest, PLACE_KEYS, D, KW, XW, LK, PAGE)
        score = gl.where(number < left, score, float("-inf"))
        higher = gl.maximum(peak, gl.max(score, axis=2))
        finite = gl.where(higher == float("-inf"), 0.0, higher)
        weight = gl.exp2(score - finite[:, :, None])
        fade = gl.exp2(peak - finite)
        mass = mass * fade + gl.sum(weight, axis=2)
        # Transposed, so that the heads are the narrow side and the weights' registers the operand's.
        v = values_operand(v_words, DTYPE, D, KW, XW, A)
        p = gl.convert_layout(gl.permute(weight.to(DTYPE), (0, 2, 1)), B)
        acc = mma_v2(v, p, acc * gl.convert_layout(fade, gl.SliceLayout(1, ACC))[:, None, :])
        if STREAMS:
            if coming < rest:
                v_words = from_ring(ring, full, tile + D // 64, LV, value_rows(D, XW), D, KW, XW, S)
                let_go_of_keys(empty, tile, D, S)
                tile += tiles_of_block(D)
        else:
            v_words = load_keys(v_rows, table, pages, coming, rest, PLACE_VALUES, D, KW, XW, LV, PAGE)
            pages = blocks_pages(table, coming + BLOCK, rest, KW, XW, LK, PAGE)
            ahead = lines_pages(table, coming + _AHEAD * BLOCK, rest, BLOCK, D, XW, PAGE)
        peak = higher
        left = rest - coming
        coming += BLOCK
    peaks.store(peak)
    masses.store(mass)
    xs._reinterpret(gl.float32, [XW, 8, D], warps_rows(D)).store(gl.permute(acc, (0, 2, 1)))
    gl.thread_barrier()


@gluon.jit
def new_scores(
    fresh, has_new, DTYPE: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, SCALE: gl.constexpr, XW: gl.constexpr
):  # fmt: skip
    """The new key's score with each of 8 heads, base 2; -inf for all without one."""
    L2: gl.constexpr = gl.BlockedLayout([1, max(1, D // 64)], [1, 32], [XW, 1], [1, 0])
    rows = fresh._reinterpret(gl.int32, [2, 8, D // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    q_low, q_high = to_float(rows.index(0).load(L2), DTYPE)
    k_low, k_high = to_float(fresh.index(GP).load(gl.SliceLayout(0, L2)), DTYPE)
    score = gl.sum(q_low * k_low[None, :] + q_high * k_high[None, :], axis=1) * (SCALE * 1.4426950408889634)
    return gl.where(has_new, score, float("-inf"))


@gluon.jit
def merge_warps(heads, xs, DTYPE: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, XW: gl.constexpr):
    """The warps' results and the new key's, merged: of each head the even and the odd values, float32 [8, D / 2], and
    their log2-sum-exp2."""
    queries, fresh, newest, peaks, masses = heads
    LOW: gl.constexpr = min(4, D // 16)
    HIGH: gl.constexpr = D // (16 * LOW)
    L3: gl.constexpr = merged_words(D, XW)
    part = xs._reinterpret(gl.float32, [XW, 8, D], warps_rows(D)).load(L3)
    peak = peaks.load(gl.SliceLayout(2, L3))
    score = newest.load(gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    top = gl.maximum(gl.max(peak, axis=0), score)
    finite = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2(peak - finite[None, :])
    own = gl.exp2(score - finite)
    mass = gl.sum(masses.load(gl.SliceLayout(2, L3)) * weight, axis=0) + own
    total = gl.sum(part * weight[:, :, None], axis=0)
    inverse = gl.convert_layout(1.0 / mass, gl.SliceLayout(1, gl.SliceLayout(0, L3)))
    named = gl.reshape(total * inverse[:, None], [8, HIGH, LOW, 2, 8])
    low, high = gl.split(gl.reshape(gl.permute(named, (0, 1, 4, 2, 3)), [8, D // 2, 2]))
    LW: gl.constexpr = low.type.layout
    share = gl.convert_layout(own / mass, gl.SliceLayout(1, LW))[:, None]
    new_low, new_high = to_float(fresh.index(GP + 1).load(gl.SliceLayout(0, LW)), DTYPE)
    return low + share * new_low[None, :], high + share * new_high[None, :], finite + gl.log2(mass)
