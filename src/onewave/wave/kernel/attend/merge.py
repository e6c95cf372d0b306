"""Merge one sequence's attention splits on their way into shared memory, as a product step's activations.

It spares the hand-off that a combining task would add between attention and the output projection (combine.py): every
thread block reads all splits, 16-bit values with a log2-sum-exp2 a head and split, POLLED_SPLITS at a time, and merges
them itself. Of a sequence with one split it reads the finished attention. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.wave.kernel.attend.combine import split_of_keys
from onewave.wave.kernel.attend.layouts import mergeable_words
from onewave.wave.kernel.finish import bits16, to_float
from onewave.wave.kernel.records import record_word
from onewave.wave.kernel.spin import poll_splits
from onewave.wave.kernel.widen.byte_values import raised
from onewave.wave.kernel.widen.digits import digits_apart, digits_in_rows, digits_of, store_digits
from onewave.wave.kernel.words import WORD, halves_apart, in_digits, is_mixed, is_nested, takes_digits, times_of
from onewave.wave.plan.layout import MAX_SPLITS, POLLED_SPLITS

_MAX_SPLITS = gl.constexpr(MAX_SPLITS)
_POLLED_SPLITS = gl.constexpr(POLLED_SPLITS)


@gluon.jit
def load_merged(step, site, chunks, chunks_before, activations, c):
    """Do as exchange.load_activations for one sequence's attention: chunk by chunk, [N, PC * 64] words each.

    Of the last chunk only what the step multiplies is stored. A thread takes MERGE_WORDS words at a time.
    """
    Q: gl.constexpr = 64 // c.R
    T: gl.constexpr = c.MERGE_WORDS * c.XW * 32 // (Q * 64)
    OWN: gl.constexpr = T * Q * 64
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [c.XW], [0])
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    DIGITS: gl.constexpr = takes_digits(c.FORMAT, c.NB)
    record = step.record
    current = step.sets.current
    first = record_word(record, WORD.SOURCE)
    columns = record_word(record, WORD.COLUMNS)
    few = record_word(record, WORD.MERGEABLE)
    word = gl.arange(0, OWN, layout=LINE)
    if c.FORMAT == 1 and c.MERGE_WORDS == 8:  # digits: columns 16 apart in a thread's two packets
        word = word % 8 + word // (OWN // 2) * 8 + word % (OWN // 2) // 8 * 16
    length = gl.load(step.sequences.positions).to(gl.int32) + 1
    window = record_word(record, WORD.WINDOW)
    first_key, share, used = split_of_keys(window, record_word(record, WORD.SPLITS), length, c.MERGE_WORDS)
    for chunk in range(chunks):
        place = (chunks_before + chunk) % c.XS
        mbarrier.wait(activations.empty.index(place), (((chunks_before + chunk) // c.XS) & 1) ^ 1)
        rows = activations.places[0].index(place)._reinterpret(gl.int32, [c.PC // T, Q, T * 64], STORED)
        images = record_word(record, WORD.TILES) * c.IMAGES
        if is_mixed(c.FORMAT):
            images = images // times_of(gl.maximum(record_word(record, WORD.WIDTH), 1))
        tiles = gl.minimum(images - chunk * c.PC, c.PC)
        for piece in range((tiles + T - 1) // T):
            # Between two pieces' stores, which Triton takes for overlapping; here rather than after the poll.
            gl.thread_barrier()
            column = (chunk * (c.PC // T) + piece) * OWN + word
            real = column < columns
            of_head = few + column // (c.D // 2) * mergeable_words(c.D)
            at = gl.where(used > 1, of_head + column % (c.D // 2), first + column)
            pointers = gl.where(real, (current + at).to(gl.int64), 0)
            lses = gl.where(real & (used > 1), (current + of_head + _MAX_SPLITS * (c.D // 2)).to(gl.int64), 0)
            words = poll_merged(pointers, lses, real, used, site, c)
            ordered = gl.reshape(gl.permute(gl.reshape(words, [1, T, Q, 64]), (2, 0, 1, 3)), [Q, T * 64])
            if DIGITS and is_mixed(c.FORMAT):
                if in_digits(record_word(record, WORD.WIDTH), c):
                    store_piece(words, place, piece, activations, c)
                else:
                    rows.index(piece).store(raised(ordered, c.DTYPE, c.FORMAT))
            elif DIGITS:
                store_piece(words, place, piece, activations, c)
            else:
                rows.index(piece).store(raised(ordered, c.DTYPE, c.FORMAT))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(activations.full.index(place), count=1)


@gluon.jit
def store_piece(words, place, piece, activations, c):
    """Store a piece of a chunk in digits: two words of columns 16 apart come into one thread first, if they are not."""
    Q: gl.constexpr = 64 // c.R
    T: gl.constexpr = words.shape[0] // (Q * 64)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    if c.FORMAT == 1 and c.MERGE_WORDS == 8:
        even, odd = gl.split(gl.permute(gl.reshape(words, [2, words.shape[0] // 2]), (1, 0)))
    else:
        near = gl.reshape(gl.convert_layout(words, pairs_of_sixteen(words.shape[0], c.XW)), [T, Q, 4, 2, 8])
        even, odd = gl.split(gl.permute(near, (0, 1, 2, 4, 3)))
    APART: gl.constexpr = 1 + halves_apart(c.FORMAT, c.NB)
    digits = digits_of(gl.reshape(even, [T, Q, 32]), gl.reshape(odd, [T, Q, 32]), c.DTYPE, c.FORMAT)
    digits = digits_in_rows(digits)
    if APART > 1:
        digits = digits_apart(digits)
    rows = activations.places[0].index(place)._reinterpret(gl.int32, [c.PC // T, T * Q * 2 * APART, 32], STORED)
    scales = activations.places[1].index(place)._reinterpret(gl.float32, [c.PC // T, T, Q * APART], PLAIN)
    store_digits(digits, rows.index(piece), scales.index(piece))
    if is_nested(c.FORMAT):
        sums = activations.places[2].index(place)._reinterpret(gl.int32, [c.PC // T, T, 4 * Q], PLAIN)
        sums.index(piece).store(digits[2])


@gluon.constexpr_function
def pairs_of_sixteen(words, warps):
    """The layout of a piece's words where a thread has columns 16 apart."""
    lanes = [[2], [4], [16], [32], [64]]
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [8], *([bit] for bit in (1024, 2048) if 128 * warps <= bit < words)],
        lane_bases=lanes,
        warp_bases=[[bit] for bit in (128, 256, 512) if bit < 128 * warps],
        block_bases=[],
        shape=[words],
    )


@gluon.jit
def poll_merged(pointers, lses, real, used, site, c):
    """Poll the words of `used` splits (spin.poll_splits) and merge them; words that are not `real` are 0.

    Sums in float32; rounds once to DTYPE.
    """
    WAITS: gl.constexpr = c.SYNC == 0
    COUNT: gl.constexpr = pointers.shape[0]
    counts = gl.where(real, used, 0)
    parts = poll_splits(pointers, lses, counts, site, WAITS, c.MERGE_WORDS, c.D * 2)
    low, high, mass, top = merged_splits(parts, COUNT, c.DTYPE)
    if used > _POLLED_SPLITS:
        pointers = gl.where(real, pointers + _POLLED_SPLITS * c.D * 2, 0)
        lses = gl.where(real, lses + _POLLED_SPLITS * 4, 0)
        parts = poll_splits(pointers, lses, counts - _POLLED_SPLITS, site, WAITS, c.MERGE_WORDS, c.D * 2)
        more_low, more_high, more_mass, more_top = merged_splits(parts, COUNT, c.DTYPE)
        higher = gl.maximum(top, more_top)
        fade = gl.exp2(top - higher)
        more_fade = gl.exp2(more_top - higher)
        low = low * of_values(fade, low) + more_low * of_values(more_fade, low)
        high = high * of_values(fade, high) + more_high * of_values(more_fade, high)
        mass = mass * fade + more_mass * more_fade
    scale = of_values(1.0 / mass, low)
    words = bits16(low * scale, c.DTYPE) | (bits16(high * scale, c.DTYPE) << 16)
    return gl.reshape(words, [COUNT])


@gluon.jit
def merged_splits(parts, COUNT: gl.constexpr, DTYPE: gl.constexpr):
    """Sum eight splits' values in float32, weighted by their log2-sum-exp2 less the highest one.

    Returns the sums of each word's lower and higher values, [COUNT / 4, 4], the sum of the weights and the highest
    log2-sum-exp2, [COUNT / 4]. No value leaves its thread.
    """
    w0, w1, w2, w3, w4, w5, w6, w7, first, second = parts
    e0, e1, e2, e3 = of_packets(first, COUNT)
    e4, e5, e6, e7 = of_packets(second, COUNT)
    top = gl.maximum(highest(e0, e1, e2, e3), highest(e4, e5, e6, e7))
    low, high, mass = four_splits((w0, w1, w2, w3), (e0 - top, e1 - top, e2 - top, e3 - top), COUNT, DTYPE)
    exponents = (e4 - top, e5 - top, e6 - top, e7 - top)
    low4, high4, mass4 = four_splits((w4, w5, w6, w7), exponents, COUNT, DTYPE)
    return low + low4, high + high4, mass + mass4, top


@gluon.jit
def of_values(scale, values):
    """Broadcast a packet's scale to each of its values."""
    return gl.convert_layout(scale, gl.SliceLayout(1, values.type.layout))[:, None]


@gluon.jit
def of_packets(lses, COUNT: gl.constexpr):
    """Split each packet into its four words, as float32, [COUNT / 4] each."""
    even, odd = gl.split(gl.reshape(lses.to(gl.float32, bitcast=True), [COUNT // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def highest(a, b, c, d):
    """The elementwise maximum of four tensors."""
    return gl.maximum(gl.maximum(a, b), gl.maximum(c, d))


@gluon.jit
def four_splits(words, exponents, COUNT: gl.constexpr, DTYPE: gl.constexpr):
    """Sum four splits' values, weighted by 2 to the power of their exponents.

    Returns the sums of lower and higher values, [COUNT / 4, 4], and of the weights.
    """
    w0, w1, w2, w3 = words
    e0, e1, e2, e3 = exponents
    e0 = gl.exp2(e0)
    e1 = gl.exp2(e1)
    e2 = gl.exp2(e2)
    e3 = gl.exp2(e3)
    low0, high0 = weighted(w0, e0, COUNT, DTYPE)
    low1, high1 = weighted(w1, e1, COUNT, DTYPE)
    low2, high2 = weighted(w2, e2, COUNT, DTYPE)
    low3, high3 = weighted(w3, e3, COUNT, DTYPE)
    return (low0 + low1) + (low2 + low3), (high0 + high1) + (high2 + high3), (e0 + e1) + (e2 + e3)


@gluon.jit
def weighted(words, weight, COUNT: gl.constexpr, DTYPE: gl.constexpr):
    """Scale each word's lower and higher values, as float32, by its packet's weight."""
    packets = gl.reshape(words, [COUNT // 4, 4])
    low, high = to_float(packets, DTYPE)
    scale = of_values(weight, packets)
    return low * scale, high * scale
