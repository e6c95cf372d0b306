"""Finish results in the wave kernel: bias, norm, activation, gate, residual stream; publish; add up slices of K.

Registers: one group of row blocks, 4 neighbouring rows a thread. Order: what is added to a group (bias, residual
stream, scales) is requested while the group before it is multiplied; then the group's full barrier; then publication;
then the residual stream, which no other thread block waits for. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from onewave.wave.kernel.parameters import Target
from onewave.wave.kernel.records import aligned_pointer, place_pointer, record_word
from onewave.wave.kernel.spin import ABSENT, read_words
from onewave.wave.kernel.widen.byte_values import lowered
from onewave.wave.kernel.words import FLAG, KIND, PLACE, WORD

# float32's quiet NaN, stored instead of a result with the bits of ABSENT.
_NAN = gl.constexpr(0x7FC00000)


@gluon.constexpr_function
def results_over_sequences(rows, blocks, warps):
    """The layout of one value a sequence, beside results [sequences, blocks * rows] of a multiply partition."""
    return gl.SliceLayout(1, gl.SliceLayout(1, results_layout(rows, blocks, warps)))


@gluon.constexpr_function
def results_layout(rows, blocks, warps):
    """The layout of handed-over results, [sequences, column groups, blocks * rows].

    A thread has 4 neighbouring rows and all column groups.
    """
    across = min(32, blocks * rows // 4)
    return gl.BlockedLayout([1, 64 // rows, 4], [32 // across, 1, across], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def to_float(words, DTYPE: gl.constexpr):
    """Widen the two 16-bit values of each word to float32."""
    low = (words & 65535).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    high = ((words >> 16) & 65535).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def activated(y, ACT: gl.constexpr):
    """Apply SiLU (1), exact GELU (2) or nothing (0) to float32 y."""
    if ACT == 1:
        return y / (1.0 + gl.exp(-y))
    elif ACT == 2:
        return 0.5 * y * (1.0 + gl.erf(y * 0.7071067811865476))
    else:
        return y


@gluon.jit
def bits16(y, DTYPE: gl.constexpr):
    """Round y to DTYPE; its bits as int32, zero-extended."""
    return y.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 65535


@gluon.jit
def bits32(y):
    """The bits of float32 y, never ABSENT."""
    bits = y.to(gl.int32, bitcast=True)
    return gl.where(bits == ABSENT, _NAN, bits)


@gluon.jit
def addend(step, flags, hidden, bias_at, sequence, row, shown, c):
    """Load what a reduction of a decode step adds: a bias, and the float32 residual stream. Shaped as row."""
    places = step.places
    LAYOUT: gl.constexpr = row.type.layout
    extra = gl.zeros(row.shape, gl.float32, LAYOUT)
    if bias_at > 0:
        bias = gl.multiple_of(place_pointer(places, PLACE.BIASES, gl.float32) + (bias_at - 1), 16)
        extra += gl.load(bias + row, mask=shown, other=0.0)
    if flags & FLAG.RESIDUAL:
        if flags & FLAG.EMBEDDED:
            token = gl.load(step.sequences.tokens + sequence, mask=shown, other=0)
            embedding = place_pointer(places, PLACE.EMBEDDING, gl.int32)
            words = gl.load(embedding + (token * hidden + row) // 2, mask=shown, other=0)
            low, high = to_float(words, c.DTYPE)
            extra += gl.where(row % 2 == 0, low, high)
        else:
            stream = aligned_pointer(places, PLACE.RESIDUAL, gl.float32) + sequence * hidden + row
            extra += gl.load(stream, mask=shown, other=0.0)
    return extra


@gluon.constexpr_function
def results_rows(rows, blocks, warps):
    """The layout of finished results, [sequences, blocks * rows]."""
    return gl.SliceLayout(1, results_layout(rows, blocks, warps))


@gluon.jit
def load_addend(step, number, c):
    """Request what is added to the step's row blocks from `number` on: bias, residual stream, or the embedding's words
    in its place; [NB, G * R] each."""
    record = step.record
    places = step.places
    batch = step.sequences.batch
    LZ: gl.constexpr = results_rows(c.R, c.G, c.XW)
    b = gl.arange(0, c.NB, layout=gl.SliceLayout(1, LZ))
    sequence = b[:, None]
    in_step = (number * c.R + gl.arange(0, c.G * c.R, layout=gl.SliceLayout(0, LZ)))[None, :]
    row = record_word(record, WORD.FIRST_BLOCK) * c.R + in_step
    shown = (sequence < batch) & (in_step < record_word(record, WORD.BLOCKS) * c.R) & (step.withheld == 0)
    flags = record_word(record, WORD.FLAGS)
    # Without a residual stream, TARGET_STRIDE may count slices instead.
    hidden = gl.multiple_of(gl.where((flags & FLAG.RESIDUAL) > 0, record_word(record, WORD.TARGET_STRIDE) * 2, 0), 8)
    bias_at = record_word(record, WORD.BIAS)
    bias = place_pointer(places, PLACE.BIASES, gl.float32) + bias_at - 1 + row + sequence * 0
    bias = gl.load(bias, mask=shown & (bias_at > 0), other=0)
    stream = aligned_pointer(places, PLACE.RESIDUAL, gl.float32) + sequence * hidden + row
    EITHER: gl.constexpr = FLAG.RESIDUAL | FLAG.EMBEDDED
    stream = gl.load(stream, mask=shown & ((flags & EITHER) == FLAG.RESIDUAL), other=0)
    starts = (flags & EITHER) == EITHER
    embedded = shown & starts
    token = gl.load(step.sequences.tokens + b, mask=(b < batch) & starts, other=0)[:, None]
    embedding = place_pointer(places, PLACE.EMBEDDING, gl.int32)
    words = gl.load(embedding + (token * hidden + row) // 2, mask=embedded, other=0)
    return bias, stream, words


@gluon.jit
def addend_of(loaded, c):
    """Sum what load_addend has loaded."""
    bias, stream, words = loaded
    row = gl.arange(0, c.G * c.R, layout=gl.SliceLayout(0, results_rows(c.R, c.G, c.XW)))
    low, high = to_float(words, c.DTYPE)
    return bias + (stream + gl.where((row % 2 == 0)[None, :], low, high))


@gluon.jit
def load_scales(step, number, LZ: gl.constexpr, c):
    """Request the scales of the rows of the step's row blocks from `number` on: float32 [G * R]."""
    record = step.record
    row = number * c.R + gl.arange(0, c.G * c.R, layout=gl.SliceLayout(0, LZ))
    first = place_pointer(step.places, PLACE.SCALES, gl.float32) + record_word(record, WORD.SCALES)
    first += record_word(record, WORD.FIRST_BLOCK) * c.R
    return gl.load(gl.multiple_of(first, 16) + row, mask=row < record_word(record, WORD.BLOCKS) * c.R, other=0.0)


@gluon.jit
def finish_blocks(step, inverse_rms, results, number, c):
    """Publish a product's row blocks as they come, G at a time.

    results: the channel from the multiply partitions. number: groups so far in this launch; returns it, counted on.
    """
    record = step.record
    batch = step.sequences.batch
    Q: gl.constexpr = 64 // c.R
    GR: gl.constexpr = c.G * c.R
    LP: gl.constexpr = results_layout(c.R, c.G, c.XW)
    LZ: gl.constexpr = results_rows(c.R, c.G, c.XW)
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    blocks = record_word(record, WORD.BLOCKS)
    first_block = record_word(record, WORD.FIRST_BLOCK)
    target = record_word(record, WORD.TARGET)
    stride = record_word(record, WORD.TARGET_STRIDE)
    part = record_word(record, WORD.SLICE)
    flags = record_word(record, WORD.FLAGS)
    adds = ((flags & FLAG.RESIDUAL) > 0) | (record_word(record, WORD.BIAS) > 0)
    b = gl.arange(0, c.NB, layout=gl.SliceLayout(1, LZ))
    r = gl.arange(0, GR, layout=gl.SliceLayout(0, LZ))
    loaded = (0, 0, 0)
    if c.D > 0:
        # Requested while the first group is multiplied; with masks, because a branch's end would wait for the loads.
        loaded = load_addend(step, 0, c)
    coming = 0
    if c.FORMAT > 0:
        coming = load_scales(step, 0, LZ, c)
    for i in range(0, blocks, c.G):
        row = (b * 0)[:, None] + ((first_block + i) * c.R + r)[None, :]
        # The last group may be a row block short: its values belong to no sequence.
        sequence = gl.where((i * c.R + r < blocks * c.R)[None, :], b[:, None], c.NB)
        shown = (sequence < batch) & (step.withheld == 0)
        if c.D > 0:
            extra = addend_of(loaded, c)
            if adds & (i + c.G < blocks):  # the next group's, requested while this group is multiplied
                loaded = load_addend(step, i + c.G, c)
        if c.FORMAT > 0:
            scales = coming
            coming = load_scales(step, i + c.G, LZ, c)
        place = number % 2
        mbarrier.wait(results.full.index(place), (number // 2) & 1)
        parts = results.places.index(place)._reinterpret(gl.float32, [c.NB, Q, GR], PARTS)
        y = gl.sum(parts.load(LP), axis=1)
        if c.FORMAT > 0:
            y = lowered(y, c.DTYPE, c.FORMAT) * scales[None, :]
        if c.D > 0:
            y = y * inverse_rms[:, None] + extra
        if (c.SPLITS > 1) and (step.kind == KIND.PARTIAL):
            first = target + (row // c.R * stride + part) * (c.NB * c.R) + sequence * c.R
            at = gl.multiple_of(first, (1, 4)) + row % c.R
            gl.store(step.sets.current + at, bits32(y), mask=shown)
            gl.store(step.sets.next + at, gl.full([c.NB, GR], ABSENT, gl.int32, LZ), mask=sequence < c.NB)
        else:
            where = Target(flags=flags, to_caller=step.kind == KIND.OUT, first=target, stride=stride)
            publish(y, sequence, row, where, step, [c.NB, GR // 2, 2], [c.NB, GR // 4, 2], c)
        if c.D > 0:
            if flags & FLAG.RESIDUAL:  # after what other thread blocks wait for
                hidden = gl.multiple_of(stride * 2, 8)
                stream = aligned_pointer(step.places, PLACE.RESIDUAL, gl.float32)
                gl.store(stream + sequence * hidden + row, y, mask=shown)
        gl.thread_barrier()
        mbarrier.arrive(results.empty.index(place), count=1)
        number += 1
    return number


@gluon.jit
def publish(y, sequence, row, target, step, PAIRS: gl.constexpr, FOURS: gl.constexpr, c):
    """Store float32 y: logits to the caller as they are, all else as 16-bit words (publish16)."""
    if c.D > 0:
        if target.flags & FLAG.LOGITS:
            bits = y.to(gl.int32, bitcast=True)
            stride = step.output.stride
            mask = (sequence < step.sequences.batch) & (row < stride)
            gl.store(step.output.words + sequence.to(gl.int64) * stride + row, bits, mask=mask)
        else:
            publish16(y, sequence, row, target, step, PAIRS, FOURS, c)
    else:
        publish16(y, sequence, row, target, step, PAIRS, FOURS, c)


@gluon.jit
def publish16(y, sequence, row, target, step, PAIRS: gl.constexpr, FOURS: gl.constexpr, c):
    """Activate float32 y, round it to DTYPE, and store it as words, to the caller or to both sets of the exchange.

    sequence, row: of each value, shaped as y; its last axis holds 4 neighbouring rows a thread. A sequence of NB or
    more marks no value. PAIRS, FOURS: y's shape with the last axis cut in pairs, and that of every second value.
    """
    flags = target.flags
    y0, y1 = gl.split(gl.reshape(y, PAIRS))
    row0, row1 = gl.split(gl.reshape(row, PAIRS))
    sequence0, sequence1 = gl.split(gl.reshape(sequence, PAIRS))
    if (flags & (FLAG.ACTIVATE | FLAG.GATED)) == (FLAG.ACTIVATE | FLAG.GATED):
        if c.GATED:
            h0, h1 = gl.split(gl.reshape(activated(y0, c.ACT) * y1, FOURS))
            first_row, second_row = gl.split(gl.reshape(row0, FOURS))
            first_sequence, second_sequence = gl.split(gl.reshape(sequence0, FOURS))
            gated = bits16(h0, c.DTYPE) | (bits16(h1, c.DTYPE) << 16)
            put(gated, first_sequence, first_row, target, step, ((1,) if len(FOURS) == 2 else (1, 1)), 4, c)
    else:
        if flags & FLAG.ACTIVATE:
            y0 = activated(y0, c.ACT)
            y1 = activated(y1, c.ACT)
        words = bits16(y0, c.DTYPE) | (bits16(y1, c.DTYPE) << 16)
        put(words, sequence0, row0, target, step, ((2,) if len(PAIRS) == 2 else (1, 2)), 2, c)


@gluon.jit
def put(words, sequence, row, target, step, SIDE, ROWS: gl.constexpr, c):
    """Store words of ROWS rows each, to the caller, or to this launch's set while clearing them in the next one's.

    All NB sequences are cleared, whatever this launch's batch: launches before and after may have more. SIDE: how many
    neighbours along each axis are stored together; a tuple, because hints take no list here.
    """
    batch = step.sequences.batch
    word = gl.max_contiguous(gl.multiple_of(row // ROWS, SIDE), SIDE)
    shown = gl.max_constancy(sequence < batch, SIDE) & (step.withheld == 0)
    if target.to_caller:
        line = gl.max_constancy(gl.multiple_of(sequence.to(gl.int64) * step.output.stride, SIDE), SIDE)
        gl.store(step.output.words + line + word, words, mask=shown)
    else:
        at = gl.max_constancy(gl.multiple_of(target.first + sequence * target.stride, SIDE), SIDE) + word
        gl.store(step.sets.current + at, words, mask=shown)
        gl.store(step.sets.next + at, words | ABSENT, mask=gl.max_constancy(sequence < c.NB, SIDE))


@gluon.jit
def reduce_pieces(step, site, c):
    """Add up slices of K and publish the sums. A piece is PR rows of all sequences; 1,024 values go side by side."""
    record = step.record
    batch = step.sequences.batch
    PR: gl.constexpr = min(c.R, 16)
    VALUES: gl.constexpr = c.XW * 128
    GROUP: gl.constexpr = min(c.SPLITS, 8)
    L2: gl.constexpr = gl.BlockedLayout([GROUP, 4], [1, 32], [1, c.XW], [1, 0])
    LV: gl.constexpr = gl.SliceLayout(0, L2)
    pieces = record_word(record, WORD.BLOCKS)
    first = record_word(record, WORD.SOURCE)
    first_piece = record_word(record, WORD.FIRST_BLOCK)
    target = record_word(record, WORD.TARGET)
    stride = record_word(record, WORD.TARGET_STRIDE)
    hidden = gl.multiple_of(stride * 2, 8)
    slices = record_word(record, WORD.SLICE)
    flags = record_word(record, WORD.FLAGS)
    bias_at = record_word(record, WORD.BIAS)
    value = gl.arange(0, VALUES, layout=LV)
    part = gl.arange(0, GROUP, layout=gl.SliceLayout(1, L2))
    for begin in range(0, pieces * (c.NB * PR), VALUES):
        v = begin + value
        row = (first_piece + v // (c.NB * PR)) * PR + v % PR
        b = (v // PR) % c.NB
        real = (v < pieces * (c.NB * PR)) & (b < batch)
        if c.D > 0:
            total = addend(step, flags, hidden, bias_at, b, row, real, c)
        else:
            total = gl.zeros([VALUES], gl.float32, LV)
        base = (row // c.R) * (slices * (c.NB * c.R)) + b * c.R + row % c.R
        for group in range(0, slices, GROUP):
            number = part + group
            there = (number < slices)[:, None] & real[None, :]
            at = base[None, :] + (number * (c.NB * c.R))[:, None]
            pointers = gl.where(there, (step.sets.current + first + at).to(gl.int64), 0)
            words = read_words(pointers, site, c.SYNC, GROUP * 4)
            total += gl.sum(words.to(gl.float32, bitcast=True), axis=0)
        sequence = gl.where(v < pieces * (c.NB * PR), b, c.NB)
        where = Target(flags=flags, to_caller=step.kind == KIND.REDUCE_OUT, first=target, stride=stride)
        publish(total, sequence, row, where, step, [VALUES // 2, 2], [VALUES // 4, 2], c)
        if c.D > 0:
            if flags & FLAG.RESIDUAL:
                shown = real & (step.withheld == 0)
                stream = aligned_pointer(step.places, PLACE.RESIDUAL, gl.float32)
                gl.store(stream + b * hidden + row, total, mask=shown)
