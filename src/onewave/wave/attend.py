"""Attention inside the wave kernel: split over the keys, from a cache in device memory, by the exchange partition.

attend: one task is one group of GP query heads that share a KV head, one sequence, one split of its keys. The first
keys are loaded before the queries exist; then the queries (and in the last split the new key and value) are polled,
normalised and rotated, the new key and value appended, and each of the warps goes over its own keys with an online
softmax in float32; the warps' results are merged and published with their log2-sum-exp2. combine merges the splits.

A head's values travel as even and odd ones, the two halves of 32-bit words. places, int64: pointers to 0 the embedding,
1 rotary rows (float32 [positions, D]: cosines, then sines), 2 and 3 the caches, 4 the residual stream (float32), 5 the
biases, 6 and 7 the norms of q and k (float32 [layers, D]); strides in words 8 a layer, 9 a slot, 10 a head.
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

from onewave.wave.finish import bits16, bits32, place_of, to_float
from onewave.wave.spin import ABSENT, load_words, poll_words

__all__ = ["attend", "combine", "heads_memory"]


@gluon.jit
def heads_memory(D: gl.constexpr, GP: gl.constexpr, XW: gl.constexpr):
    """Shared memory of a decode step: rotated queries and the new key and value, then the warps' partial results."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDTH: gl.constexpr = D // 2
    queries = gl.allocate_shared_memory(gl.float32, [2 * GP, WIDTH], LINE)
    fresh = gl.allocate_shared_memory(gl.float32, [4, WIDTH], LINE)
    sums = gl.allocate_shared_memory(gl.float32, [2 * GP, XW, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    scales = gl.allocate_shared_memory(gl.float32, [2 * GP, XW], LINE)
    return queries, fresh, sums, scales


@gluon.jit
def read_words(pointers, watch, block, step, SYNC: gl.constexpr, WORDS: gl.constexpr):
    if SYNC == 1:
        return load_words(pointers, WORDS)
    else:
        return poll_words(pointers, watch, block, step, WORDS)


@gluon.jit
def whole(lower, upper, ROWS: gl.constexpr, HALF: gl.constexpr):
    """Two halves [ROWS, HALF] side by side: [ROWS, 2 * HALF]."""
    return gl.reshape(gl.permute(gl.join(lower, upper), (0, 2, 1)), [ROWS, 2 * HALF])


@gluon.jit
def rotated(
    base, stride, valid, norm, angles, exchange, watch, block, step, DTYPE: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, QKNORM: gl.constexpr, EPS: gl.constexpr, SYNC: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Poll `ROWS` heads, normalise and rotate them (half-split pairs); returns their even and odd values, [ROWS, D/2].

    base: pointer to the first head's words; stride: words a head; valid: heads that exist.
    """
    QUARTER: gl.constexpr = D // 4
    LANES: gl.constexpr = min(8, QUARTER // 4)
    LQ: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [XW, 1], [1, 0])
    COVERED: gl.constexpr = QUARTER // (4 * LANES)
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LQ))
    word = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, LQ))
    nothing = exchange + (word % 4)[None, :] + (head * 0)[:, None]
    real = (head < valid)[:, None] & (word >= 0)[None, :]
    at = base + (head * stride)[:, None] + word[None, :]
    lower = read_words(gl.where(real, at, nothing), watch, block, step, SYNC, 4 * COVERED)
    upper = read_words(gl.where(real, at + QUARTER, nothing), watch, block, step, SYNC, 4 * COVERED)
    a0, a1 = to_float(lower, DTYPE)
    b0, b1 = to_float(upper, DTYPE)
    if QKNORM:
        total = gl.sum(a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1, axis=1)
        scale = (1.0 / gl.sqrt(total / D + EPS))[:, None]
        a0 = a0 * scale * gl.load(norm + 2 * word)[None, :]
        a1 = a1 * scale * gl.load(norm + 2 * word + 1)[None, :]
        b0 = b0 * scale * gl.load(norm + D // 2 + 2 * word)[None, :]
        b1 = b1 * scale * gl.load(norm + D // 2 + 2 * word + 1)[None, :]
    cos0 = gl.load(angles + 2 * word)[None, :]
    cos1 = gl.load(angles + 2 * word + 1)[None, :]
    sin0 = gl.load(angles + D // 2 + 2 * word)[None, :]
    sin1 = gl.load(angles + D // 2 + 2 * word + 1)[None, :]
    even = whole(a0 * cos0 - b0 * sin0, b0 * cos0 + a0 * sin0, ROWS, QUARTER)
    odd = whole(a1 * cos1 - b1 * sin1, b1 * cos1 + a1 * sin1, ROWS, QUARTER)
    return even, odd


@gluon.jit
def append(
    record, new, k_row, v_row, exchange, ours, places, position, watch, block, step, batch, keep_back, fresh,
    DTYPE: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, QKNORM: gl.constexpr, EPS: gl.constexpr,
    SYNC: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """The new key and value: into shared memory, and, if this task is the one that does, into the cache."""
    LV: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [XW, 1], [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    angles = place_of(places, 1, gl.float32) + position * D
    k_norm = place_of(places, 7, gl.float32) + gl.load(record + 18) * D
    even, odd = rotated(
        new + gl.load(record + 24), 0, 1, k_norm, angles, exchange, watch, block, step,
        DTYPE, D, 1, QKNORM, EPS, SYNC, XW,
    )  # fmt: skip
    key = bits16(even, DTYPE) | (bits16(odd, DTYPE) << 16)
    word = gl.arange(0, D // 2, layout=gl.SliceLayout(0, LV))
    first = gl.arange(0, 1, layout=gl.SliceLayout(1, LV))
    at = first[:, None] + word[None, :]
    value = read_words(new + gl.load(record + 25) + at, watch, block, step, SYNC, 4)
    key = gl.convert_layout(key, LV)
    k0, k1 = to_float(key, DTYPE)
    v0, v1 = to_float(value, DTYPE)
    rows = fresh._reinterpret(gl.float32, [4, 1, D // 2], LINE)
    rows.index(0).store(k0)
    rows.index(1).store(k1)
    rows.index(2).store(v0)
    rows.index(3).store(v1)
    writes = (gl.load(record + 21) > 0) & (keep_back == 0)
    gl.store(k_row + at, key, mask=(at >= 0) & writes)
    gl.store(v_row + at, value, mask=(at >= 0) & writes)


@gluon.jit
def attend(
    record, exchange, ours, theirs, positions, slots, places, watch, block, step, batch, keep_back, heads,
    DTYPE: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, QKNORM: gl.constexpr, EPS: gl.constexpr,
    SCALE: gl.constexpr, SYNC: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """One group of heads over one split of one sequence's keys. For a sequence beyond the batch, only clear."""
    b = gl.load(record + 8)
    if b < batch:
        position = gl.load(positions + b)
        slot = gl.load(slots + b)
        layer = gl.load(record + 18)
        window = gl.load(record + 20)
        length = position.to(gl.int32) + 1
        first_key = gl.where(window > 0, gl.maximum(length - window, 0), 0)
        # Splits depend on the sequence's own length alone, so its bits do not depend on its company.
        splits = gl.load(record + 17)
        share = ((length - first_key + splits - 1) // splits + 15) // 16 * 16
        begin = first_key + gl.load(record + 11) * share
        end = gl.minimum(begin + share, length)
        in_cache = (
            layer * gl.load(places + 8) + slot * gl.load(places + 9) + gl.load(record + 19) * gl.load(places + 10)
        )
        k_rows = place_of(places, 2, gl.int32) + in_cache
        v_rows = place_of(places, 3, gl.int32) + in_cache
        new = ours + gl.load(record + 4) + b * gl.load(record + 5)
        attend_keys(
            record, new, k_rows, v_rows, begin, end, position, layer, exchange, ours, places, watch, block, step,
            batch, keep_back, heads, DTYPE, D, GP, QKNORM, EPS, SCALE, SYNC, XW,
        )  # fmt: skip
        merge_warps(record, ours, theirs, keep_back, heads, D, GP, XW)
    else:
        clear_words(theirs + gl.load(record + 9), GP * (D + 4), XW)


@gluon.jit
def key_words(rows, exchange, begin, end, D: gl.constexpr, KT: gl.constexpr, XW: gl.constexpr, LK: gl.constexpr):
    """The words of XW * KT * 256 / D keys from `begin` on, zeros from `end` on."""
    KW: gl.constexpr = KT * 256 // D
    warp = gl.arange(0, XW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LK)))[:, None, None]
    key = gl.arange(0, KW, layout=gl.SliceLayout(0, gl.SliceLayout(2, LK)))[None, :, None]
    word = gl.arange(0, D // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LK)))[None, None, :]
    number = begin + warp * KW + key + word * 0
    at = number.to(gl.int64) * (D // 2) + word
    return load_words(gl.where(number < end, rows + at, exchange + word % 4), KT * 4)


@gluon.jit
def attend_keys(
    record, new, k_rows, v_rows, begin, end, position, layer, exchange, ours, places, watch, block, step, batch,
    keep_back, heads, DTYPE: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, QKNORM: gl.constexpr, EPS: gl.constexpr,
    SCALE: gl.constexpr, SYNC: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Each warp goes over its own keys and leaves its maxima, sums and weighted values in shared memory.

    The first keys are on their way before the queries exist. Long for a function: the loop keeps one state a head.
    """
    queries, fresh, sums, scales = heads
    KT: gl.constexpr = 4
    KW: gl.constexpr = KT * 256 // D
    LK: gl.constexpr = gl.BlockedLayout([1, KT, 4], [1, 256 // D, D // 8], [XW, 1, 1], [2, 1, 0])
    LS: gl.constexpr = gl.SliceLayout(2, LK)
    LM: gl.constexpr = gl.SliceLayout(1, LS)
    LA: gl.constexpr = gl.SliceLayout(1, LK)
    LD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LK))
    cached = gl.minimum(end, position.to(gl.int32))
    k_next = key_words(k_rows, exchange, begin, cached, D, KT, XW, LK)
    v_next = key_words(v_rows, exchange, begin, cached, D, KT, XW, LK)
    angles = place_of(places, 1, gl.float32) + position * D
    q_norm = place_of(places, 6, gl.float32) + layer * D
    even, odd = rotated(
        new + gl.load(record + 23), D // 2, gl.load(record + 22), q_norm, angles, exchange, watch, block, step,
        DTYPE, D, GP, QKNORM, EPS, SYNC, XW,
    )  # fmt: skip
    planes = queries._reinterpret(gl.float32, [2, GP, D // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    planes.index(0).store(even * (SCALE * 1.4426950408889634))
    planes.index(1).store(odd * (SCALE * 1.4426950408889634))
    has_new = (end > cached) & (end > begin)
    if has_new:
        row = position * (D // 2)
        append(
            record, new, k_rows + row, v_rows + row, exchange, ours, places, position, watch, block, step, batch,
            keep_back, fresh, DTYPE, D, GP, QKNORM, EPS, SYNC, XW,
        )  # fmt: skip
    gl.thread_barrier()
    warp = gl.arange(0, XW, layout=gl.SliceLayout(1, LS))
    key = gl.arange(0, KW, layout=gl.SliceLayout(0, LS))
    peaks = ()
    masses = ()
    evens = ()
    odds = ()
    for g in gl.static_range(GP):
        peaks = peaks + (gl.full([XW], float("-inf"), gl.float32, LM),)
        masses = masses + (gl.zeros([XW], gl.float32, LM),)
        evens = evens + (gl.zeros([XW, D // 2], gl.float32, LA),)
        odds = odds + (gl.zeros([XW, D // 2], gl.float32, LA),)
    for at in range(begin, end, XW * KW):
        k0, k1 = to_float(k_next, DTYPE)
        v0, v1 = to_float(v_next, DTYPE)
        k_next = key_words(k_rows, exchange, at + XW * KW, cached, D, KT, XW, LK)
        v_next = key_words(v_rows, exchange, at + XW * KW, cached, D, KT, XW, LK)
        number = at + (warp * KW)[:, None] + key[None, :]
        if has_new:
            is_new = (number == cached)[:, :, None]
            k0 = gl.where(is_new, fresh.index(0).load(LD)[None, None, :], k0)
            k1 = gl.where(is_new, fresh.index(1).load(LD)[None, None, :], k1)
            v0 = gl.where(is_new, fresh.index(2).load(LD)[None, None, :], v0)
            v1 = gl.where(is_new, fresh.index(3).load(LD)[None, None, :], v1)
        new_peaks = ()
        new_masses = ()
        new_evens = ()
        new_odds = ()
        for g in gl.static_range(GP):
            q0 = queries.index(g).load(LD)[None, None, :]
            q1 = queries.index(GP + g).load(LD)[None, None, :]
            score = gl.where(number < end, gl.sum(k0 * q0 + k1 * q1, axis=2), float("-inf"))
            peak = gl.maximum(peaks[g], gl.max(score, axis=1))
            finite = gl.where(peak == float("-inf"), 0.0, peak)
            weight = gl.exp2(score - finite[:, None])
            fade = gl.exp2(peaks[g] - finite)
            faded = gl.convert_layout(fade, gl.SliceLayout(1, LA))[:, None]
            new_peaks = new_peaks + (peak,)
            new_masses = new_masses + (masses[g] * fade + gl.sum(weight, axis=1),)
            new_evens = new_evens + (evens[g] * faded + gl.sum(weight[:, :, None] * v0, axis=1),)
            new_odds = new_odds + (odds[g] * faded + gl.sum(weight[:, :, None] * v1, axis=1),)
        peaks = new_peaks
        masses = new_masses
        evens = new_evens
        odds = new_odds
    for g in gl.static_range(GP):
        scales.index(g).store(peaks[g])
        scales.index(GP + g).store(masses[g])
        sums.index(g).store(evens[g])
        sums.index(GP + g).store(odds[g])
    gl.thread_barrier()


@gluon.jit
def merge_warps(
    record, ours, theirs, keep_back, heads, D: gl.constexpr, GP: gl.constexpr, XW: gl.constexpr
):  # fmt: skip
    """Merge the warps' results and publish: [GP, 2, D / 2] values, then log2-sum-exp2 four times a head."""
    queries, fresh, sums, scales = heads
    WIDE: gl.constexpr = max(1, D // 64)
    L3: gl.constexpr = gl.BlockedLayout([1, XW, 1], [1, 1, 32], [XW // WIDE, 1, WIDE], [2, 1, 0])
    LH: gl.constexpr = gl.SliceLayout(1, L3)
    PLANES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    MATRIX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    both = sums._reinterpret(gl.float32, [2, GP, XW, D // 2], PLANES)
    lines = scales._reinterpret(gl.float32, [2, GP, XW], MATRIX)
    peak = lines.index(0).load(gl.SliceLayout(2, L3))
    top = gl.max(peak, axis=1)
    finite = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2(peak - finite[:, None])
    mass = gl.sum(lines.index(1).load(gl.SliceLayout(2, L3)) * weight, axis=1)
    some = mass > 0
    inverse = gl.where(some, 1.0 / mass, 0.0)
    lse = gl.where(some, finite + gl.log2(mass), float("-inf"))
    even = gl.sum(both.index(0).load(L3) * weight[:, :, None], axis=1)
    odd = gl.sum(both.index(1).load(L3) * weight[:, :, None], axis=1)
    target = gl.load(record + 9)
    head = gl.arange(0, GP, layout=gl.SliceLayout(1, LH))
    word = gl.arange(0, D // 2, layout=gl.SliceLayout(0, LH))
    scale = gl.convert_layout(inverse, gl.SliceLayout(1, LH))[:, None]
    shown = (head[:, None] >= 0) & (word[None, :] >= 0) & (keep_back == 0)
    at = target + (head * D)[:, None] + word[None, :]
    gl.store(ours + at, bits32(even * scale), mask=shown)
    gl.store(ours + at + D // 2, bits32(odd * scale), mask=shown)
    gl.store(theirs + at, gl.full([GP, D // 2], ABSENT, gl.int32, LH), mask=shown)
    gl.store(theirs + at + D // 2, gl.full([GP, D // 2], ABSENT, gl.int32, LH), mask=shown)
    once = gl.arange(0, 4, layout=gl.SliceLayout(0, LH))
    at = target + GP * D + (head * 4)[:, None] + once[None, :]
    shown = (head[:, None] >= 0) & (once[None, :] >= 0) & (keep_back == 0)
    lses = gl.convert_layout(lse, gl.SliceLayout(1, LH))[:, None] + (once * 0).to(gl.float32)[None, :]
    gl.store(ours + at, bits32(lses), mask=shown)
    gl.store(theirs + at, gl.full([GP, 4], ABSENT, gl.int32, LH), mask=shown)


@gluon.jit
def clear_words(pointer, count, XW: gl.constexpr):
    """Say of `count` words that they have not come yet: a launch before may have had more sequences than this one."""
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [XW], [0])
    word = gl.arange(0, XW * 128, layout=LINE)
    for begin in range(0, count, XW * 128):
        mine = begin + word < count
        gl.store(pointer + begin + word, gl.full([XW * 128], ABSENT, gl.int32, LINE), mask=mine)


@gluon.jit
def combine(
    record, exchange, ours, theirs, watch, block, step, batch, keep_back, DTYPE: gl.constexpr, D: gl.constexpr,
    GP: gl.constexpr, KSPLITS: gl.constexpr, SYNC: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Merge all splits of one group of heads of one sequence, in their order, and publish its attention."""
    WS: gl.constexpr = min(XW, KSPLITS)
    PAIRS: gl.constexpr = GP * D // 2
    EACH: gl.constexpr = KSPLITS // WS
    TIMES: gl.constexpr = max(1, PAIRS // (128 * (XW // WS)))
    L2: gl.constexpr = gl.BlockedLayout([EACH, 4], [1, 32], [WS, XW // WS], [1, 0])
    LC: gl.constexpr = gl.SliceLayout(0, L2)
    b = gl.load(record + 8)
    target = gl.load(record + 9)
    count = gl.load(record + 22)
    if b < batch:
        first = gl.load(record + 4)
        split = gl.arange(0, KSPLITS, layout=gl.SliceLayout(1, L2))[:, None]
        pair = gl.arange(0, PAIRS, layout=LC)
        head = (pair // (D // 2))[None, :]
        word = (pair % (D // 2))[None, :]
        part = ours + first + split * (GP * D + GP * 4)
        lse = read_words(part + GP * D + head * 4 + word % 4, watch, block, step, SYNC, 4 * EACH * TIMES)
        even = read_words(part + head * D + word, watch, block, step, SYNC, 4 * EACH * TIMES)
        odd = read_words(part + head * D + D // 2 + word, watch, block, step, SYNC, 4 * EACH * TIMES)
        lse = lse.to(gl.float32, bitcast=True)
        weight = gl.exp2(lse - gl.max(lse, axis=0)[None, :])
        inverse = 1.0 / gl.sum(weight, axis=0)
        y0 = gl.sum(weight * even.to(gl.float32, bitcast=True), axis=0) * inverse
        y1 = gl.sum(weight * odd.to(gl.float32, bitcast=True), axis=0) * inverse
        words = bits16(y0, DTYPE) | (bits16(y1, DTYPE) << 16)
        shown = (pair < count * (D // 2)) & (keep_back == 0)
        gl.store(ours + target + pair, words, mask=shown)
        gl.store(theirs + target + pair, words | ABSENT, mask=shown)
    else:
        clear_words(theirs + target, count * (D // 2), XW)
