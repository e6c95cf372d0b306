"""The exchange partition of the wave kernel: activations in, finished row blocks out.

A step begins with its waits (SYNC 1) and the load of its activations into shared memory as operand B, polled word by
word (SYNC 0). Then, product: each row block that the multiply partition hands over in shared memory is finished
(activation function, gate times up) and published, or published as float32 partial sums. Reduction: partial sums of all
slices of K are polled and added up in the order of K, 1,024 values at a time, then finished and published.

Thread layouts: activations [N, chunk words], a thread holding packets of 4 words; results [batch, rows], a thread
holding 4 neighbouring rows, so that gate and up, or the two halves of a word, meet in one thread.
"""
# ruff: noqa: RET505, SIM108, RUF059
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportUnusedVariable=false, reportReturnType=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.wave.spin import ABSENT, delay, load_words, nanoseconds, poll_words, spin_counter

__all__ = ["exchange_partition"]

# fp32's own quiet NaN: what a result is stored as that would read as "not there yet".
_NAN = gl.constexpr(0x7FC00000)


@gluon.jit
def exchange_partition(
    steps, first_step, num_steps, source, exchange, out, waits, counters, totals, epochs, epoch, watch, trace,
    block, batch, source_stride, out_stride, set_words, skipped, xs, xfull, xempty, parts, pfull, pempty,
    DTYPE: gl.constexpr, NB: gl.constexpr, R: gl.constexpr, XS: gl.constexpr, PC: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr, GATED: gl.constexpr, SYNC: gl.constexpr, TEST: gl.constexpr, TRACE: gl.constexpr,
    XW: gl.constexpr,
):  # fmt: skip
    ours = exchange + 64 + (epoch & 1).to(gl.int64) * set_words
    theirs = exchange + 64 + ((epoch & 1) ^ 1).to(gl.int64) * set_words
    chunks_before = 0
    results = 0
    for step in range(num_steps):
        record = steps + step * 16
        kind = gl.load(record)
        if TRACE:
            gl.store(trace + (first_step + step) * 4, nanoseconds(kind))
        if SYNC == 1:
            wait_for_counters(record, waits, counters, totals, epoch, watch, block, first_step + step, XW)
        chunks = gl.load(record + 3)
        if chunks > 0:
            load_activations(
                record, chunks, chunks_before, source, exchange, ours, watch, block, first_step + step, batch,
                source_stride, xs, xfull, xempty, NB, R, XS, PC, SYNC, XW,
            )  # fmt: skip
        chunks_before += chunks
        if TRACE:
            gl.store(trace + (first_step + step) * 4 + 1, nanoseconds(chunks))
        if TEST == 2:
            # A pseudorandom pause of up to 16 us, another one for every block, step and launch.
            mixed = ((block * 40503 + first_step + step) * 30011 + epoch * 69069) * 1103515245
            delay((mixed >> 8) & 16383)
        keep_back = (first_step + step == skipped) & (TEST != 0)
        if kind >= 4:
            if SPLITS > 1:
                reduce_pieces(
                    record, kind, exchange, ours, theirs, out, out_stride, watch, block, first_step + step, batch,
                    keep_back, DTYPE, NB, R, SPLITS, ACT, GATED, SYNC, XW,
                )  # fmt: skip
        else:
            results = finish_blocks(
                record, kind, ours, theirs, out, out_stride, batch, keep_back, parts, pfull, pempty, results,
                DTYPE, NB, R, SPLITS, ACT, GATED, XW,
            )  # fmt: skip
        gl.thread_barrier()
        if SYNC == 1:
            post = gl.load(record + 15)
            if (post > 0) & (keep_back == 0):
                gl.atomic_add(counters + post - 1, 1, sem="release", scope="gpu")
        if TRACE:
            gl.store(trace + (first_step + step) * 4 + 2, nanoseconds(results))
    gl.store(epochs + block, epoch + 1)


@gluon.jit
def wait_for_counters(record, waits, counters, totals, epoch, watch, block, step, XW: gl.constexpr):
    """Spin on all counters of the step side by side, one a thread."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, XW * 32, layout=LANES)
    first = gl.load(record + 13)
    count = gl.load(record + 14)
    for begin in range(0, count, XW * 32):
        mine = begin + lane < count
        number = gl.load(waits + (first + begin + lane) * 2, mask=mine, other=0)
        value = gl.load(waits + (first + begin + lane) * 2 + 1, mask=mine, other=0)
        value += epoch * gl.load(totals + number, mask=mine, other=0)
        pointer = gl.where(mine, (counters + number).to(gl.int64), 0)
        spin_counter(pointer, value, watch, block, step)
    gl.thread_barrier()


@gluon.jit
def load_activations(
    record, chunks, chunks_before, source, exchange, ours, watch, block, step, batch, source_stride, xs, xfull, xempty,
    NB: gl.constexpr, R: gl.constexpr, XS: gl.constexpr, PC: gl.constexpr, SYNC: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Bring a step's activations into shared memory: chunk by chunk, [N, PC * 64] words each."""
    Q: gl.constexpr = 64 // R
    N: gl.constexpr = Q * NB
    WORDS: gl.constexpr = N * PC * 64 // (XW * 32)
    WN: gl.constexpr = min(XW, N // 4)
    LX: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WN, XW // WN], [1, 0])
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    first = gl.load(record + 4)
    stride = gl.load(record + 5)
    column = gl.load(record + 6)
    columns = gl.load(record + 7)
    n = gl.arange(0, N, layout=gl.SliceLayout(1, LX))
    word = gl.arange(0, PC * 64, layout=gl.SliceLayout(0, LX))
    in_slice = ((word // 64) * (Q * 64) + word % 64)[None, :] + ((n // NB) * 64)[:, None]
    sequence = (n % NB)[:, None] + (word * 0)[None, :]
    # Words that no sequence has read as zeros.
    nothing = exchange + (word % 4)[None, :] + (n * 0)[:, None]
    given = first < 0
    if given:
        stride = source_stride
        begin = source + column
    else:
        begin = ours + first + column
    for chunk in range(chunks):
        at = in_slice + chunk * (PC * Q * 64)
        pointers = gl.where((at < columns) & (sequence < batch), begin + sequence.to(gl.int64) * stride + at, nothing)
        if SYNC == 1:
            words = load_words(pointers, WORDS)
        else:
            if given:
                words = load_words(pointers, WORDS)
            else:
                words = poll_words(pointers, watch, block, step, WORDS)
        place = (chunks_before + chunk) % XS
        mbarrier.wait(xempty.index(place), (((chunks_before + chunk) // XS) & 1) ^ 1)
        xs.index(place)._reinterpret(gl.int32, [N, PC * 64], STORED).store(words)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(xfull.index(place), count=1)


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
def finish_blocks(
    record, kind, ours, theirs, out, out_stride, batch, keep_back, parts, pfull, pempty, results,
    DTYPE: gl.constexpr, NB: gl.constexpr, R: gl.constexpr, SPLITS: gl.constexpr, ACT: gl.constexpr,
    GATED: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Publish a product's row blocks as they come. Returns the number of row blocks so far."""
    Q: gl.constexpr = 64 // R
    TR: gl.constexpr = R // 4
    LP: gl.constexpr = gl.BlockedLayout([1, Q, 4], [32 // TR, 1, TR], [XW, 1, 1], [2, 1, 0])
    LZ: gl.constexpr = gl.SliceLayout(1, LP)
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    blocks = gl.load(record + 1)
    first_block = gl.load(record + 8)
    target = gl.load(record + 9)
    stride = gl.load(record + 10)
    part = gl.load(record + 11)
    flags = gl.load(record + 12)
    b = gl.arange(0, NB, layout=gl.SliceLayout(1, LZ))
    r = gl.arange(0, R, layout=gl.SliceLayout(0, LZ))
    for i in range(blocks):
        row_block = first_block + i
        place = results % 2
        mbarrier.wait(pfull.index(place), (results // 2) & 1)
        y = gl.sum(parts.index(place)._reinterpret(gl.float32, [NB, Q, R], PARTS).load(LP), axis=1)
        if kind == 1:
            if SPLITS > 1:
                at = target + (row_block * stride + part) * (NB * R) + (b * R)[:, None] + r[None, :]
                shown = (b < batch)[:, None] & ((r >= 0) & (keep_back == 0))[None, :]
                gl.store(ours + at, bits32(y), mask=shown)
                gl.store(theirs + at, gl.full([NB, R], ABSENT, gl.int32, LZ), mask=shown)
        else:
            sequence = b[:, None] + (r * 0)[None, :]
            row = (b * 0)[:, None] + (row_block * R + r)[None, :]
            publish(
                y, sequence, row, flags, kind == 3, target, stride, ours, theirs, out, out_stride, batch, keep_back,
                DTYPE, [NB, R // 2, 2], [NB, R // 4, 2], ACT, GATED,
            )  # fmt: skip
        gl.thread_barrier()
        mbarrier.arrive(pempty.index(place), count=1)
        results += 1
    return results


@gluon.jit
def publish(
    y, sequence, row, flags, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back,
    DTYPE: gl.constexpr, PAIRS: gl.constexpr, FOURS: gl.constexpr, ACT: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Finish float32 y and store it as 16-bit words, to the caller or to both sets of the exchange.

    sequence, row: of each value, shaped as y, whose last axis holds 4 neighbouring rows a thread. PAIRS, FOURS: y's
    shape with the last axis cut in pairs, and that of every second value.
    """
    y0, y1 = gl.split(gl.reshape(y, PAIRS))
    row0, row1 = gl.split(gl.reshape(row, PAIRS))
    sequence0, sequence1 = gl.split(gl.reshape(sequence, PAIRS))
    if flags == 3:
        if GATED:
            h0, h1 = gl.split(gl.reshape(activated(y0, ACT) * y1, FOURS))
            first_row, second_row = gl.split(gl.reshape(row0, FOURS))
            whose, and_whose = gl.split(gl.reshape(sequence0, FOURS))
            gated = bits16(h0, DTYPE) | (bits16(h1, DTYPE) << 16)
            put(gated, whose, first_row // 4, to_caller, target, stride, ours, theirs, out, out_stride, batch,
                keep_back)  # fmt: skip
    else:
        if flags == 1:
            y0 = activated(y0, ACT)
            y1 = activated(y1, ACT)
        words = bits16(y0, DTYPE) | (bits16(y1, DTYPE) << 16)
        put(words, sequence0, row0 // 2, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back)


@gluon.jit
def put(words, sequence, word, to_caller, target, stride, ours, theirs, out, out_stride, batch, keep_back):
    shown = (sequence < batch) & (keep_back == 0)
    if to_caller:
        gl.store(out + sequence.to(gl.int64) * out_stride + word, words, mask=shown)
    else:
        at = target + sequence * stride + word
        gl.store(ours + at, words, mask=shown)
        gl.store(theirs + at, words | ABSENT, mask=shown)


@gluon.jit
def reduce_pieces(
    record, kind, exchange, ours, theirs, out, out_stride, watch, block, step, batch, keep_back,
    DTYPE: gl.constexpr, NB: gl.constexpr, R: gl.constexpr, SPLITS: gl.constexpr, ACT: gl.constexpr,
    GATED: gl.constexpr, SYNC: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Add up partial sums and publish. A piece is PR rows of all sequences; 1,024 values of pieces go side by side."""
    PR: gl.constexpr = min(R, 16)
    VALUES: gl.constexpr = XW * 128
    GROUP: gl.constexpr = min(SPLITS, 8)
    L2: gl.constexpr = gl.BlockedLayout([GROUP, 4], [1, 32], [1, XW], [1, 0])
    LV: gl.constexpr = gl.SliceLayout(0, L2)
    pieces = gl.load(record + 1)
    first = gl.load(record + 4)
    first_piece = gl.load(record + 8)
    target = gl.load(record + 9)
    stride = gl.load(record + 10)
    slices = gl.load(record + 11)
    flags = gl.load(record + 12)
    value = gl.arange(0, VALUES, layout=LV)
    part = gl.arange(0, GROUP, layout=gl.SliceLayout(1, L2))
    for begin in range(0, pieces * (NB * PR), VALUES):
        v = begin + value
        row = (first_piece + v // (NB * PR)) * PR + v % PR
        b = (v // PR) % NB
        real = (v < pieces * (NB * PR)) & (b < batch)
        base = (row // R) * (slices * (NB * R)) + b * R + row % R
        total = gl.zeros([VALUES], gl.float32, LV)
        for group in range(0, slices, GROUP):
            number = part + group
            there = (number < slices)[:, None] & real[None, :]
            at = base[None, :] + (number * (NB * R))[:, None]
            pointers = gl.where(there, ours + first + at, exchange + (value % 4)[None, :] + (number * 0)[:, None])
            if SYNC == 1:
                words = load_words(pointers, GROUP * 4)
            else:
                words = poll_words(pointers, watch, block, step, GROUP * 4)
            total += gl.sum(words.to(gl.float32, bitcast=True), axis=0)
        publish(
            total, gl.where(real, b, batch), row, flags, kind == 5, target, stride, ours, theirs, out, out_stride,
            batch, keep_back, DTYPE, [VALUES // 2, 2], [VALUES // 4, 2], ACT, GATED,
        )  # fmt: skip
