"""Finishing results in the wave kernel: bias, norm, activation, gate, residual stream; publishing; adding up slices."""
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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from onewave.wave.kernel.records import aligned_place, noted, place_of
from onewave.wave.kernel.spin import ABSENT, load_words, poll_words
from onewave.wave.kernel.widen.byte_values import lowered
from onewave.wave.kernel.words import (
    FLAG_ACTIVATE,
    FLAG_EMBEDDED,
    FLAG_GATED,
    FLAG_LOGITS,
    FLAG_RESIDUAL,
    KIND_OUT,
    KIND_PARTIAL,
    KIND_REDUCE_OUT,
    PLACE_BIASES,
    PLACE_EMBEDDING,
    PLACE_RESIDUAL,
    PLACE_SCALES,
    WORD_BIAS,
    WORD_BLOCKS,
    WORD_FIRST_BLOCK,
    WORD_FLAGS,
    WORD_SCALES,
    WORD_SLICE,
    WORD_SOURCE,
    WORD_TARGET,
    WORD_TARGET_STRIDE,
)

__all__ = [
    "bits16",
    "bits32",
    "finish_blocks",
    "load_addend",
    "reduce_pieces",
    "results_over_sequences",
    "results_rows",
    "to_float",
]

# fp32's own quiet NaN: what a result is stored as that would read as "not there yet".
_NAN = gl.constexpr(0x7FC00000)


@gluon.constexpr_function
def results_over_sequences(rows, blocks, warps):
    """The layout of one value a sequence, for results [sequences, blocks * rows] of the multiply partition."""
    return gl.SliceLayout(1, gl.SliceLayout(1, results_layout(rows, blocks, warps)))


@gluon.constexpr_function
def results_layout(rows, blocks, warps):
    """Results in shared memory, [sequences, column groups, blocks * rows]: 4 neighbouring rows and all groups a
    thread."""
    across = min(32, blocks * rows // 4)
    return gl.BlockedLayout([1, 64 // rows, 4], [32 // across, 1, across], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def to_float(words, DTYPE: gl.constexpr):
    """The two 16-bit values of each word, as float32."""
    low = (words & 65535).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    high = ((words >> 16) & 65535).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def activated(y, ACT: gl.constexpr):
    if ACT == 1:
        return y / (1.0 + gl.exp(-y))
    elif ACT == 2:
        return 0.5 * y * (1.0 + gl.erf(y * 0.7071067811865476))
    else:
        return y


@gluon.jit
def bits16(y, DTYPE: gl.constexpr):
    return y.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 65535


@gluon.jit
def bits32(y):
    bits = y.to(gl.int32, bitcast=True)
    return gl.where(bits == ABSENT, _NAN, bits)


@gluon.jit
def addend(
    flags,
    bias_at,
    sequence,
    row,
    shown,
    hidden,
    tokens,
    places,
    DTYPE: gl.constexpr,
    SHAPE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """What a decode step adds to a product: a bias, and the float32 residual stream before it."""
    extra = gl.zeros(SHAPE, gl.float32, LAYOUT)
    if bias_at > 0:
        bias = gl.multiple_of(place_of(places, PLACE_BIASES, gl.float32) + (bias_at - 1), 16)
        extra += gl.load(bias + row, mask=shown, other=0.0)
    if flags & FLAG_RESIDUAL:
        if flags & FLAG_EMBEDDED:
            token = gl.load(tokens + sequence, mask=shown, other=0)
            words = gl.load(
                place_of(places, PLACE_EMBEDDING, gl.int32) + (token * hidden + row) // 2, mask=shown, other=0
            )
            low, high = to_float(words, DTYPE)
            extra += gl.where(row % 2 == 0, low, high)
        else:
            stream = aligned_place(places, PLACE_RESIDUAL, gl.float32) + sequence * hidden + row
            extra += gl.load(stream, mask=shown, other=0.0)
    return extra


@gluon.constexpr_function
def results_rows(rows, blocks, warps):
    """The layout of finished results, [sequences, blocks * rows]."""
    return gl.SliceLayout(1, results_layout(rows, blocks, warps))


@gluon.jit
def load_addend(
    record, number, batch, keep_back, tokens, places,
    NB: gl.constexpr, R: gl.constexpr, G: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """What the step's row blocks from that number on will have added to them, on its way: bias, residual stream or, in
    its place, words of the embedding, [NB, G * R] each."""
    LZ: gl.constexpr = results_rows(R, G, XW)
    b = gl.arange(0, NB, layout=gl.SliceLayout(1, LZ))
    sequence = b[:, None]
    in_step = (number * R + gl.arange(0, G * R, layout=gl.SliceLayout(0, LZ)))[None, :]
    row = noted(record, WORD_FIRST_BLOCK) * R + in_step
    shown = (sequence < batch) & (in_step < noted(record, WORD_BLOCKS) * R) & (keep_back == 0)
    flags = noted(record, WORD_FLAGS)
    # Of a slice's sums the stride is something else.
    hidden = gl.multiple_of(gl.where((flags & FLAG_RESIDUAL) > 0, noted(record, WORD_TARGET_STRIDE) * 2, 0), 8)
    bias_at = noted(record, WORD_BIAS)
    bias = place_of(places, PLACE_BIASES, gl.float32) + bias_at - 1 + row + sequence * 0
    bias = gl.load(bias, mask=shown & (bias_at > 0), other=0)
    stream = aligned_place(places, PLACE_RESIDUAL, gl.float32) + sequence * hidden + row
    EITHER: gl.constexpr = FLAG_RESIDUAL | FLAG_EMBEDDED
    stream = gl.load(stream, mask=shown & ((flags & EITHER) == FLAG_RESIDUAL), other=0)
    starts = (flags & EITHER) == EITHER
    embedded = shown & starts
    token = gl.load(tokens + b, mask=(b < batch) & starts, other=0)[:, None]
    words = gl.load(place_of(places, PLACE_EMBEDDING, gl.int32) + (token * hidden + row) // 2, mask=embedded, other=0)
    return bias, stream, words


@gluon.jit
def addend_of(loaded, DTYPE: gl.constexpr, R: gl.constexpr, G: gl.constexpr, XW: gl.constexpr):
    """The sum of what load_addend has loaded."""
    bias, stream, words = loaded
    row = gl.arange(0, G * R, layout=gl.SliceLayout(0, results_rows(R, G, XW)))
    low, high = to_float(words, DTYPE)
    return bias + (stream + gl.where((row % 2 == 0)[None, :], low, high))


@gluon.jit
def load_scales(places, record, number, R: gl.constexpr, G: gl.constexpr, LZ: gl.constexpr):
    """The scales of the rows of the step's row blocks from that number on, on their way: float32 [G * R]."""
    row = number * R + gl.arange(0, G * R, layout=gl.SliceLayout(0, LZ))
    first = (
        place_of(places, PLACE_SCALES, gl.float32) + noted(record, WORD_SCALES) + noted(record, WORD_FIRST_BLOCK) * R
    )
    return gl.load(gl.multiple_of(first, 16) + row, mask=row < noted(record, WORD_BLOCKS) * R, other=0.0)


@gluon.jit
def finish_blocks(
    record, kind, ours, theirs, out, out_stride, tokens, places, inverse_rms, batch, keep_back, parts, pfull, pempty,
    results, DTYPE: gl.constexpr, FORMAT: gl.constexpr, NB: gl.constexpr, R: gl.constexpr, G: gl.constexpr,
    SPLITS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr, XW: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Publish a product's row blocks as they come, G at a time. Returns the number of such groups so far."""
    Q: gl.constexpr = 64 // R
    GR: gl.constexpr = G * R
    LP: gl.constexpr = results_layout(R, G, XW)
    LZ: gl.constexpr = results_rows(R, G, XW)
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    blocks = noted(record, WORD_BLOCKS)
    first_block = noted(record, WORD_FIRST_BLOCK)
    target = noted(record, WORD_TARGET)
    stride = noted(record, WORD_TARGET_STRIDE)
    part = noted(record, WORD_SLICE)
    flags = noted(record, WORD_FLAGS)
    adds = ((flags & FLAG_RESIDUAL) > 0) | (noted(record, WORD_BIAS) > 0)
    b = gl.arange(0, NB, layout=gl.SliceLayout(1, LZ))
    r = gl.arange(0, GR, layout=gl.SliceLayout(0, LZ))
    loaded = (0, 0, 0)
    if D > 0:
        # On its way while the first block is being made; under masks, as a branch's end would wait for it.
        loaded = load_addend(record, 0, batch, keep_back, tokens, places, NB, R, G, XW)
    coming = 0
    if FORMAT > 0:
        coming = load_scales(places, record, 0, R, G, LZ)
    for i in range(0, blocks, G):
        row = (b * 0)[:, None] + ((first_block + i) * R + r)[None, :]
        # The last group may be short of a block: what stands in its place is no sequence's.
        sequence = gl.where((i * R + r < blocks * R)[None, :], b[:, None], NB)
        shown = (sequence < batch) & (keep_back == 0)
        if D > 0:
            extra = addend_of(loaded, DTYPE, R, G, XW)
            if adds & (i + G < blocks):  # the next group's is on its way while this one is being made
                loaded = load_addend(record, i + G, batch, keep_back, tokens, places, NB, R, G, XW)
        if FORMAT > 0:
            scales = coming
            coming = load_scales(places, record, i + G, R, G, LZ)
        place = results % 2
        mbarrier.wait(pfull.index(place), (results // 2) & 1)
        y = gl.sum(parts.index(place)._reinterpret(gl.float32, [NB, Q, GR], PARTS).load(LP), axis=1)
        if FORMAT > 0:
            y = lowered(y, DTYPE, FORMAT) * scales[None, :]
        if D > 0:
            y = y * inverse_rms[:, None] + extra
        if (SPLITS > 1) and (kind == KIND_PARTIAL):
            at = gl.multiple_of(target + (row // R * stride + part) * (NB * R) + sequence * R, (1, 4)) + row % R
            gl.store(ours + at, bits32(y), mask=shown)
            gl.store(theirs + at, gl.full([NB, GR], ABSENT, gl.int32, LZ), mask=sequence < NB)
        else:
            publish(
                y, sequence, row, flags, kind == KIND_OUT, target, stride, ours, theirs, out, out_stride, batch,
                keep_back, DTYPE, NB, [NB, GR // 2, 2], [NB, GR // 4, 2], ACT, GATED, D,
            )  # fmt: skip
        if D > 0:
            if flags & FLAG_RESIDUAL:  # after what others wait for
                hidden = gl.multiple_of(stride * 2, 8)
                gl.store(aligned_place(places, PLACE_RESIDUAL, gl.float32) + sequence * hidden + row, y, mask=shown)
        gl.thread_barrier()
        mbarrier.arrive(pempty.index(place), count=1)
        results += 1
    return results


@gluon.jit
def publish(
    y, sequence, row, flags, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back,
    DTYPE: gl.constexpr, NB: gl.constexpr, PAIRS: gl.constexpr, FOURS: gl.constexpr, ACT: gl.constexpr,
    GATED: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Store float32 y: logits to the caller as they are, all else as 16-bit words (publish16)."""
    if D > 0:
        if flags & FLAG_LOGITS:
            bits = y.to(gl.int32, bitcast=True)
            gl.store(out + sequence.to(gl.int64) * out_stride + row, bits, mask=(sequence < batch) & (row < out_stride))
        else:
            publish16(
                y, sequence, row, flags, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back,
                DTYPE, NB, PAIRS, FOURS, ACT, GATED,
            )  # fmt: skip
    else:
        publish16(
            y, sequence, row, flags, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back,
            DTYPE, NB, PAIRS, FOURS, ACT, GATED,
        )  # fmt: skip


@gluon.jit
def publish16(
    y, sequence, row, flags, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back,
    DTYPE: gl.constexpr, NB: gl.constexpr, PAIRS: gl.constexpr, FOURS: gl.constexpr, ACT: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Finish float32 y and store it as 16-bit words, to the caller or to both sets of the exchange.

    sequence, row: of each value, shaped as y, whose last axis holds 4 neighbouring rows a thread; a sequence of NB or
    more is no value at all. PAIRS, FOURS: y's
    shape with the last axis cut in pairs, and that of every second value.
    """
    y0, y1 = gl.split(gl.reshape(y, PAIRS))
    row0, row1 = gl.split(gl.reshape(row, PAIRS))
    sequence0, sequence1 = gl.split(gl.reshape(sequence, PAIRS))
    if (flags & (FLAG_ACTIVATE | FLAG_GATED)) == (FLAG_ACTIVATE | FLAG_GATED):
        if GATED:
            h0, h1 = gl.split(gl.reshape(activated(y0, ACT) * y1, FOURS))
            first_row, second_row = gl.split(gl.reshape(row0, FOURS))
            whose, and_whose = gl.split(gl.reshape(sequence0, FOURS))
            gated = bits16(h0, DTYPE) | (bits16(h1, DTYPE) << 16)
            put(gated, whose, first_row, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back,
                ((1,) if len(FOURS) == 2 else (1, 1)), NB, 4)  # fmt: skip
    else:
        if flags & FLAG_ACTIVATE:
            y0 = activated(y0, ACT)
            y1 = activated(y1, ACT)
        words = bits16(y0, DTYPE) | (bits16(y1, DTYPE) << 16)
        put(words, sequence0, row0, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back,
            ((2,) if len(PAIRS) == 2 else (1, 2)), NB, 2)  # fmt: skip


@gluon.jit
def put(
    words, sequence, row, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back, SIDE,
    NB: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Store words, of ROWS rows each, to the caller, or show them in this token's set and clear them in the next one's.

    Cleared for all NB sequences, whatever this launch's batch: a launch before may have had more, and the next may.
    SIDE: how many neighbours along each axis are stored together; a tuple, as hints take no list here.
    """
    word = gl.max_contiguous(gl.multiple_of(row // ROWS, SIDE), SIDE)
    shown = gl.max_constancy(sequence < batch, SIDE) & (keep_back == 0)
    if to_caller:
        line = gl.max_constancy(gl.multiple_of(sequence.to(gl.int64) * out_stride, SIDE), SIDE)
        gl.store(out + line + word, words, mask=shown)
    else:
        at = gl.max_constancy(gl.multiple_of(target + sequence * stride, SIDE), SIDE) + word
        gl.store(ours + at, words, mask=shown)
        gl.store(theirs + at, words | ABSENT, mask=gl.max_constancy(sequence < NB, SIDE))


@gluon.jit
def reduce_pieces(
    record, kind, ours, theirs, out, out_stride, tokens, places, watch, block, step, batch, keep_back,
    DTYPE: gl.constexpr, NB: gl.constexpr, R: gl.constexpr, SPLITS: gl.constexpr, ACT: gl.constexpr,
    GATED: gl.constexpr, SYNC: gl.constexpr, XW: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Add up partial sums and publish. A piece is PR rows of all sequences; 1,024 values of pieces go side by side."""
    PR: gl.constexpr = min(R, 16)
    VALUES: gl.constexpr = XW * 128
    GROUP: gl.constexpr = min(SPLITS, 8)
    L2: gl.constexpr = gl.BlockedLayout([GROUP, 4], [1, 32], [1, XW], [1, 0])
    LV: gl.constexpr = gl.SliceLayout(0, L2)
    pieces = noted(record, WORD_BLOCKS)
    first = noted(record, WORD_SOURCE)
    first_piece = noted(record, WORD_FIRST_BLOCK)
    target = noted(record, WORD_TARGET)
    stride = noted(record, WORD_TARGET_STRIDE)
    hidden = gl.multiple_of(stride * 2, 8)
    slices = noted(record, WORD_SLICE)
    flags = noted(record, WORD_FLAGS)
    bias_at = noted(record, WORD_BIAS)
    value = gl.arange(0, VALUES, layout=LV)
    part = gl.arange(0, GROUP, layout=gl.SliceLayout(1, L2))
    for begin in range(0, pieces * (NB * PR), VALUES):
        v = begin + value
        row = (first_piece + v // (NB * PR)) * PR + v % PR
        b = (v // PR) % NB
        real = (v < pieces * (NB * PR)) & (b < batch)
        if D > 0:
            total = addend(flags, bias_at, b, row, real, hidden, tokens, places, DTYPE, [VALUES], LV)
        else:
            total = gl.zeros([VALUES], gl.float32, LV)
        base = (row // R) * (slices * (NB * R)) + b * R + row % R
        for group in range(0, slices, GROUP):
            number = part + group
            there = (number < slices)[:, None] & real[None, :]
            at = base[None, :] + (number * (NB * R))[:, None]
            pointers = gl.where(there, (ours + first + at).to(gl.int64), 0)
            if SYNC == 1:
                words = load_words(pointers, GROUP * 4)
            else:
                words = poll_words(pointers, watch, block, step, GROUP * 4)
            total += gl.sum(words.to(gl.float32, bitcast=True), axis=0)
        publish(
            total, gl.where(v < pieces * (NB * PR), b, NB), row, flags, kind == KIND_REDUCE_OUT, target, stride, ours,
            theirs, out, out_stride, batch, keep_back, DTYPE, NB, [VALUES // 2, 2], [VALUES // 4, 2], ACT, GATED, D,
        )  # fmt: skip
        if D > 0:
            if flags & FLAG_RESIDUAL:
                shown = real & (keep_back == 0)
                gl.store(aligned_place(places, PLACE_RESIDUAL, gl.float32) + b * hidden + row, total, mask=shown)
