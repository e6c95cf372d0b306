"""x W^T of several tokens, W in the tiles of a wave's stream: widened in registers, once for up to 256 tokens.

The tensor cores make W x^T. W is their operand A, from registers: a lane of the stream's tiles holds the very weights
that it gives them (wave/weights/formats), so that no value moves between threads. x is operand B, by TMA. A thread
block is one SM and takes every num_programs-th tile of the result: ROWS rows of W, TOKENS tokens. Neighbours share x.
A unit is 64 columns of K; a stage of the ring is a unit's words and its slice of x. Partitions, which meet at
mbarriers only:

multiply  a warpgroup each 64 rows, both in one copy of the code. For each unit: words to registers, a unit ahead; masks
          and shifts, and products by powers of two or groups' scales, make bfloat16 weights; wgmma [64, TOKENS] x 64
          runs while the next unit is widened. Then the epilogue, 64 tokens at a time: scales of one-byte weights' rows,
          bias, rounding, transposed on the way into two buffers in shared memory, TMA out; of a gated product SwiGLU of
          rows that take turns, gate and gated.
words     2 warps. cp.async of the words; it runs ahead into the next tiles, and begins while the launch before ends.
x         1 warp. TMA.

Sums run over K from the first column to the last in one chain of wgmma, as in kernel.py. Of compact and 4-bit tiles the
weights are the same, and a token's bits those of the plain product. Of one-byte tiles no weight is rounded, as in a
decode step: a plain product of rounded weights differs, and so these tiles are read by any number of tokens.

With R = 8 sixteen rows are two row blocks, and one place among a tile's threads has two units, 128 columns apart.

Weights of a compact tile's list, which thirteen bits do not reach, are written over by their own 16 bits in registers;
tiles without any (nearly all) skip that.

Bound: the bytes of W below some hundred tokens, the tensor cores from there on. Beside them widening takes 16-lane
integer instructions of a scheduler, a unit of a warp: compact 43, int8 24, fp8 40, four bits 28 to 32.

constexpr    meaning                                          allowed
TOKENS       of a tile                                        16, 64, 128, 256
ROWS         of W in a tile                                   64, 128
STAGES       stages of the ring                               from 3 on, what fits 227 KiB
BAND         row blocks of a band, which goes along the       any
             tokens
GATED        rows of W take turns, gate and gated             True, False
TO_MAP       the result goes out by TMA: bfloat16, rows of    True, False (plain stores)
             whole 16 bytes
PDL          started while the kernel before it ends          True, False
WORDS        places of planes, which units may share          STAGES, or a half or fourth of them, rounded up
FORMAT       of the stream (base/weight_formats.py)           1, 2: one byte; 3: compact; 4 to 10: four bits
R, IMAGES    of the stream's tiles (wave/plan/layout.py)      8, 16, 32, 64; 1, 2, 4
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onewave.gpu.ptx.hook import install
from onewave.ops.attention.hopper.warpgroup import SHARES, own_warpgroup, twin
from onewave.ops.linear.hopper.kernel import column_pieces, sums_layout
from onewave.ops.linear.hopper.narrow_values import (
    byte_pairs,
    group_factors,
    makes_factors,
    nibble_pairs,
    share_of_words,
)
from onewave.ops.linear.hopper.packed_ring import (
    lines_in_stage,
    load_words,
    load_x,
    next_words,
    planes_of,
    read_words,
    tile_place,
    units_of,
)
from onewave.ops.linear.hopper.packed_values import (
    Packed,
    blocks_of,
    compact_pairs,
    load_longest,
    operand,
    row_factors,
    row_scales,
    with_listed,
)

install()

_OWN_REGISTERS = gl.constexpr(208)  # of a thread that multiplies


class Constants(NamedTuple):
    """The constexprs of the kernel's functions; see the module."""

    TOKENS: Any
    ROWS: Any
    STAGES: Any
    BAND: Any
    GATED: Any
    TO_MAP: Any
    PDL: Any
    FORMAT: Any
    WORDS: Any
    R: Any
    IMAGES: Any


class Sizes(NamedTuple):
    """tokens, columns: of the result. token_blocks, row_blocks: of tiles."""

    tokens: Any
    columns: Any
    token_blocks: Any
    row_blocks: Any


class Ring(NamedTuple):
    """Shared memory of x's slices and of W's words, and the mbarriers of its stages."""

    x: Any
    planes: Any
    beside: Any
    full: Any
    free: Any


@gluon.jit
def widened(words, factors, unit: gl.constexpr, c):
    """Make numbers of a unit's words, in the order of compact_pairs."""
    if c.FORMAT == 3:
        pairs = compact_pairs(words, factors, unit > 1, c)
    elif c.FORMAT < 3:
        pairs = byte_pairs(words, unit, c)
    else:
        pairs = nibble_pairs(words, factors, unit, c)
    return pairs


@gluon.jit
def with_lists(pairs, packed, first_row, number, unit: gl.constexpr, most, factors, c):
    """Correct a unit's pairs where a tile of its 64 rows lists weights. number: of its round. most: of longest."""
    UNROLL: gl.constexpr = 2 if c.R > 8 else 4
    ROUNDS: gl.constexpr = units_of(c.R, c.IMAGES) // UNROLL
    if most > 0:
        within = number % ROUNDS * UNROLL + unit
        pairs = with_listed(pairs, packed, first_row, number // ROUNDS, within, most, factors, c)
    return pairs


@gluon.jit
def load_factors(packed, first_row, SUMS: gl.constexpr, c):
    """Load what rows' scales multiply: compact numbers, the scales of 4-bit weights' groups, or bytes' sums."""
    if c.FORMAT == 3:
        factors = row_factors(packed, first_row, c)
    elif c.FORMAT > 3:
        factors = row_scales(packed, first_row, c)
    else:
        row = first_row + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        scales = gl.load(packed.scales + gl.minimum(row, packed.blocks * c.R - 1))
        factors = (scales * (64.0 if c.FORMAT == 1 else 1.0),)
    return factors


@gluon.jit
def multiply_partition(out, bias, packed, sizes, ring, staging, c, group):
    TOKENS: gl.constexpr = c.TOKENS
    SUMS: gl.constexpr = sums_layout(TOKENS)
    UNROLL: gl.constexpr = 2 if c.R > 8 else 4
    ROUNDS: gl.constexpr = units_of(c.R, c.IMAGES) // UNROLL  # of a tile of the stream
    STAGES: gl.constexpr = c.STAGES
    slot = 0
    at_words = 0
    phase = 0
    mbarrier.wait(ring.full.index(0), 0)
    words = read_words(ring, 0, 0, group, 0, (), c)
    num_tiles = sizes.token_blocks * sizes.row_blocks
    left = (
        (num_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * (packed.tiles * ROUNDS * UNROLL)
    )
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token, block = tile_place(tile, sizes, c)
        first_row = block * c.ROWS + group * 64
        factors = load_factors(packed, first_row, SUMS, c)
        sums = gl.zeros([64, TOKENS], gl.float32, SUMS)
        inside = gl.minimum(first_row, packed.blocks * c.R - 1)
        if c.FORMAT == 3:
            longest = load_longest(packed, inside, 0)
        rounds = packed.tiles * ROUNDS
        for number in range(rounds):
            if c.FORMAT == 3:
                most = longest
                longest = load_longest(packed, inside, gl.minimum(number + 1, rounds - 1) // ROUNDS)
            own = factors
            for unit in gl.static_range(UNROLL):
                if makes_factors(unit, c.FORMAT):
                    own = group_factors(words, factors, unit, c)
                pairs = widened(words, own, unit, c)
                if c.FORMAT == 3:
                    pairs = with_lists(pairs, packed, first_row, number, unit, most, factors, c)
                right = ring.x.index(slot).permute((1, 0))
                sums = warpgroup_mma(operand(pairs, SUMS), right, sums, use_acc=True, is_async=True)
                before = (slot + STAGES - 1) % STAGES
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
                # Nothing follows a program's last unit: the phase before has ended.
                left -= 1
                mbarrier.wait(ring.full.index(slot), gl.where(left > 0, phase, phase ^ 1))
                if share_of_words(c.FORMAT, c.R) > 1:
                    at_words = next_words(at_words, unit, c)
                words = read_words(ring, slot, at_words, group, (unit + 1) % UNROLL, words, c)
                # The product before has read its stage, which is free while this one runs.
                sums = warpgroup_mma_wait(1, deps=[sums])
                gl.thread_barrier()
                mbarrier.arrive(ring.free.index(before), count=1, pred=(number > 0) | (unit > 0))
        sums = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(ring.free.index((slot + STAGES - 1) % STAGES), count=1)
        if c.FORMAT < 3:
            sums = sums * factors[0][:, None]
        pieces = column_pieces(sums, TOKENS)
        for number in gl.static_range(len(pieces)):
            put_piece(
                pieces[number], token * TOKENS + number * 64, first_row, out, bias, sizes, staging, c, group, number
            )
    tma.store_wait(0)


@gluon.jit
def multiply_as_one(out, bias, packed, sizes, ring, staging, c):
    """Both warpgroups, in one copy of the code."""
    multiply_partition(out, bias, packed, sizes, ring, staging, c, own_warpgroup(2, _OWN_REGISTERS))


@gluon.jit
def put_piece(piece, first_token, first_row, out, bias, sizes, staging, c, group, number: gl.constexpr):
    """Round a piece of the sums, [64 rows of W, tokens], and write it where it belongs, transposed; of a gated product
    SwiGLU of the rows, which take turns."""
    TOKENS: gl.constexpr = piece.shape[1]
    if bias is not None:
        row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, piece.type.layout))
        number_of = row
        if c.GATED:
            number_of = row // 2 + row % 2 * sizes.columns
            row = row // 2
        piece += gl.load(bias + number_of, mask=row < sizes.columns, other=0.0).to(gl.float32)[:, None]
    if c.GATED:
        made = gated_tokens(piece, staging.index(group * 2))
        first_row = first_row // 2
    else:
        made = piece
    if c.TO_MAP:
        # The older of two buffers is free again; the only one of a narrow tile, once its copy is done.
        tma.store_wait(1 if number > 0 else 0)
        gl.thread_barrier()
        if c.GATED:
            BOX: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
            staged = staging.index(group * 2 + 1)._reinterpret(gl.bfloat16, [2, TOKENS, 32], BOX).index(number % 2)
            staged.store(made)
        else:
            staged = staging.index(group * 2 + number % 2)
            staged.permute((1, 0)).store(made.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [first_token, first_row], staged)
    elif c.GATED:
        store_plainly(made, out, first_token, first_row, sizes)
    else:
        token = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, piece.type.layout))
        row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, piece.type.layout))
        at = out + token.to(gl.int64)[None, :] * sizes.columns + row[:, None]
        inside = (token < sizes.tokens)[None, :] & (row < sizes.columns)[:, None]
        gl.store(at, made.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def gated_tokens(piece, turns):
    """SwiGLU of sums [64, tokens] whose rows take turns, gate and gated: bfloat16 [tokens, 32], by way of `turns`."""
    TOKENS: gl.constexpr = piece.shape[1]
    turns.permute((1, 0)).store(piece.to(gl.bfloat16))
    gl.thread_barrier()
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    pairs = turns._reinterpret(gl.int32, [TOKENS, 32], gl.NVMMASharedLayout(128, 32, 2)).load(PAIRS)
    gate = (pairs << 16).to(gl.float32, bitcast=True)
    up = (pairs & -0x10000).to(gl.float32, bitcast=True)
    gl.thread_barrier()
    return (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)


@gluon.jit
def store_plainly(piece, out, first_token, first_column, sizes):
    """Store what lies inside the result of a piece [tokens, columns]."""
    token = first_token + gl.arange(0, piece.shape[0], layout=gl.SliceLayout(1, piece.type.layout))
    column = first_column + gl.arange(0, piece.shape[1], layout=gl.SliceLayout(0, piece.type.layout))
    at = out + token.to(gl.int64)[:, None] * sizes.columns + column[None, :]
    gl.store(at, piece, mask=(token < sizes.tokens)[:, None] & (column < sizes.columns)[None, :])


@gluon.jit(
    do_not_specialize=[
        "first_place", "first_scale", "tokens", "columns", "token_blocks", "row_blocks", "tiles", "blocks",
    ]
)  # fmt: skip
def packed_gemm_kernel(
    x, words, lists, longest, places, scales, first_place, first_scale, out, bias, tokens, columns, token_blocks,
    row_blocks, tiles, blocks,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, GATED: gl.constexpr,
    TO_MAP: gl.constexpr, PDL: gl.constexpr, FORMAT: gl.constexpr, WORDS: gl.constexpr, R: gl.constexpr,
    IMAGES: gl.constexpr,
):  # fmt: skip
    """Multiply all tiles.

    x: descriptor [tokens, K] in boxes [TOKENS, 64]. words, lists, longest, tiles, blocks: see Packed; places, scales:
    of the whole stream, W's from first_place and first_scale on. out: descriptor [tokens, columns] in boxes of at most
    64 tokens x 64, or 32 of a gated product, with TO_MAP, else a pointer to dense rows. bias: a pointer to a number for
    each row of W, gates first, or None. The others: see Sizes, Constants.
    """
    c: gl.constexpr = Constants(
        TOKENS=TOKENS, ROWS=ROWS, STAGES=STAGES, BAND=BAND, GATED=GATED, TO_MAP=TO_MAP, PDL=PDL,
        FORMAT=FORMAT, WORDS=WORDS, R=R, IMAGES=IMAGES,
    )  # fmt: skip
    sizes = Sizes(tokens=tokens, columns=columns, token_blocks=token_blocks, row_blocks=row_blocks)
    packed = Packed(
        words=words, lists=lists, longest=longest, places=places + first_place, scales=scales + first_scale,
        tiles=tiles, blocks=blocks,
    )  # fmt: skip
    WARPGROUPS: gl.constexpr = ROWS // 64
    PIECE: gl.constexpr = min(TOKENS, 64)
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    of_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, 64], OPERAND)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    planes = ()
    for _ in gl.static_range(planes_of(FORMAT)):
        planes = planes + (gl.allocate_shared_memory(gl.int32, [WORDS * blocks_of(R), ROWS // 16, 32, 4], PLAIN),)
    of_beside = planes[0]
    BESIDE: gl.constexpr = STAGES * blocks_of(R) * lines_in_stage(FORMAT, R)
    if BESIDE > 0:
        of_beside = gl.allocate_shared_memory(gl.int32, [BESIDE, ROWS // 16, 32], LINES)
    staging = gl.allocate_shared_memory(gl.bfloat16, [WARPGROUPS * 2, PIECE, 64], OPERAND)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=65)
        mbarrier.init(free.index(stage), count=WARPGROUPS)
    fence_async_shared()
    gl.thread_barrier()
    ring = Ring(x=of_x, planes=planes, beside=of_beside, full=full, free=free)
    steps = tiles * units_of(R, IMAGES)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (multiply_partition, (out, bias, packed, sizes, ring, staging, c, 0)),
                (load_words, (packed, sizes, ring, c)),
                (load_x, (x, sizes, steps, ring, c)),
            ],
            [2, 1],
            [88, 88],
        )
    elif SHARES:
        gl.warp_specialize(
            [
                (multiply_as_one, (out, bias, packed, sizes, ring, staging, c)),
                (twin, ()),
                (load_words, (packed, sizes, ring, c)),
                (load_x, (x, sizes, steps, ring, c)),
            ],
            [4, 2, 1],
            [_OWN_REGISTERS, 504 - 2 * _OWN_REGISTERS, 504 - 2 * _OWN_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_partition, (out, bias, packed, sizes, ring, staging, c, 0)),
                (multiply_partition, (out, bias, packed, sizes, ring, staging, c, 1)),
                (load_words, (packed, sizes, ring, c)),
                (load_x, (x, sizes, steps, ring, c)),
            ],
            [4, 2, 1],
            [_OWN_REGISTERS, 504 - 2 * _OWN_REGISTERS, 504 - 2 * _OWN_REGISTERS],
        )
