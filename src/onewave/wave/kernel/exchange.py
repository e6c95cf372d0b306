"""The exchange partition of the wave kernel: activations in, finished row blocks out.

A step begins with its waits (SYNC 1) and the load of its activations into shared memory as operand B, polled word by
word (SYNC 0); with them, if the step normalises, one over each sequence's root mean square. Then what the step's kind
says: finish and publish a product's row blocks or a reduction (finish.py), attend (attend.py) or combine (combine.py).

Thread layouts: activations [N, chunk words], a thread holding packets of 4 words; results [batch, rows], a thread
holding 4 neighbouring rows, so that gate and up, or the two halves of a word, meet in one thread.
"""
# ruff: noqa: RET505, SIM102, SIM108, RUF059, RUF005, B007, RUF100
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnusedVariable=false, reportReturnType=false, reportPossiblyUnboundVariable=false
# (Triton ships no type information.)

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.wave.kernel.attend.attend import attend, prefetch_split
from onewave.wave.kernel.attend.combine import combine
from onewave.wave.kernel.attend.merge import load_merged
from onewave.wave.kernel.finish import (
    finish_blocks,
    reduce_pieces,
    results_over_sequences,
    to_float,
)
from onewave.wave.kernel.records import (
    bring_next,
    let_go,
    noted,
    place_word,
    record_of,
)
from onewave.wave.kernel.spin import delay, load_words, nanoseconds, poll_words, prefetch_bytes, spin_counter
from onewave.wave.kernel.widen.byte_values import raised
from onewave.wave.kernel.words import (
    FLAG_NORM,
    KIND_ATTEND,
    KIND_REDUCE_HIDDEN,
    PLACE_STREAM,
    WORD_AHEAD,
    WORD_AHEAD_TILES,
    WORD_CHUNKS,
    WORD_COLUMNS,
    WORD_FIRST_COLUMN,
    WORD_FIRST_WAIT,
    WORD_FLAGS,
    WORD_KIND,
    WORD_POST,
    WORD_PREFETCH,
    WORD_SOURCE,
    WORD_SOURCE_STRIDE,
    WORD_SPLITS,
    WORD_WAITS,
    tile_bytes,
)

__all__ = ["exchange_partition"]


@gluon.jit
def exchange_partition(
    records, first_step, num_steps, source, exchange, out, waits, counters, totals, epochs, epoch, watch, trace,
    tokens, positions, slots, block, batch, source_stride, out_stride, set_words, skipped, ring, full, empty, xs, xfull,
    xempty, parts, pfull, pempty, heads, notes, places, nfull,
    DTYPE: gl.constexpr, FORMAT: gl.constexpr, IMAGES: gl.constexpr, NB: gl.constexpr, R: gl.constexpr,
    G: gl.constexpr, S: gl.constexpr, XS: gl.constexpr, PC: gl.constexpr, SPLITS: gl.constexpr, ACT: gl.constexpr,
    GATED: gl.constexpr, SYNC: gl.constexpr, TEST: gl.constexpr,
    TRACE: gl.constexpr, XW: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, CH: gl.constexpr,
    FEW: gl.constexpr, KSPLITS: gl.constexpr, QKNORM: gl.constexpr, EPS: gl.constexpr, SCALE: gl.constexpr,
    PAGE: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """Go through the block's steps. epoch: how often the block has done so before."""
    chunks_before = 0
    results = 0
    ours = gl.multiple_of(exchange + (epoch & 1).to(gl.int64) * set_words, 16)
    theirs = gl.multiple_of(exchange + ((epoch & 1) ^ 1).to(gl.int64) * set_words, 16)
    streamed = 0  # tiles of keys and values so far
    # Nothing is computed ahead of the loop: addresses of one step's work, kept for all others, would be spilt.
    for step in tl.range(num_steps, disable_licm=True):
        let_go(step)
        record = record_of(step, notes, nfull)
        kind = noted(record, WORD_KIND)
        if TRACE:
            gl.store(trace + (first_step + step) * 4, nanoseconds(kind))
        if SYNC == 1:
            wait_for_counters(record, waits, counters, totals, epoch, watch, block, first_step + step, XW)
        keep_back = (first_step + step == skipped) & (TEST != 0)
        chunks = noted(record, WORD_CHUNKS)
        if D > 0:
            coming = noted(record, WORD_PREFETCH)
            ahead = noted(record, WORD_AHEAD_TILES)
        inverse_rms = gl.full([NB], 1.0, gl.float32, results_over_sequences(R, G, XW))
        merges = (FEW > 0) & (kind < KIND_REDUCE_HIDDEN) & (noted(record, WORD_SPLITS) > 0)
        if (chunks > 0) & (merges == 0):
            inverse_rms = load_activations(
                record, chunks, chunks_before, source, ours, tokens, places, watch, block, first_step + step,
                batch, source_stride, xs, xfull, xempty, DTYPE, FORMAT, NB, R, G, XS, PC, SYNC, XW, D, EPS,
            )  # fmt: skip
        if FEW > 0:
            if merges:
                load_merged(
                    record, chunks, chunks_before, ours, positions, watch, block, first_step + step, xs, xfull, xempty,
                    DTYPE, FORMAT, R, XS, PC, SYNC, XW, D, FEW, IMAGES,
                )  # fmt: skip
        chunks_before += chunks
        if D > 0:
            if coming > 0:  # while the step's first product is being made
                to_come = record_of(step + coming, notes, nfull)
                prefetch_split(to_come, positions, slots, places, batch, D, XW, FEW, PAGE, STREAMS)
            if ahead > 0:
                prefetch_tiles(places, block, noted(record, WORD_AHEAD), ahead, tile_bytes(FORMAT, IMAGES), XW)
        if TRACE:
            gl.store(trace + (first_step + step) * 4 + 1, nanoseconds(chunks))
        if TEST == 2:
            # A pseudorandom pause of up to 16 us, another one for every block, step and launch.
            mixed = ((block * 40503 + first_step + step) * 30011 + epoch * 69069) * 1103515245
            delay((mixed >> 8) & 16383)
        if kind < KIND_REDUCE_HIDDEN:
            results = finish_blocks(
                record, kind, ours, theirs, out, out_stride, tokens, places, inverse_rms, batch, keep_back, parts,
                pfull, pempty, results, DTYPE, FORMAT, NB, R, G, SPLITS, ACT, GATED, XW, D,
            )  # fmt: skip
        elif kind < KIND_ATTEND:
            if SPLITS > 1:
                reduce_pieces(
                    record, kind, ours, theirs, out, out_stride, tokens, places, watch, block,
                    first_step + step, batch, keep_back, DTYPE, NB, R, SPLITS, ACT, GATED, SYNC, XW, D,
                )  # fmt: skip
        else:
            if D > 0:
                if kind == KIND_ATTEND:
                    streamed += attend(
                        record, ours, theirs, positions, slots, places, watch, block, first_step + step,
                        batch, keep_back, heads, ring, full, empty, streamed, xs, DTYPE, D, GP, QKNORM, EPS, SCALE,
                        SYNC, S, XW, FEW, PAGE, STREAMS,
                    )  # fmt: skip
                elif FEW == 0:  # otherwise whoever reads the splits merges them
                    combine(
                        record, ours, theirs, positions, watch, block, first_step + step, batch, keep_back,
                        DTYPE, D, CH, KSPLITS, SYNC, XW,
                    )  # fmt: skip
        if SYNC == 1:
            post = noted(record, WORD_POST)
            # Before what bring_next asks for, as tests of compiled code want of each arrival; in other builds Triton
            # has one there by itself, and a second one would cost registers.
            gl.thread_barrier()
        bring_next(records, first_step, num_steps, step, notes, nfull)
        gl.thread_barrier()
        if SYNC == 1:
            if (post > 0) & (keep_back == 0):
                gl.atomic_add(counters + post - 1, 1, sem="release", scope="gpu")
        if TRACE:
            gl.store(trace + (first_step + step) * 4 + 2, nanoseconds(results))
    gl.store(epochs + block, epoch + 1)


@gluon.jit
def prefetch_tiles(places, block, first, count, TILE: gl.constexpr, XW: gl.constexpr):
    """Have some of the block's weight tiles, at most one a thread, brought into the second-level cache."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, XW * 32, layout=LANES)
    tile = (first + lane).to(gl.int64) * gl.num_programs(0) + block
    prefetch_bytes(place_word(places, PLACE_STREAM) + tile * TILE, lane < count, TILE)


@gluon.constexpr_function
def activations_layout(rows, sequences, words, warps):
    """A chunk of activations, [rows, words]: packets of 4 words; 8 lanes side by side, 4 rows a warp.

    Row q * sequences + b is of sequence b. With two of them the lanes' rows are 0, 2, 1, 3: Triton 3.6 reduces rightly
    only over neighbouring bits of a lane's number, over which sums of a sequence's rows would run then.
    """
    across = min(warps, rows // 4)
    if sequences != 2:
        return gl.BlockedLayout([1, 4], [4, 8], [across, warps // across], [1, 0])
    in_warps = 32 * (warps // across)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *([0, bit] for bit in (128, 256, 512) if in_warps <= bit < words)],
        lane_bases=[[0, 4], [0, 8], [0, 16], [2, 0], [1, 0]],
        warp_bases=[
            *([0, bit] for bit in (32, 64, 128) if bit < in_warps),
            *([bit, 0] for bit in (4, 8, 16) if bit < rows),
        ],
        block_bases=[],
        shape=[rows, words],
    )


@gluon.constexpr_function
def sums_layout(rows, blocks, terms, warps):
    """`terms` values of each sequence in every thread that has results of it, [sequences, terms, 1]."""
    across = min(32, blocks * rows // 4)
    return gl.BlockedLayout([1, terms, 4], [32 // across, 1, across], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def wait_for_counters(record, waits, counters, totals, epoch, watch, block, step, XW: gl.constexpr):
    """Spin on all counters of the step side by side, one a thread."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, XW * 32, layout=LANES)
    first = noted(record, WORD_FIRST_WAIT)
    count = noted(record, WORD_WAITS)
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
    record, chunks, chunks_before, source, ours, tokens, places, watch, block, step, batch, source_stride,
    xs, xfull, xempty, DTYPE: gl.constexpr, FORMAT: gl.constexpr, NB: gl.constexpr, R: gl.constexpr, G: gl.constexpr,
    XS: gl.constexpr, PC: gl.constexpr, SYNC: gl.constexpr, XW: gl.constexpr, D: gl.constexpr, EPS: gl.constexpr,
):  # fmt: skip
    """Bring a step's activations into shared memory, raised (byte_values.py): chunk by chunk, [N, PC * 64] words each.

    Returns 1 / rms of each sequence, float32 [NB] laid out for results; ones if the step does not normalise.
    """
    Q: gl.constexpr = 64 // R
    N: gl.constexpr = Q * NB
    WORDS: gl.constexpr = N * PC * 64 // (XW * 32)
    LX: gl.constexpr = activations_layout(N, NB, PC * 64, XW)
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    first = noted(record, WORD_SOURCE)
    stride = noted(record, WORD_SOURCE_STRIDE)
    column = noted(record, WORD_FIRST_COLUMN)
    columns = noted(record, WORD_COLUMNS)
    flags = noted(record, WORD_FLAGS)
    n = gl.arange(0, N, layout=gl.SliceLayout(1, LX))
    word = gl.arange(0, PC * 64, layout=gl.SliceLayout(0, LX))
    in_slice = ((word // 64) * (Q * 64) + word % 64)[None, :] + ((n // NB) * 64)[:, None]
    sequence = (n % NB)[:, None] + (word * 0)[None, :]
    given = first < 0
    row = (n % NB).to(gl.int64)
    if given:
        stride = source_stride
        begin = source + column
        if D > 0:  # rows of the embedding
            row = gl.load(tokens + n % NB, mask=n % NB < batch, other=0)
    else:
        begin = ours + first + column
    squares = of_threads(gl.zeros([N, PC * 64], gl.float32, LX), NB, R, XW)
    for chunk in range(chunks):
        place = (chunks_before + chunk) % XS
        parity = (((chunks_before + chunk) // XS) & 1) ^ 1
        if NB <= 2:  # up to 16,384 columns a step's chunks have a place each, which is free by now
            mbarrier.wait(xempty.index(place), parity)
        at = in_slice + chunk * (PC * Q * 64)
        pointers = (begin + (row * stride)[:, None] + at).to(gl.int64)
        pointers = gl.where((at < columns) & (sequence < batch), pointers, 0)
        if SYNC == 1:
            words = load_words(pointers, WORDS)
        else:
            if given:
                words = load_words(pointers, WORDS)
            else:
                words = poll_words(pointers, watch, block, step, WORDS)
        if NB > 2:  # it may be free when the chunk has come
            mbarrier.wait(xempty.index(place), parity)
        xs.index(place)._reinterpret(gl.int32, [N, PC * 64], STORED).store(raised(words, DTYPE, FORMAT))
        if FORMAT == 0:  # mma.sync's operands are read as they were written; a fence would only wait for the stores
            fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(xfull.index(place), count=1)
        # Triton wants a barrier behind an arrival: here nobody waits for it, behind the next chunk's poll all would.
        gl.thread_barrier()
        if D > 0:
            if flags & FLAG_NORM:  # a branch, which also keeps this work behind the arrival
                low, high = to_float(words, DTYPE)
                squares += of_threads(low * low + high * high, NB, R, XW)
    inverse = gl.full([NB], 1.0, gl.float32, results_over_sequences(R, G, XW))
    if D > 0:
        if flags & FLAG_NORM:
            total = total_of_sequences(squares, NB, R, G, XW)
            mean = total / (2 * columns).to(gl.float32)
            inverse = 1.0 / gl.sqrt(mean + EPS)
    return inverse


@gluon.jit
def of_threads(values, NB: gl.constexpr, R: gl.constexpr, XW: gl.constexpr):
    """Sums over what a thread has of a row, but for the four of a packet: [N, words] to [N, warps side by side, 32]."""
    N: gl.constexpr = 64 // R * NB
    WIDE: gl.constexpr = max(1, XW * 4 // N)
    return gl.sum(gl.reshape(values, [N, values.shape[1] // (32 * WIDE), WIDE, 32]), axis=1)


@gluon.jit
def total_of_sequences(squares, NB: gl.constexpr, R: gl.constexpr, G: gl.constexpr, XW: gl.constexpr):
    """The sum of each sequence's values, [NB], laid out for results. squares: as of_threads makes them.

    Each warp adds up what it has of a row, then every thread what the warps have of its sequences. Triton's own sum
    over warps has more barriers, and leaves some threads a register as it was, which the loop over steps would keep for
    it.
    """
    Q: gl.constexpr = 64 // R
    WIDE: gl.constexpr = squares.shape[1]
    of_warps = gl.sum(squares, axis=2)
    of_sequences = gl.reshape(gl.permute(gl.reshape(of_warps, [Q, NB, WIDE]), (1, 0, 2)), [NB, Q * WIDE, 1])
    own = gl.convert_layout(of_sequences, sums_layout(R, G, Q * WIDE, XW))
    return gl.convert_layout(gl.sum(gl.sum(own, axis=1), axis=1), results_over_sequences(R, G, XW))
