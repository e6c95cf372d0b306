"""Attention inside the wave kernel: split over the keys, from a cache in device memory, by the exchange partition.

One task is one group of up to GP query heads that share a KV head, one sequence, one split of its keys.

Order: request the split's first keys and values, and the rotary angles, before the queries exist; poll queries, new key
and new value at once; normalise and rotate; append the new key and value; each warp attends to its own cached keys, 16
at a time; merge the warps' results with the new token's; publish with the log2-sum-exp2. Whole blocks of keys come
through the ring where the launch STREAMS (streamed.py). Otherwise the next block is loaded while one is multiplied, and
the block _AHEAD of it is prefetched to L2.

Registers: keys and values as operands, scores, sums (float32, online softmax base 2). Operands never pass through
shared memory: a thread loads 16 bytes of a key or a value, and the product's inner index (for values, its columns) is
ordered as the threads hold them; queries use the same order. Numbers of 8 bits are widened there (byte_cache.py).
Shared memory: queries, the new key and value, maxima and sums.

The new key is no warp's, so 512 cached keys make two splits of two rounds, not of three. A short sequence is one split
and is finished here. combine.py merges splits; with MERGE_WORDS > 0 they are published in 16 bits, and product steps
merge them (merge.py). Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onewave.wave.kernel.attend.byte_cache import (
    cache_scale,
    half_pairs,
    key_pairs,
    pair_as_stored,
    stored_dim,
)
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
from onewave.wave.kernel.attend.combine import split_of_keys
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
from onewave.wave.kernel.attend.publish import clear_unused, publish_mergeable, publish_split, publish_whole
from onewave.wave.kernel.attend.streamed import from_ring, release_keys, tiles_of_block, whole_blocks
from onewave.wave.kernel.finish import bits16, to_float
from onewave.wave.kernel.parameters import AttentionMemory, SplitTask
from onewave.wave.kernel.records import place_pointer, record_word
from onewave.wave.kernel.spin import read_words
from onewave.wave.kernel.words import PLACE, WORD

# Blocks of keys, a power of two, between the one that is multiplied and the one that is prefetched to L2.
_AHEAD = gl.constexpr(2)
# Keys a warp multiplies at a time.
_KEYS = gl.constexpr(16)


@gluon.jit
def attention_memory(c):
    """Allocate attention's shared memory: AttentionMemory."""
    D: gl.constexpr = c.D
    queries = gl.allocate_shared_memory(gl.int32, [16, D // 2], query_rows(4, D))
    fresh = gl.allocate_shared_memory(gl.int32, [16, D // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    newest = gl.allocate_shared_memory(gl.float32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Two buffers, because Triton puts a barrier between stores to different parts of one.
    peaks = gl.allocate_shared_memory(gl.float32, [c.XW, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    masses = gl.allocate_shared_memory(gl.float32, [c.XW, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return AttentionMemory(queries=queries, fresh=fresh, newest=newest, peaks=peaks, masses=masses)


@gluon.jit
def queries_and_new(step, site, task, angles, c):
    """Poll the group's queries (rows 0 to GP - 1) and, if has_new, the new key (row GP) and value (row GP + 1).

    All but the value are normalised and rotated (half-split pairs), in float32, then rounded to DTYPE; with a cache in
    8 bits queries to float16, and key and value to what it holds. angles: pointer to the position's cosines and sines.
    Returns 16-bit pairs as words, [rows, D / 2], and what the cache takes of key and value: the same, or as many pairs
    of bytes.
    """
    record = step.record
    D: gl.constexpr = c.D
    GP: gl.constexpr = c.GP
    ROWS: gl.constexpr = max(4, GP * 2)
    QUARTER: gl.constexpr = D // 4
    L3: gl.constexpr = head_words(ROWS, D, c.XW)
    LQ: gl.constexpr = gl.SliceLayout(1, L3)
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None, None]
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None]
    word = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :]
    first = gl.where(head == GP, record_word(record, WORD.K), record_word(record, WORD.Q) + head * (D // 2))
    first = gl.where(head == GP + 1, record_word(record, WORD.V), first)
    real = (head < record_word(record, WORD.HEADS)) | (task.has_new & ((head == GP) | (head == GP + 1)))
    at = first + half * QUARTER + word
    pointers = gl.where(real & (at >= 0), (task.projected + at).to(gl.int64), 0)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LQ))[:, None]
    pair = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, LQ))[None, :] * 2
    cos0 = gl.load(angles + pair)
    cos1 = gl.load(angles + pair + 1)
    sin0 = gl.load(angles + D // 2 + pair)
    sin1 = gl.load(angles + D // 2 + pair + 1)
    if c.QKNORM:
        of_q = place_pointer(step.places, PLACE.Q_NORM, gl.float32) + task.layer * D + pair
        of_k = place_pointer(step.places, PLACE.K_NORM, gl.float32) + task.layer * D + pair
        norm = gl.where(row < GP, of_q, of_k)
        gain0 = gl.load(norm)
        gain1 = gl.load(norm + 1)
        gain2 = gl.load(norm + D // 2)
        gain3 = gl.load(norm + D // 2 + 1)
    if c.KV:
        # Before the wait, like the angles: from L2 they take as long as a sum of the queries.
        inverse = gl.where(
            row == GP + 1, cache_scale(record, step.places, 3, c), cache_scale(record, step.places, 2, c)
        )
    words = read_words(pointers, site, c.SYNC, 8)
    lower, upper = gl.split(gl.permute(words, (0, 2, 1)))
    lower = gl.convert_layout(lower, LQ)
    upper = gl.convert_layout(upper, LQ)
    a0, a1 = to_float(lower, c.DTYPE)
    b0, b1 = to_float(upper, c.DTYPE)
    if c.QKNORM:
        total = gl.sum(a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1, axis=1)
        scale = (1.0 / gl.sqrt(total / D + c.EPS))[:, None]
        a0 = a0 * scale * gain0
        a1 = a1 * scale * gain1
        b0 = b0 * scale * gain2
        b1 = b1 * scale * gain3
    is_value = (row == GP + 1) & (pair >= 0)
    if c.KV == 0:
        turned = bits16(a0 * cos0 - b0 * sin0, c.DTYPE) | (bits16(a1 * cos1 - b1 * sin1, c.DTYPE) << 16)
        and_upper = bits16(b0 * cos0 + a0 * sin0, c.DTYPE) | (bits16(b1 * cos1 + a1 * sin1, c.DTYPE) << 16)
        both = gl.join(gl.where(is_value, lower, turned), gl.where(is_value, upper, and_upper))
        words = gl.reshape(gl.permute(both, (0, 2, 1)), [ROWS, D // 2])
        return words, words
    else:
        is_new = (row >= GP) & (pair >= 0)
        v0, v1 = to_float(lower, c.DTYPE)
        w0, w1 = to_float(upper, c.DTYPE)
        t0 = gl.where(is_value, v0, a0 * cos0 - b0 * sin0)
        t1 = gl.where(is_value, v1, a1 * cos1 - b1 * sin1)
        u0 = gl.where(is_value, w0, b0 * cos0 + a0 * sin0)
        u1 = gl.where(is_value, w1, b1 * cos1 + a1 * sin1)
        lower, lower_bytes = pair_as_stored(t0, t1, is_new, inverse, c.KV)
        upper, upper_bytes = pair_as_stored(u0, u1, is_new, inverse, c.KV)
        words = gl.reshape(gl.permute(gl.join(lower, upper), (0, 2, 1)), [ROWS, D // 2])
        return words, gl.reshape(gl.permute(gl.join(lower_bytes, upper_bytes), (0, 2, 1)), [ROWS, D // 2])


@gluon.jit
def attend(step, site, memory, ring, streamed, xs, c):
    """Attend with one group of heads to one split of one sequence's keys, and publish the result.

    For a split that the sequence does not use, or a sequence beyond the batch, only clear. streamed: tiles of keys and
    values that the ring has had so far. xs: the activations' shared memory, unused while attention runs. Returns how
    many tiles of the ring this task has used.
    """
    record = step.record
    b = record_word(record, WORD.SEQUENCE)
    position, begin, end, splits = keys_of_split(record, step.sequences, c.MERGE_WORDS)
    split = record_word(record, WORD.SLICE)
    if (b < step.sequences.batch) & (split < splits):
        layer = record_word(record, WORD.LAYER)
        rows = rows_of_cache(record, step.sequences, step.places, c)
        projected = step.sets.current + record_word(record, WORD.SOURCE) + b * record_word(record, WORD.SOURCE_STRIDE)
        task = SplitTask(
            rows=rows, projected=projected, begin=begin, end=end, position=position, has_new=split == splits - 1,
            layer=layer,
        )  # fmt: skip
        attend_keys(step, site, task, memory, ring, record_word(record, WORD.COMES) + streamed, xs, c)
        low, high, lse = merge_warps(memory, xs, step, c)
        if splits == 1:
            publish_whole(step, low, high, c)
        else:
            if c.MERGE_WORDS > 0:
                publish_mergeable(step, low, high, lse, c)
            else:
                publish_split(step, low, high, lse, c.D)
        clear_unused(step, splits, c)
    else:
        clear_unused(step, 0, c)
    tiles = 0
    if c.STREAMS:
        tiles = whole_blocks(begin, end) * tiles_of_block(stored_dim(c.D, c.KV))
    return tiles


@gluon.jit
def keys_of_split(record, sequences, MERGE_WORDS: gl.constexpr):
    """Find a task's keys: the new token's position, the split's first cached key and the one after its last, and the
    number of splits."""
    b = record_word(record, WORD.SEQUENCE)
    position = gl.load(sequences.positions + b, mask=b < sequences.batch, other=0)
    length = position.to(gl.int32) + 1
    window = record_word(record, WORD.WINDOW)
    first_key, share, splits = split_of_keys(window, record_word(record, WORD.SPLITS), length, MERGE_WORDS)
    begin = first_key + record_word(record, WORD.SLICE) * share
    return position, begin, gl.minimum(begin + share, length - 1), splits


@gluon.jit
def prefetch_split(record, sequences, places, c):
    """Prefetch a coming attend step's first keys and values to L2, those that the ring does not bring."""
    b = record_word(record, WORD.SEQUENCE)
    position, begin, end, splits = keys_of_split(record, sequences, c.MERGE_WORDS)
    if (b < sequences.batch) & (begin < end):
        rows = rows_of_cache(record, sequences, places, c)
        blocks = whole_blocks(begin, end)
        rest = begin + blocks * (c.XW * _KEYS)
        pages = lines_pages(rows, rest, end, c.XW * _KEYS, c)
        prefetch_keys(rows, pages, rest, end, c.XW * _KEYS, c)
        if c.STREAMS == 0:
            # The first block, and the second if the first is multiplied at once.
            last = gl.minimum(rest, begin + gl.where(rest < end, 1, 2) * (c.XW * _KEYS))
            pages = lines_pages(rows, begin, last, _AHEAD * c.XW * _KEYS, c)
            prefetch_keys(rows, pages, begin, last, _AHEAD * c.XW * _KEYS, c)


@gluon.jit
def inner_order(words, ROWS: gl.constexpr, D: gl.constexpr, KV: gl.constexpr):
    """Reorder rows of words [ROWS, D / 2] by the inner index that a thread's packets of keys have in the product."""
    PACKET: gl.constexpr = 8 if KV else 4  # words of 16 bytes of a key
    named = gl.reshape(words, [ROWS, D // (8 * PACKET), 4, PACKET])
    return gl.reshape(gl.permute(named, (0, 1, 3, 2)), [ROWS, D // 2])


@gluon.jit
def values16(words, DTYPE: gl.constexpr):
    """Split each word into its two 16-bit values, on a new last axis."""
    low = (words & 65535).to(gl.int16).to(DTYPE, bitcast=True)
    high = ((words >> 16) & 65535).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def keys_operand(words, KW: gl.constexpr, B: gl.constexpr, c):
    """Lay keys out as operand B of queries times keys, [XW, D, KW]."""
    D: gl.constexpr = c.D
    XW: gl.constexpr = c.XW
    named = gl.permute(gl.reshape(words, [XW, KW, stored_dim(D, c.KV) // 32, 4, 4]), (0, 1, 2, 4, 3))
    if c.KV:
        first, second = half_pairs(named, c.KV)
        named = gl.permute(gl.join(first, second), (0, 1, 2, 3, 5, 4))
    both = values16(gl.reshape(named, [XW, KW, D // 2]), gl.float16 if c.KV else c.DTYPE)
    both = gl.reshape(both, [XW, KW, D])
    return gl.convert_layout(gl.permute(both, (0, 2, 1)), B)


@gluon.jit
def values_operand(words, KW: gl.constexpr, A: gl.constexpr, c):
    """Lay values out as operand A of values times weights, [XW, D, KW], its rows ordered as in merge_warps."""
    D: gl.constexpr = c.D
    XW: gl.constexpr = c.XW
    if c.KV == 0:
        LOW: gl.constexpr = min(4, D // 16)
        HIGH: gl.constexpr = D // (16 * LOW)
        both = values16(gl.reshape(words, [XW, KW, HIGH, 8, LOW]), c.DTYPE)
        return gl.convert_layout(gl.reshape(gl.permute(both, (0, 2, 4, 5, 3, 1)), [XW, D, KW]), A)
    else:
        WORDS: gl.constexpr = min(4, D // 32)
        RUNS: gl.constexpr = D // (32 * WORDS)
        pairs = gl.permute(gl.reshape(words, [XW, KW // 2, 2, D // 4]), (0, 1, 3, 2))
        even, odd = gl.split(pairs)
        first, second, third, fourth = key_pairs(even, odd, c.KV)
        # [.., word, its value's lower bit, upper bit]
        values = gl.join(gl.join(first, second), gl.join(third, fourth))
        both = values16(gl.reshape(values, [XW, KW // 2, RUNS, 8, WORDS, 2, 2]), gl.float16)
        named = gl.permute(both, (0, 2, 4, 6, 5, 3, 1, 7))
        return gl.convert_layout(gl.reshape(named, [XW, D, KW]), A)


@gluon.jit
def first_rows(score, KW: gl.constexpr, XW: gl.constexpr):
    """Keep the 8 of a product's 16 rows that can be heads: [XW, 8, KW]."""
    used, unused = gl.split(gl.permute(gl.reshape(score, [XW, 2, 8, KW]), (0, 2, 3, 1)))
    return used


@gluon.jit
def attend_keys(step, site, task, memory, ring, tile, xs, c):
    """Attend with each warp to its own keys; leave maxima, sums and weighted values in shared memory.

    The new key's scores too, if task.has_new. First come the keys left over by whole blocks, then the blocks, from the
    ring if the launch STREAMS. tile: the first block's place among the ring's tiles.
    """
    D: gl.constexpr = c.D
    GP: gl.constexpr = c.GP
    XW: gl.constexpr = c.XW
    PAGE: gl.constexpr = c.PAGE
    rows = task.rows
    begin = task.begin
    end = task.end
    queries = memory.queries
    fresh = memory.fresh
    KW: gl.constexpr = _KEYS
    ROWS: gl.constexpr = max(4, GP * 2)
    STORED: gl.constexpr = stored_dim(D, c.KV)
    TYPE: gl.constexpr = gl.float16 if c.KV else c.DTYPE
    LK: gl.constexpr = key_words(KW, STORED, XW)
    LV: gl.constexpr = value_words(KW, STORED, XW)
    ACC: gl.constexpr = product(XW)
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    BLOCK: gl.constexpr = XW * KW
    HALF: gl.constexpr = tiles_of_block(STORED) // 2
    # Where the ring has one tile more than a block, keys' slots are freed first: the next block comes sooner
    # (docs/log/wave-attention.md, "Keys' slots freed before values'").
    APART: gl.constexpr = c.S <= 2 * HALF + 1
    blocks = whole_blocks(begin, end)
    rest = begin + blocks * BLOCK
    at = rest
    coming = begin
    ahead = 0
    if c.STREAMS == 0:
        at = gl.where(rest < end, rest, begin)
        coming = gl.where(rest < end, begin, begin + BLOCK)
    pages = blocks_pages(rows, at, end, KW, LK, c)
    k_words = load_keys(rows, pages, at, end, PLACE.KEYS, KW, LK, c)
    v_words = load_keys(rows, pages, at, end, PLACE.VALUES, KW, LV, c)
    if c.STREAMS == 0:
        # A block ahead of the keys, so that nothing waits for them.
        pages = blocks_pages(rows, coming, rest, KW, LK, c)
        ahead = lines_pages(rows, coming + (_AHEAD - 1) * BLOCK, rest, BLOCK, c)
    in_pages = 0
    if PAGE > 0:
        page = page_of(rows.table, task.position, task.has_new, PAGE)
        in_pages = words_to(rows.table, page, task.position, STORED, PAGE)
    angles = place_pointer(step.places, PLACE.ROTARY, gl.float32) + task.position * D
    factor = score_factor(step, c)
    words, kept = queries_and_new(step, site, task, angles, c)
    some = queries._reinterpret(gl.int32, [16 // ROWS, ROWS, D // 2], query_rows(4, D))
    some.index(0).store(inner_order(words, ROWS, D, c.KV))
    plain = fresh._reinterpret(gl.int32, [16 // ROWS, ROWS, D // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    plain.index(0).store(words)
    if task.has_new:
        LW: gl.constexpr = words.type.layout
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LW))[:, None]
        word = gl.arange(0, D // 2, layout=gl.SliceLayout(0, LW))[None, :]
        new_k, new_v = base_of(rows, PLACE.KEYS, PAGE), base_of(rows, PLACE.VALUES, PAGE)
        target = gl.where((row == GP) & (word >= 0), new_k, new_v)
        if PAGE > 0:
            target = target + in_pages + (0 if c.KV else word)
        else:
            target = target + task.position * (D // 2) + word
        writes = (record_word(step.record, WORD.APPENDS) > 0) & (step.withheld == 0)
        mask = ((row == GP) | (row == GP + 1)) & (word >= 0) & writes
        if c.KV == 0:
            gl.store(target, words, mask=mask)
        else:
            gl.store(target.to(gl.pointer_type(gl.int16)) + word, kept.to(gl.int16), mask=mask)
    gl.thread_barrier()
    memory.newest.store(new_scores(fresh, task.has_new, factor, c))
    LS: gl.constexpr = first_rows(gl.zeros([XW, 16, KW], gl.float32, ACC), KW, XW).type.layout
    number = gl.expand_dims(numbers(KW, XW, gl.SliceLayout(1, LS)), 1)
    peak = gl.full([XW, 8], float("-inf"), gl.float32, gl.SliceLayout(2, LS))
    mass = gl.zeros([XW, 8], gl.float32, gl.SliceLayout(2, LS))
    acc = gl.zeros([XW, D, 8], gl.float32, ACC)
    if c.STREAMS:
        if (rest >= end) & (blocks > 0):
            k_words = from_ring(ring, tile, LK, key_rows(STORED, XW), KW, c)
            v_words = from_ring(ring, tile + HALF, LV, value_rows(STORED, XW), KW, c)
            release_keys(ring, tile, 2 * HALF, c)
            tile += 2 * HALF
            at = begin
            coming = begin + BLOCK
    left = end - at  # keys in this block and after it
    while left > 0:
        # Loaded for every block: at head_dim 128 they would not fit the registers.
        q = queries._reinterpret(TYPE, [16, D], query_rows(8, D)).load(gl.SliceLayout(0, A))
        q, every_warp = gl.broadcast(q[None, :, :], gl.zeros([XW, 16, D], TYPE, A))
        if c.STREAMS == 0:
            prefetch_keys(rows, ahead, coming + (_AHEAD - 1) * BLOCK, rest, BLOCK, c)
        k = keys_operand(k_words, KW, B, c)
        score = mma_v2(q, k, gl.zeros([XW, 16, KW], gl.float32, ACC))
        score = scaled(first_rows(score, KW, XW), factor, c)
        # Keys and values are loaded as soon as their registers are free: both together would not fit at head_dim 128.
        if c.STREAMS:
            if coming < rest:
                k_words = from_ring(ring, tile, LK, key_rows(STORED, XW), KW, c)
                if APART:
                    release_keys(ring, tile, HALF, c)
        else:
            k_words = load_keys(rows, pages, coming, rest, PLACE.KEYS, KW, LK, c)
        score = gl.where(number < left, score, float("-inf"))
        higher = gl.maximum(peak, gl.max(score, axis=2))
        finite = gl.where(higher == float("-inf"), 0.0, higher)
        weight = gl.exp2(score - finite[:, :, None])
        fade = gl.exp2(peak - finite)
        mass = mass * fade + gl.sum(weight, axis=2)
        # Transposed, so that the heads are the narrow side and the weights' registers the operand's.
        v = values_operand(v_words, KW, A, c)
        p = gl.convert_layout(gl.permute(weight.to(TYPE), (0, 2, 1)), B)
        acc = mma_v2(v, p, acc * gl.convert_layout(fade, gl.SliceLayout(1, ACC))[:, None, :])
        if c.STREAMS:
            if coming < rest:
                v_words = from_ring(ring, tile + HALF, LV, value_rows(STORED, XW), KW, c)
                if APART:
                    release_keys(ring, tile + HALF, HALF, c)
                else:
                    release_keys(ring, tile, 2 * HALF, c)
                tile += 2 * HALF
        else:
            v_words = load_keys(rows, pages, coming, rest, PLACE.VALUES, KW, LV, c)
            pages = blocks_pages(rows, coming + BLOCK, rest, KW, LK, c)
            ahead = lines_pages(rows, coming + _AHEAD * BLOCK, rest, BLOCK, c)
        peak = higher
        left = rest - coming
        coming += BLOCK
    memory.peaks.store(peak)
    memory.masses.store(mass)
    xs._reinterpret(gl.float32, [XW, 8, D], warps_rows(D)).store(gl.permute(acc, (0, 2, 1)))
    gl.thread_barrier()


@gluon.jit
def score_factor(step, c):
    """The factor that makes scores, base 2, of products of queries and cached keys; 1 of 16-bit ones, see `scaled`."""
    if c.KV == 0:
        return 1.0
    else:
        return cache_scale(step.record, step.places, 0, c) * (c.SCALE * 1.4426950408889634)


@gluon.jit
def scaled(products, factor, c):
    """Scores, base 2, from products of queries and keys. factor: score_factor."""
    if c.KV == 0:
        return products * (c.SCALE * 1.4426950408889634)
    else:
        return products * factor


@gluon.jit
def new_scores(fresh, has_new, factor, c):
    """Score the new key with each of 8 heads, base 2; -inf for all without one."""
    D: gl.constexpr = c.D
    TYPE: gl.constexpr = gl.float16 if c.KV else c.DTYPE
    L2: gl.constexpr = gl.BlockedLayout([1, max(1, D // 64)], [1, 32], [c.XW, 1], [1, 0])
    rows = fresh._reinterpret(gl.int32, [2, 8, D // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    q_low, q_high = to_float(rows.index(0).load(L2), TYPE)
    k_low, k_high = to_float(fresh.index(c.GP).load(gl.SliceLayout(0, L2)), TYPE)
    score = scaled(gl.sum(q_low * k_low[None, :] + q_high * k_high[None, :], axis=1), factor, c)
    return gl.where(has_new, score, float("-inf"))


@gluon.jit
def merge_warps(memory, xs, step, c):
    """Merge the warps' results and the new key's, in float32.

    Returns each head's even and odd values, [8, D / 2], and its log2-sum-exp2, [8].
    """
    D: gl.constexpr = c.D
    XW: gl.constexpr = c.XW
    TYPE: gl.constexpr = gl.float16 if c.KV else c.DTYPE
    LOW: gl.constexpr = min(8, D // 16) if c.KV else min(4, D // 16)
    HIGH: gl.constexpr = D // (16 * LOW)
    L3: gl.constexpr = merged_words(D, XW)
    if c.KV:
        v_scale = cache_scale(step.record, step.places, 1, c)
    part = xs._reinterpret(gl.float32, [XW, 8, D], warps_rows(D)).load(L3)
    peak = memory.peaks.load(gl.SliceLayout(2, L3))
    score = memory.newest.load(gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    top = gl.maximum(gl.max(peak, axis=0), score)
    finite = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2(peak - finite[None, :])
    own = gl.exp2(score - finite)
    mass = gl.sum(memory.masses.load(gl.SliceLayout(2, L3)) * weight, axis=0) + own
    total = gl.sum(part * weight[:, :, None], axis=0)
    inverse = 1.0 / mass
    if c.KV:
        inverse = inverse * v_scale
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, gl.SliceLayout(0, L3)))
    named = gl.reshape(total * inverse[:, None], [8, HIGH, LOW, 2, 8])
    low, high = gl.split(gl.reshape(gl.permute(named, (0, 1, 4, 2, 3)), [8, D // 2, 2]))
    LW: gl.constexpr = low.type.layout
    share = own / mass
    if c.KV:
        share = share * v_scale
    share = gl.convert_layout(share, gl.SliceLayout(1, LW))[:, None]
    new_low, new_high = to_float(memory.fresh.index(c.GP + 1).load(gl.SliceLayout(0, LW)), TYPE)
    return low + share * new_low[None, :], high + share * new_high[None, :], finite + gl.log2(mass)
