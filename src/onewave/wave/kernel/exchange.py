"""The exchange partition of the wave kernel: activations in, finished row blocks out.

Order of a step: its record; its counters (SYNC 1); its activations, polled word by word (SYNC 0) and stored to shared
memory as operand B, with one over each sequence's RMS if the step normalises; prefetches of keys and weight tiles to
L2; then, by the step's kind, publish row blocks or add up slices (finish.py), attend or combine (attend/); at last the
request for later records.

Thread layouts: activations [N, chunk words], packets of 4 words a thread; results [batch, rows], 4 neighbouring rows a
thread, so that gate and up, or the two halves of a word, meet in one thread. Constexprs: kernel.py.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.wave.kernel.attend.attend import attend, prefetch_split
from onewave.wave.kernel.attend.combine import combine
from onewave.wave.kernel.attend.merge import load_merged
from onewave.wave.kernel.finish import bits16, finish_blocks, reduce_pieces, results_over_sequences, to_float
from onewave.wave.kernel.parameters import ExchangeSets, Site, Step
from onewave.wave.kernel.records import copy_next_records, fence_records, place_word, record_of, record_word
from onewave.wave.kernel.spin import delay, load_words, nanoseconds, poll_words, prefetch_bytes, spin_counter
from onewave.wave.kernel.widen.byte_values import raised
from onewave.wave.kernel.widen.digits import digits_apart, digits_in_rows, digits_of, store_digits
from onewave.wave.kernel.words import (
    FLAG,
    KIND,
    PLACE,
    WORD,
    halves_apart,
    in_digits,
    is_mixed,
    is_nested,
    takes_digits,
    tile_bytes,
)


@gluon.jit
def exchange_partition(records, inputs, sequences, ring, activations, results, memory, c):
    """Go through the thread block's steps.

    inputs: ExchangeInputs. ring, activations, results: channels. memory: AttentionMemory, where D > 0.
    """
    epoch = inputs.counters.epoch
    block = inputs.block
    trace = inputs.trace
    places = records.places
    chunks_before = 0
    number = 0  # groups of row blocks so far
    current = gl.multiple_of(inputs.exchange + (epoch & 1).to(gl.int64) * inputs.set_words, 16)
    other = gl.multiple_of(inputs.exchange + ((epoch & 1) ^ 1).to(gl.int64) * inputs.set_words, 16)
    sets = ExchangeSets(current=current, next=other)
    streamed = 0  # tiles of keys and values so far
    # No loop-invariant motion: addresses of one step's work, kept through all others, would be spilt.
    for at in tl.range(records.num_steps, disable_licm=True):
        fence_records(at)
        record = record_of(at, records)
        kind = record_word(record, WORD.KIND)
        if c.TRACE:
            gl.store(trace + (records.first_step + at) * 4, nanoseconds(kind))
        if c.SYNC == 1:
            wait_for_counters(record, inputs.counters, site_of(inputs, records, at), c.XW)
        withheld = (records.first_step + at == inputs.skipped) & (c.TEST != 0)
        step = Step(
            record=record, kind=kind, withheld=withheld, sets=sets, sequences=sequences, places=places,
            output=inputs.output,
        )  # fmt: skip
        chunks = record_word(record, WORD.CHUNKS)
        if c.D > 0:
            coming = record_word(record, WORD.PREFETCH)
            ahead = record_word(record, WORD.AHEAD_TILES)
        inverse_rms = gl.full([c.NB], 1.0, gl.float32, results_over_sequences(c.R, c.G, c.XW))
        merges = (c.MERGE_WORDS > 0) & (kind < KIND.REDUCE_HIDDEN) & (record_word(record, WORD.SPLITS) > 0)
        if (chunks > 0) & (merges == 0):
            source = (inputs.source, inputs.source_stride)
            inverse_rms = load_activations(
                step, site_of(inputs, records, at), source, chunks, chunks_before, activations, c
            )
        if c.MERGE_WORDS > 0:
            if merges:
                load_merged(step, site_of(inputs, records, at), chunks, chunks_before, activations, c)
        chunks_before += chunks
        if c.D > 0:
            if coming > 0:  # while the step's first product is being made
                to_come = record_of(at + coming, records)
                prefetch_split(to_come, sequences, places, c)
            if ahead > 0:
                TILE: gl.constexpr = tile_bytes(c.FORMAT, c.IMAGES)
                prefetch_tiles(places, block, record_word(record, WORD.AHEAD), ahead, TILE, c.XW)
        if c.TRACE:
            gl.store(trace + (records.first_step + at) * 4 + 1, nanoseconds(chunks))
        if c.TEST == 2:
            # A pseudorandom pause of up to 16 us, another one for every thread block, step and launch.
            mixed = ((block * 40503 + records.first_step + at) * 30011 + epoch * 69069) * 1103515245
            delay((mixed >> 8) & 16383)
        if kind < KIND.REDUCE_HIDDEN:
            number = finish_blocks(step, inverse_rms, results, number, c)
        elif kind < KIND.ATTEND:
            if c.SPLITS > 1:
                reduce_pieces(step, site_of(inputs, records, at), c)
        else:
            if c.D > 0:
                if kind == KIND.ATTEND:
                    site = site_of(inputs, records, at)
                    streamed += attend(step, site, memory, ring, streamed, activations.places[0], c)
                elif c.MERGE_WORDS == 0:  # otherwise product steps merge the splits as they load them
                    combine(step, site_of(inputs, records, at), c)
        if c.SYNC == 1:
            post = record_word(record, WORD.POST)
            # Before the records' request, because tests of compiled code want a barrier before each arrival. Other
            # builds have Triton's own one there; a second would cost registers.
            gl.thread_barrier()
        copy_next_records(records, at)
        gl.thread_barrier()
        if c.SYNC == 1:
            if (post > 0) & (withheld == 0):
                gl.atomic_add(inputs.counters.counts + post - 1, 1, sem="release", scope="gpu")
        if c.TRACE:
            gl.store(trace + (records.first_step + at) * 4 + 2, nanoseconds(number))
    gl.store(inputs.epochs + block, epoch + 1)


@gluon.jit
def site_of(inputs, records, at):
    """The site of waits in the thread block's step `at`. Made where a wait needs it: kept, it would be spilt."""
    return Site(watch=inputs.watch, block=inputs.block, step=records.first_step + at)


@gluon.jit
def prefetch_tiles(places, block, first, count, TILE: gl.constexpr, XW: gl.constexpr):
    """Prefetch some of the thread block's weight tiles to L2, at most one a thread."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, XW * 32, layout=LANES)
    tile = (first + lane).to(gl.int64) * gl.num_programs(0) + block
    prefetch_bytes(place_word(places, PLACE.STREAM) + tile * TILE, lane < count, TILE)


@gluon.constexpr_function
def activations_layout(rows, sequences, words, warps):
    """The layout of a chunk of activations, [rows, words]: packets of 4 words; 8 lanes side by side, 4 rows a warp.

    Row q * sequences + b is of sequence b. With two sequences the lanes' rows are 0, 2, 1, 3: Triton 3.6 reduces
    correctly only over neighbouring bits of a lane's number, and a sequence's rows must be those.
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
    """The layout of `terms` values a sequence, [sequences, terms, 1], in every thread that has results of it."""
    across = min(32, blocks * rows // 4)
    return gl.BlockedLayout([1, terms, 4], [32 // across, 1, across], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def wait_for_counters(record, counters, site, XW: gl.constexpr):
    """Spin on all counters of the step side by side, one a thread."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, XW * 32, layout=LANES)
    first = record_word(record, WORD.FIRST_WAIT)
    count = record_word(record, WORD.WAITS)
    for begin in range(0, count, XW * 32):
        mine = begin + lane < count
        number = gl.load(counters.waits + (first + begin + lane) * 2, mask=mine, other=0)
        value = gl.load(counters.waits + (first + begin + lane) * 2 + 1, mask=mine, other=0)
        value += counters.epoch * gl.load(counters.totals + number, mask=mine, other=0)
        pointer = gl.where(mine, (counters.counts + number).to(gl.int64), 0)
        spin_counter(pointer, value, site.watch, site.block, site.step)
    gl.thread_barrier()


@gluon.jit
def load_activations(step, site, source, chunks, chunks_before, activations, c):
    """Load a step's activations to shared memory chunk by chunk, [N, PC * 64] words each, scaled as byte_values.raised.

    source: the caller's activations and their words a sequence, or the embedding's. Returns 1 / RMS of each sequence,
    float32 [NB] in results' layout; ones if the step does not normalise.
    """
    Q: gl.constexpr = 64 // c.R
    N: gl.constexpr = Q * c.NB
    WORDS: gl.constexpr = N * c.PC * 64 // (c.XW * 32)
    LX: gl.constexpr = activations_layout(N, c.NB, c.PC * 64, c.XW)
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    given_words, given_stride = source
    batch = step.sequences.batch
    first = record_word(step.record, WORD.SOURCE)
    stride = record_word(step.record, WORD.SOURCE_STRIDE)
    column = record_word(step.record, WORD.FIRST_COLUMN)
    columns = record_word(step.record, WORD.COLUMNS)
    flags = record_word(step.record, WORD.FLAGS)
    n = gl.arange(0, N, layout=gl.SliceLayout(1, LX))
    word = gl.arange(0, c.PC * 64, layout=gl.SliceLayout(0, LX))
    DIGITS: gl.constexpr = takes_digits(c.FORMAT, c.NB)
    HALF: gl.constexpr = c.PC * 32
    if DIGITS:  # columns 16 apart in the two halves of a row, so that one thread has both
        word = (word % HALF // 32) * 64 + (word & 24) * 2 + (word // HALF) * 8 + word % 8
    in_slice = ((word // 64) * (Q * 64) + word % 64)[None, :] + ((n // c.NB) * 64)[:, None]
    sequence = (n % c.NB)[:, None] + (word * 0)[None, :]
    given = first < 0
    row = (n % c.NB).to(gl.int64)
    if given:
        stride = given_stride
        begin = given_words + column
        if c.D > 0:  # rows of the embedding
            row = gl.load(step.sequences.tokens + n % c.NB, mask=n % c.NB < batch, other=0)
    else:
        begin = step.sets.current + first + column
    squares = sum_in_threads(gl.zeros([N, c.PC * 64], gl.float32, LX), c)
    gains = 0
    # Before the poll, after which other thread blocks wait for this one. Batches' registers would be short.
    EARLY: gl.constexpr = c.FORMAT > 3 and c.D > 0 and c.NB == 1
    if c.FORMAT > 3 and c.D > 0:
        gains = gains_of(step, flags)
    for chunk in range(chunks):
        place = (chunks_before + chunk) % c.XS
        parity = (((chunks_before + chunk) // c.XS) & 1) ^ 1
        if c.NB <= 2:  # up to 16,384 columns each of a step's chunks has a place of its own, which is free by now
            mbarrier.wait(activations.empty.index(place), parity)
        at = in_slice + chunk * (c.PC * Q * 64)
        pointers = (begin + (row * stride)[:, None] + at).to(gl.int64)
        pointers = gl.where((at < columns) & (sequence < batch), pointers, 0)
        if EARLY:
            gain = load_gains(gains, at, (at < columns) & (gains != 0))
        if c.SYNC == 1:
            words = load_words(pointers, WORDS)
        else:
            if given:
                words = load_words(pointers, WORDS)
            else:
                words = poll_words(pointers, site.watch, site.block, site.step, WORDS)
        plain = words
        if c.FORMAT > 3 and c.D > 0:
            if gains != 0:
                low, high = to_float(words, c.DTYPE)
                if not EARLY:
                    squares += sum_in_threads(low * low + high * high, c)
                    gain = load_gains(gains, at, at < columns)
                words = gained(low, high, gain, c.DTYPE)
        if c.NB > 2:  # the place may be free only when the chunk has come
            mbarrier.wait(activations.empty.index(place), parity)
        stored = activations.places[0].index(place)._reinterpret(gl.int32, [N, c.PC * 64], STORED)
        if DIGITS and is_mixed(c.FORMAT):
            if in_digits(record_word(step.record, WORD.WIDTH), c):
                store_chunk(words, place, activations, c)
            else:
                ordered = gl.permute(gl.reshape(words, [N, 2, c.PC, 4, 8]), (0, 2, 3, 1, 4))
                stored.store(gl.reshape(raised(ordered, c.DTYPE, c.FORMAT), [N, c.PC * 64]))
        elif DIGITS:
            store_chunk(words, place, activations, c)
        else:
            stored.store(raised(words, c.DTYPE, c.FORMAT))
        if c.FORMAT == 0:  # mma.sync loads its operands by ordinary loads; a fence would only wait for the stores
            fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(activations.full.index(place), count=1)
        # Triton wants a barrier after an arrival: here no warp waits for it, after the next chunk's poll all would.
        gl.thread_barrier()
        if c.D > 0:
            norms = flags & FLAG.NORM
            if c.FORMAT > 3 and not EARLY:
                norms = gl.where(gains == 0, norms, 0)
            if norms:  # a branch, which also keeps this work after the arrival
                low, high = to_float(plain if EARLY else words, c.DTYPE)
                squares += sum_in_threads(low * low + high * high, c)
    inverse = gl.full([c.NB], 1.0, gl.float32, results_over_sequences(c.R, c.G, c.XW))
    if c.D > 0:
        if flags & FLAG.NORM:
            total = sum_of_sequences(squares, c)
            mean = total / (2 * columns).to(gl.float32)
            inverse = 1.0 / gl.sqrt(mean + c.EPS)
    return inverse


@gluon.jit
def store_chunk(words, place, activations, c):
    """Store a chunk of activations in digits. words: [N, PC * 64], of columns 16 apart in the two halves of a row."""
    N: gl.constexpr = words.shape[0]
    first, second = gl.split(gl.permute(gl.reshape(words, [N, 2, c.PC, 32]), (2, 0, 3, 1)))
    digits = digits_in_rows(digits_of(first, second, c.DTYPE, c.FORMAT))
    if halves_apart(c.FORMAT, c.NB):
        digits = digits_apart(digits)
    store_digits(digits, activations.places[0].index(place), activations.places[1].index(place))
    if is_nested(c.FORMAT):
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        activations.places[2].index(place)._reinterpret(gl.int32, [c.PC, 4 * N], PLAIN).store(digits[2])


@gluon.jit
def gains_of(step, flags):
    """The address of the words of the gains that a step's activations are multiplied by; 0 for none."""
    gains = place_word(step.places, PLACE.GAINS)
    first = record_word(step.record, WORD.GAIN).to(gl.int64) * 4
    return gl.where(((flags & FLAG.NORM) > 0) & (gains != 0), gains + first, 0)


@gluon.jit
def load_gains(gains, at, wanted):
    """Load the words of gains beside words of activations. at: of each word of a row."""
    return gl.load(gains.to(gl.pointer_type(gl.int32)) + at, mask=wanted, other=0)


@gluon.jit
def gained(low, high, gains, DTYPE: gl.constexpr):
    """Multiply activations by the gains in these words, rounded to DTYPE: words."""
    first, second = to_float(gains, DTYPE)
    return bits16(low * first, DTYPE) | (bits16(high * second, DTYPE) << 16)


@gluon.jit
def sum_in_threads(values, c):
    """Sum what a thread has of a row, a packet's four words apart: [N, words] to [N, warps side by side, 32]."""
    N: gl.constexpr = 64 // c.R * c.NB
    WIDE: gl.constexpr = max(1, c.XW * 4 // N)
    return gl.sum(gl.reshape(values, [N, values.shape[1] // (32 * WIDE), WIDE, 32]), axis=1)


@gluon.jit
def sum_of_sequences(squares, c):
    """Sum each sequence's values: [NB], in results' layout. squares: from sum_in_threads.

    Each warp sums what it has of a row, then every thread what the warps have of its sequences. Triton's own sum over
    warps has more barriers, and keeps a register alive through the loop over steps.
    """
    Q: gl.constexpr = 64 // c.R
    WIDE: gl.constexpr = squares.shape[1]
    of_warps = gl.sum(squares, axis=2)
    of_sequences = gl.reshape(gl.permute(gl.reshape(of_warps, [Q, c.NB, WIDE]), (1, 0, 2)), [c.NB, Q * WIDE, 1])
    own = gl.convert_layout(of_sequences, sums_layout(c.R, c.G, Q * WIDE, c.XW))
    return gl.convert_layout(gl.sum(gl.sum(own, axis=1), axis=1), results_over_sequences(c.R, c.G, c.XW))
