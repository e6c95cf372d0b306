"""Products of one-byte and compact weights: bytes from the ring become operand A in registers, for mma.sync.

A tile of one-byte weights is one or two images of 8 KiB, side by side. An image is operand A [64, 128], two elements in
16 bits (rounding.paired): int8 or fp8 e4m3 numbers, all exact in bfloat16 and in float16. Its layout
(rounding.bytes_of_threads) gives a thread, by 16-byte loads without bank conflicts, the bits of its own registers of A:
no value crosses threads. Widening four values takes a few instructions, up to a power of two (byte_values.py). Compact
weights (compact.py) are thirteen words a 32 numbers; their tiles have lists of numbers that are multiplied one by one.
Of one sequence int8 weights are bytes for the integer tensor cores instead (digits.py).

Why mma.sync and not wgmma: nothing may write wgmma's operands in registers while it runs, so it needs more registers
than attention leaves, and gains nothing where they are left (docs/log/weight-formats.md).

Order, for each tile: its full barrier; loads and products, half an image at a time; a fence and a barrier; its empty
barrier. Roofline: the rate at which one warpgroup widens and multiplies, beside the memory's. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.wave.kernel.attend.streamed import skip_tiles, tiles_of_keys
from onewave.wave.kernel.hand_over import hand_over, hand_over_one, next_slot, product_of
from onewave.wave.kernel.widen.byte_values import widened
from onewave.wave.kernel.widen.compact_values import compact_numbers, listed_numbers
from onewave.wave.kernel.widen.digits import digits_at, no_digit_sums
from onewave.wave.kernel.widen.groups import multiply_digits, multiply_groups
from onewave.wave.kernel.widen.halves import no_kept_sums
from onewave.wave.kernel.widen.operands import byte_products, parts_of
from onewave.wave.kernel.words import (
    KIND,
    LIST_SIZE,
    RECORD_SIZE,
    WORD,
    halves_apart,
    in_digits,
    is_mixed,
    takes_digits,
    times_of,
)


@gluon.jit
def operand_a(words, OPERAND: gl.constexpr, PARTS: gl.constexpr, c):
    """Build half of operand A, [PARTS, 64 / PARTS, 64], from half an image's words, int32 [32, 32].

    No value moves between threads.
    """
    value0, value1, value2, value3 = widened(words, c.DTYPE, c.FORMAT)
    # [32 columns, 16 rows, row in 8, pair of columns in 8, 8 columns in 32, half of 16 rows, column of a pair]
    a = gl.join(gl.join(value0, value1), gl.join(value2, value3)).to(c.DTYPE, bitcast=True)
    a = gl.reshape(a, [2, 4, 8, 4, 4, 2, 2])
    a = gl.reshape(gl.permute(a, (1, 5, 2, 0, 4, 3, 6)), [PARTS, 64 // PARTS, 64])
    return gl.convert_layout(a, OPERAND, assert_trivial=True)


@gluon.jit
def multiply_byte_steps(steps, num_steps, sequences, ring, activations, results, c, OWN: gl.constexpr):
    """Make all products of the thread block's steps, as kernel.multiply_steps does from 16-bit weights.

    OWN: the row block of each group that this partition makes, where there are two multiply partitions.
    """
    slot = 0
    phase = 0
    chunks_before = 0
    number = 0
    TILES: gl.constexpr = c.PC // c.IMAGES  # of a chunk
    DIGITS: gl.constexpr = takes_digits(c.FORMAT, c.NB)
    if DIGITS:
        accs = no_sums(c)
    else:
        accs = no_accs(c)
    known = 0  # tiles of keys and values of the last attention task
    for step in range(num_steps):
        record = steps + step * RECORD_SIZE
        kind, blocks, tiles, chunks = product_of(record)
        width = 1
        share = TILES
        if is_mixed(c.FORMAT):
            width = gl.maximum(gl.load(record + WORD.WIDTH), 1)
            share = TILES * times_of(width)
        if c.STREAMS:
            if kind == KIND.ATTEND:
                known = tiles_of_keys(record, tiles, known, sequences, c)
                slot, phase = skip_tiles(slot, phase, known, c.S)
        channels = (ring, activations, results)
        counts = (blocks, tiles, chunks, width, share)
        at = (slot, phase, chunks_before, number)
        if DIGITS and is_mixed(c.FORMAT):
            if in_digits(width, c):
                slot, phase, number = multiply_blocks(no_sums(c), counts, at, channels, c, OWN, 1)[1:]
            else:
                slot, phase, number = multiply_blocks(no_accs(c), counts, at, channels, c, OWN, 0)[1:]
        else:
            accs, slot, phase, number = multiply_blocks(accs, counts, at, channels, c, OWN, DIGITS)
        chunks_before += chunks


@gluon.jit
def no_sums(c):
    """Zeros where the float32 sums of four row blocks are, of products with digits."""
    if halves_apart(c.FORMAT, c.NB):
        zero = no_kept_sums()
        return zero, zero, zero, zero
    else:
        return no_digit_sums(c)


@gluon.jit
def no_accs(c):
    """Zeros where the float32 sums of four row blocks are, [PARTS, 64 / PARTS, N / PARTS] each."""
    N: gl.constexpr = 64 // c.R * c.NB
    PARTS: gl.constexpr = parts_of(c.R, c.NB)
    zero = gl.zeros([PARTS, 64 // PARTS, N // PARTS], gl.float32, byte_products(PARTS))
    return zero, zero, zero, zero


@gluon.jit
def multiply_blocks(accs, counts, at, channels, c, OWN: gl.constexpr, DIGITS: gl.constexpr):
    """Make a step's products, and hand them over. accs: of four row blocks.

    counts: the step's row blocks, tiles, chunks, width and tiles of a chunk. at: slot and phase, and the chunks and
    groups before. DIGITS: whether activations are in digits. Returns accs, slot, phase, and the groups then.
    """
    acc0, acc1, acc2, acc3 = accs
    blocks, tiles, chunks, width, share = counts
    slot, phase, chunks_before, number = at
    ring, activations, results = channels
    N: gl.constexpr = 64 // c.R * c.NB
    PARTS: gl.constexpr = acc0.shape[0]
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    for block in range(0, blocks, c.G):
        for chunk in range(chunks):
            place = (chunks_before + chunk) % c.XS
            if block == 0:
                mbarrier.wait(activations.full.index(place), ((chunks_before + chunk) // c.XS) & 1)
            x = activations.places[0].index(place)._reinterpret(c.DTYPE, [c.PC * 2, PARTS, N // PARTS, 64], OPERAND)
            count = gl.minimum(tiles - chunk * share, share)
            for one in gl.static_range(c.G if c.MULTIPLIERS > 1 else 0):
                there = gl.where(block + one < blocks, count, 0)
                if one == OWN:
                    acc0, slot, phase = multiply_bytes(acc0, there, chunk, x, slot, phase, ring, c)
                else:
                    slot, phase = skip_block(slot, phase, there, c.S)
            if DIGITS:
                acc0, acc1, acc2, acc3, slot, phase = multiply_digits(
                    (acc0, acc1, acc2, acc3), (count, width), blocks - block, chunk,
                    digits_at(place, activations, PARTS, N, c), (slot, phase), ring, c,
                )  # fmt: skip
            elif c.FORMAT > 3:
                acc0, acc1, acc2, acc3, slot, phase = multiply_groups(
                    (acc0, acc1, acc2, acc3), (count, width), blocks - block, chunk, x, (slot, phase), ring, c
                )
            elif c.MULTIPLIERS == 1:
                acc0, slot, phase = multiply_bytes(acc0, count, chunk, x, slot, phase, ring, c)
            if c.FORMAT < 4 and c.MULTIPLIERS == 1 and c.G > 1 and DIGITS == 0:
                there = gl.where(block + 1 < blocks, count, 0)
                acc1, slot, phase = multiply_bytes(acc1, there, chunk, x, slot, phase, ring, c)
            if c.FORMAT < 4 and c.MULTIPLIERS == 1 and c.G > 2 and DIGITS == 0:
                there = gl.where(block + 2 < blocks, count, 0)
                acc2, slot, phase = multiply_bytes(acc2, there, chunk, x, slot, phase, ring, c)
                there = gl.where(block + 3 < blocks, count, 0)
                acc3, slot, phase = multiply_bytes(acc3, there, chunk, x, slot, phase, ring, c)
            if chunk + 1 < chunks:
                gl.thread_barrier()
                mbarrier.arrive(activations.empty.index(place), count=1, pred=block + c.G >= blocks)
                gl.thread_barrier()
        if c.MULTIPLIERS == 1:
            hand_over((acc0, acc1, acc2, acc3), results, number, c)
        else:
            hand_over_one(acc0, OWN, results, number, c)
        # After the hand-over's barrier, because the exchange partition waits for the products; barriers after
        # arrivals as in kernel.py.
        last = (chunks_before + chunks - 1) % c.XS
        mbarrier.arrive(activations.empty.index(last), count=1, pred=block + c.G >= blocks)
        gl.thread_barrier()
        number += 1
    return (acc0, acc1, acc2, acc3), slot, phase, number


@gluon.jit
def skip_block(slot, phase, count, S: gl.constexpr):
    """Advance slot and phase by `count` tiles, at most S, that the other multiply partition takes."""
    wraps = slot + count >= S
    return gl.where(wraps, slot + count - S, slot + count), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def multiply_bytes(acc, count, chunk, x, slot, phase, ring, c):
    """Add to acc the products of `count` tiles of a row block with one chunk of activations, in `parts_of` parts.

    The first chunk's sum begins at 0. x: the chunk's activations, half an image by half. Returns acc and the next
    tile's slot and phase.
    """
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    acc = gl.where(chunk > 0, acc, 0.0)
    # A narrow product is a chain of sums, each waiting for the one before: two chains overlap.
    other = gl.zeros_like(acc)
    NARROW: gl.constexpr = acc.shape[2] == 8
    for tile in range(count):
        mbarrier.wait(ring.full.index(slot), phase)
        if c.FORMAT == 3:
            acc, other = add_compact_tile((acc, other), tile, x, slot, ring.places, c)
        else:
            image = ring.places[0].index(slot)._reinterpret(gl.int32, [c.IMAGES * 64, 32], STORED)
            for half in gl.static_range(c.IMAGES * 2):
                words = image.slice(half * 32, 32).load(WORDS)
                if NARROW and half % 2 == 1:
                    other = add_product(other, words, x.index(tile * (2 * c.IMAGES) + half), c)
                else:
                    acc = add_product(acc, words, x.index(tile * (2 * c.IMAGES) + half), c)
        fence_async_shared()  # as in kernel.multiply_held
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index(slot), count=1)
        gl.thread_barrier()
        slot, phase = next_slot(slot, phase, c.S)
    if NARROW:
        acc += other
    return acc, slot, phase


@gluon.jit
def add_product(acc, words, x, c):
    """Add to acc half a tile's product with activations x, [PARTS, N / PARTS, 64] in shared memory."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return mma_v2(operand_a(words, A, acc.shape[0], c), operand_b(x, acc), acc)


@gluon.jit
def operand_b(x, acc):
    """Load activations, [PARTS, N / PARTS, 64] in shared memory, as operand B of acc's product."""
    return x.permute((0, 2, 1)).load(gl.DotOperandLayout(1, acc.type.layout, 2))


@gluon.jit
def add_compact_tile(sums, tile, x, slot, rings, c):
    """Add a tile's product with its activations among x's to two sums; of a wide product to the first alone."""
    acc, other = sums
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    planes, beside, lists = rings
    first = planes.index(slot * 3)._reinterpret(gl.int32, [c.IMAGES * 32, 32], STORED)
    second = planes.index(slot * 3 + 1)._reinterpret(gl.int32, [c.IMAGES * 32, 32], STORED)
    third = planes.index(slot * 3 + 2)._reinterpret(gl.int32, [c.IMAGES * 32, 32], STORED)
    NARROW: gl.constexpr = acc.shape[2] == 8
    fourth = beside.index(slot)._reinterpret(gl.int32, [c.IMAGES * 8, 32], gl.NVMMASharedLayout(0, 32, 2))
    for half in gl.static_range(c.IMAGES * 2):
        at = x.index(tile * (2 * c.IMAGES) + half)
        if NARROW and half % 2 == 1:
            other = add_compact_half(other, half, (first, second, third), fourth, at, c.DTYPE)
        else:
            acc = add_compact_half(acc, half, (first, second, third), fourth, at, c.DTYPE)
    words = lists.index(slot)._reinterpret(gl.int32, [LIST_SIZE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    listed = word_of_list(words, 0)
    for number in range(1, listed + 1):
        word = word_of_list(words, number)
        acc = add_listed(acc, word, x.index(tile * (2 * c.IMAGES) + ((word >> 12) & 3)), c.DTYPE)
    return acc, other


@gluon.jit
def add_compact_half(acc, half: gl.constexpr, planes, beside, x, DTYPE: gl.constexpr):
    """Add to acc half an image's product with activations x, [PARTS, N / PARTS, 64] in shared memory."""
    first, second, third = planes
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    ONE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    words = words_of_half(first, half) + words_of_half(second, half) + words_of_half(third, half)
    last = twice(gl.reshape(beside.slice(half * 4, 4).load(ONE), [16, 8]))
    numbers = compact_numbers(words, gl.convert_layout(last, words[0].type.layout, assert_trivial=True))
    return mma_v2(operand_of_numbers(numbers, A, acc.shape[0], DTYPE), operand_b(x, acc), acc)


@gluon.jit
def words_of_half(plane, half: gl.constexpr):
    """Load a thread's four words of half an image, int32 [16, 8, 2] each."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    words = gl.reshape(plane.slice(half * 16, 16).load(WORDS), [16, 8, 2, 2])
    even, odd = gl.split(words)
    word0, word2 = gl.split(even)
    word1, word3 = gl.split(odd)
    return twice(word0), twice(word1), twice(word2), twice(word3)


@gluon.jit
def twice(word):
    """Repeat a word for either number of a pair, along a new last axis."""
    return gl.join(word, word)


@gluon.jit
def operand_of_numbers(numbers, OPERAND: gl.constexpr, PARTS: gl.constexpr, DTYPE: gl.constexpr):
    """Build half of operand A, [PARTS, 64 / PARTS, 64], from a thread's numbers (compact_values.py).

    No value moves between threads.
    """
    tensors = numbers
    for level in gl.static_range(4):
        tensors = joined(tensors, 8 >> level)
    # [16 rows, row in 8, pair of columns in 8, column of a pair, 16 columns, half of them, half of 16 rows]
    a = gl.reshape(tensors[0].to(DTYPE, bitcast=True), [4, 8, 4, 2, 4, 2, 2])
    a = gl.reshape(gl.permute(a, (0, 6, 1, 4, 5, 2, 3)), [PARTS, 64 // PARTS, 64])
    return gl.convert_layout(a, OPERAND, assert_trivial=True)


@gluon.jit
def joined(tensors, HALF: gl.constexpr):
    """Join each tensor of a tuple's first half with its counterpart in the second half, along a new last axis."""
    made = ()
    for at in gl.static_range(HALF):
        made = made + (gl.join(tensors[at], tensors[at + HALF]),)
    return made


@gluon.jit
def word_of_list(words, at):
    """Load a word of a tile's list."""
    return gl.max(words.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def add_listed(acc, word, x, DTYPE: gl.constexpr):
    """Add to acc the products of one number of a tile's list with the activations of its half, x."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    ONE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    warps = gl.arange(0, 4, gl.SliceLayout(1, ONE))
    lanes = gl.arange(0, 32, gl.SliceLayout(0, ONE))
    thread = twice(gl.reshape(warps[:, None] * 32 + lanes[None, :], [16, 8]))
    numbers = listed_numbers(thread, gl.zeros_like(thread) + word)
    # A listed number is 2^64 times what the sums count in.
    return mma_v2(operand_of_numbers(numbers, A, acc.shape[0], DTYPE), operand_b(x, acc), acc * 2.0**64) * 2.0**-64
