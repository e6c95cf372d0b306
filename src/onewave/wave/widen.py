"""Products of one-byte weights: bytes from the ring become operand A in registers.

A tile is one or two images of 8 KiB, side by side: each operand A [64, 128], two elements in 16 bits (rounding.paired),
int8 or fp8 e4m3 numbers, all exact in bfloat16 and in float16. An image (rounding.byte_images) is laid so that a
thread's 16-byte loads, without bank conflicts, bring the very bits of which its own registers of A are made: nothing
crosses threads. Four values become four 16-bit ones, but for a power of two, in a few instructions (byte_values.py),
among which mma.sync fits in; wgmma would wait for each of its operands in registers (ptxas says so), as nothing may
write any while it runs.
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.wave.byte_values import widened
from onewave.wave.hand_over import hand_over
from onewave.wave.streamed import behind_keys, tiles_of_keys
from onewave.wave.words import (
    KIND_ATTEND,
    KIND_REDUCE_HIDDEN,
    RECORD_SIZE,
    WORD_BLOCKS,
    WORD_CHUNKS,
    WORD_KIND,
    WORD_TILES,
)

__all__ = ["multiply_byte_steps"]


@gluon.jit
def operand_a(words, OPERAND: gl.constexpr, DTYPE: gl.constexpr, FORMAT: gl.constexpr):
    """Half of operand A, [64, 64], of half an image's words, int32 [32, 32], without a move between threads."""
    value0, value1, value2, value3 = widened(words, DTYPE, FORMAT)
    # [32 columns, 16 rows, row in 8, pair of columns in 8, 8 columns in 32, half of 16 rows, column of a pair]
    a = gl.join(gl.join(value0, value1), gl.join(value2, value3)).to(DTYPE, bitcast=True)
    a = gl.reshape(a, [2, 4, 8, 4, 4, 2, 2])
    a = gl.reshape(gl.permute(a, (1, 5, 2, 0, 4, 3, 6)), [64, 64])
    return gl.convert_layout(a, OPERAND, assert_trivial=True)


@gluon.constexpr_function
def byte_products():
    """The layout of a product of one-byte weights, [64, N]."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])


@gluon.jit
def multiply_byte_steps(
    steps, num_steps, positions, batch, slot, phase, chunks_before, results, ring, full, empty, xs, xfull, xempty,
    parts, pfull, pempty, DTYPE: gl.constexpr, FORMAT: gl.constexpr, IMAGES: gl.constexpr, NB: gl.constexpr,
    R: gl.constexpr, G: gl.constexpr, S: gl.constexpr, XS: gl.constexpr, PC: gl.constexpr, D: gl.constexpr,
    FEW: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """Make all products of the block's steps once, as kernel.multiply_steps does.

    Returns the next tile's slot and phase, and chunks and results of this launch so far.
    """
    N: gl.constexpr = 64 // R * NB
    ACC: gl.constexpr = byte_products()
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    acc0 = gl.zeros([64, N], gl.float32, ACC)
    acc1 = gl.zeros([64, N], gl.float32, ACC)
    acc2 = gl.zeros([64, N], gl.float32, ACC)
    acc3 = gl.zeros([64, N], gl.float32, ACC)
    known = 0  # tiles of keys and values of the last attention task
    for step in range(num_steps):
        record = steps + step * RECORD_SIZE
        kind = gl.load(record + WORD_KIND)
        blocks = gl.load(record + WORD_BLOCKS)
        tiles = gl.load(record + WORD_TILES)
        chunks = gl.load(record + WORD_CHUNKS)
        if kind >= KIND_REDUCE_HIDDEN:
            blocks = 0
        if STREAMS:
            if kind == KIND_ATTEND:
                known = tiles_of_keys(record, tiles, known, positions, batch, D, FEW)
                slot, phase = behind_keys(slot, phase, known, S)
        for block in range(0, blocks, G):
            for chunk in range(chunks):
                place = (chunks_before + chunk) % XS
                if block == 0:
                    mbarrier.wait(xfull.index(place), ((chunks_before + chunk) // XS) & 1)
                x = xs.index(place)._reinterpret(DTYPE, [PC * 2, N, 64], OPERAND)
                count = gl.minimum(tiles - chunk * (PC // IMAGES), PC // IMAGES)
                acc0, slot, phase = multiply_bytes(
                    acc0, count, chunk, x, slot, phase, ring, full, empty, DTYPE, FORMAT, IMAGES, N, S,
                )  # fmt: skip
                if G > 1:
                    acc1, slot, phase = multiply_bytes(
                        acc1, gl.where(block + 1 < blocks, count, 0), chunk, x, slot, phase, ring, full, empty, DTYPE,
                        FORMAT, IMAGES, N, S,
                    )  # fmt: skip
                if G > 2:
                    acc2, slot, phase = multiply_bytes(
                        acc2, gl.where(block + 2 < blocks, count, 0), chunk, x, slot, phase, ring, full, empty, DTYPE,
                        FORMAT, IMAGES, N, S,
                    )  # fmt: skip
                    acc3, slot, phase = multiply_bytes(
                        acc3, gl.where(block + 3 < blocks, count, 0), chunk, x, slot, phase, ring, full, empty, DTYPE,
                        FORMAT, IMAGES, N, S,
                    )  # fmt: skip
                if chunk + 1 < chunks:
                    gl.thread_barrier()
                    mbarrier.arrive(xempty.index(place), count=1, pred=block + G >= blocks)
                    gl.thread_barrier()
            hand_over(acc0, acc1, acc2, acc3, parts, pfull, pempty, results, NB, R, G)
            # Behind its barrier, as somebody waits for the products; barriers behind arrivals as in kernel.py.
            last = (chunks_before + chunks - 1) % XS
            mbarrier.arrive(xempty.index(last), count=1, pred=block + G >= blocks)
            gl.thread_barrier()
            results += 1
        chunks_before += chunks
    return slot, phase, chunks_before, results


@gluon.jit
def multiply_bytes(
    acc, count, chunk, x, slot, phase, ring, full, empty, DTYPE: gl.constexpr, FORMAT: gl.constexpr,
    IMAGES: gl.constexpr, N: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """acc plus the products of so many tiles of a row block, one chunk of activations', [64, N].

    The first chunk's sum begins at 0. x: the chunk's activations, half an image by half. Returns the next tile's slot
    and phase, too.
    """
    ACC: gl.constexpr = byte_products()
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    acc = gl.where(chunk > 0, acc, 0.0)
    # A narrow product is a chain of sums, each waiting for the one before: two chains go side by side.
    other = gl.zeros([64, N], gl.float32, ACC)
    for tile in range(count):
        mbarrier.wait(full.index(slot), phase)
        image = ring.index(slot)._reinterpret(gl.int32, [IMAGES * 64, 32], STORED)
        for half in gl.static_range(IMAGES * 2):
            words = image.slice(half * 32, 32).load(WORDS)
            if N == 8 and half % 2 == 1:
                other = add_product(other, words, x.index(tile * (2 * IMAGES) + half), DTYPE, FORMAT)
            else:
                acc = add_product(acc, words, x.index(tile * (2 * IMAGES) + half), DTYPE, FORMAT)
        fence_async_shared()  # see kernel.multiply_held
        gl.thread_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        gl.thread_barrier()
        wraps = slot == S - 1
        phase = gl.where(wraps, phase ^ 1, phase)
        slot = gl.where(wraps, 0, slot + 1)
    if N == 8:
        acc += other
    return acc, slot, phase


@gluon.jit
def add_product(acc, words, x, DTYPE: gl.constexpr, FORMAT: gl.constexpr):
    """acc plus half a tile's product with activations x, [N, 64] in shared memory."""
    B: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return mma_v2(operand_a(words, A, DTYPE, FORMAT), x.permute((1, 0)).load(B), acc)
