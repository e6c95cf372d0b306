"""y = x W^T for many tokens: a persistent kernel for Hopper (TMA, mbarriers, wgmma), in Gluon.

A thread block is one SM and takes every num_programs-th tile of the result: WARPGROUPS x 64 rows, COLUMNS + EXTRA
columns. Tiles go down a band of BAND row blocks before they go right, so that a band's weights are read from memory
once. Partitions of warps, which meet at mbarriers only:

load      1 warp. The tile's rows of x and of W go step by step along K, SLICES x 64 columns a step, into a ring of
          STAGES stages; it runs ahead into the next tiles.
multiply  WARPGROUPS warpgroups, each with 64 rows: wgmma [64, COLUMNS] x 64 a slice (and [64, EXTRA] x 64), sums in
          float32 registers; then the epilogue, 64 columns at a time: bias, rounding, two staging buffers in shared
          memory, TMA out.

Every sum runs over K from the first column to the last in one chain of wgmma, whatever the tile. So a row's bits depend
on nothing but the row and W: not on the number of rows beside it, nor on how tiles are chosen (tests compare them).

A tile's neighbours in a column read the same weights at the same time, from SMs that lie side by side, and L2 serves
them once. A launch that starts while another one ends (PDL) scatters them: it pays where a launch has one row block, or
where tiles are large (docs/log/prompts.md).

Bound: the tensor cores from some hundred rows on, the weights' bytes below.

constexpr    meaning                                          allowed
DTYPE        of x and W                                       gl.bfloat16, gl.float16
BOX_ROWS     rows that one copy of x brings, a warpgroup      16, 32, 64; below 64 only with one row block
COLUMNS      columns of a tile                                32, 64, 128, 256
EXTRA        more columns of a tile, as shapes are powers     0, half of COLUMNS from 128 on; COLUMNS if GATED
             of two
GATED        W is two matrices, one below the other; a tile   True, False
             takes COLUMNS rows of each, and SwiGLU of both
             results goes out
WARPGROUPS   warpgroups, of 64 rows each                      1, 2
STAGES       stages of the ring                               what fits 227 KiB
SLICES       slices of 64 columns of K a stage: two make      1, 2
             half as many waits of a narrow tile
BAND         row blocks of a band                             any
TO_MAP       the result goes out by TMA: dtype of x, rows     True, False (plain stores)
             of whole 16 bytes
PDL          started while the kernel before it ends          True, False
TURNS        gates and what they gate take turns among the    True, False (always False here: compact_kernel.py)
             columns, and SwiGLU of both goes out
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

from onewave.gpu.dependent_launch import after_last


class Constants(NamedTuple):
    """The constexprs of the kernel's functions; see the module."""

    DTYPE: Any
    BOX_ROWS: Any
    COLUMNS: Any
    EXTRA: Any
    WARPGROUPS: Any
    STAGES: Any
    SLICES: Any
    BAND: Any
    GATED: Any
    TO_MAP: Any
    PDL: Any
    TURNS: Any = False


class Sizes(NamedTuple):
    """rows, columns: of the result; of_bias: numbers of the bias; row_blocks, column_blocks: of tiles; steps: of
    SLICES x 64 along K."""

    rows: Any
    columns: Any
    of_bias: Any
    row_blocks: Any
    column_blocks: Any
    steps: Any


class Ring(NamedTuple):
    """Shared memory of the operands' slices, and the mbarriers of its stages."""

    x: Any
    w: Any
    extra: Any
    full: Any
    free: Any


@gluon.constexpr_function
def sums_layout(columns, across=64):
    """Layout of a warpgroup's sums [64, columns]. across: columns of K in a row of 128 bytes."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, across // 4])


@gluon.jit
def allocate_ring(c, OUT: gl.constexpr, PIECE: gl.constexpr, ACROSS: gl.constexpr, FILLERS: gl.constexpr):
    """The ring, its mbarriers ready, and what pieces of PIECE columns of dtype OUT go out from.

    ACROSS: columns of K in a row of 128 bytes. FILLERS: arrivals that say that a stage is full."""
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 1024 // ACROSS, 2)
    SLOTS: gl.constexpr = c.STAGES * c.SLICES
    x = gl.allocate_shared_memory(c.DTYPE, [SLOTS * c.WARPGROUPS, 64, ACROSS], OPERAND)
    w = gl.allocate_shared_memory(c.DTYPE, [SLOTS, c.COLUMNS, ACROSS], OPERAND)
    extra = w
    if c.EXTRA > 0:
        extra = gl.allocate_shared_memory(c.DTYPE, [SLOTS, c.EXTRA, ACROSS], OPERAND)
    staging = gl.allocate_shared_memory(OUT, [c.WARPGROUPS * 2, 64, PIECE], gl.NVMMASharedLayout(PIECE * 2, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(c.STAGES):
        mbarrier.init(full.index(stage), count=FILLERS)
        mbarrier.init(free.index(stage), count=c.WARPGROUPS)
    fence_async_shared()
    gl.thread_barrier()
    return Ring(x=x, w=w, extra=extra, full=full, free=free), staging


@gluon.jit
def tile_place(tile, sizes, c):
    """(row block, column block) of a tile."""
    BAND: gl.constexpr = c.BAND
    band = tile // (BAND * sizes.column_blocks)
    height = gl.minimum(sizes.row_blocks - band * BAND, BAND)
    within = tile - band * (BAND * sizes.column_blocks)
    return band * BAND + within % height, within // height


@gluon.jit
def load_partition(x, w, extra, sizes, ring, c):
    WARPGROUPS: gl.constexpr = c.WARPGROUPS
    SLICES: gl.constexpr = c.SLICES
    WIDTH: gl.constexpr = c.COLUMNS + c.EXTRA
    ACROSS: gl.constexpr = ring.w.shape[2]
    after_last(c.PDL)
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), sizes.row_blocks * sizes.column_blocks, gl.num_programs(0)):
        row, column = tile_place(tile, sizes, c)
        for step in range(sizes.steps):
            full = ring.full.index(slot)
            mbarrier.wait(ring.free.index(slot), phase)
            mbarrier.expect(full, SLICES * (WARPGROUPS * c.BOX_ROWS + WIDTH) * 128)
            for part in gl.static_range(SLICES):
                at = slot * SLICES + part
                k = (step * SLICES + part) * ACROSS
                first = column * WIDTH
                beyond = first + c.COLUMNS
                if c.GATED:
                    first = column * c.COLUMNS
                    beyond = first + sizes.columns
                tma.async_copy_global_to_shared(w, [first, k], full, ring.w.index(at))
                if c.EXTRA > 0:
                    tma.async_copy_global_to_shared(extra, [beyond, k], full, ring.extra.index(at))
                for group in gl.static_range(WARPGROUPS):
                    target = ring.x.index(at * WARPGROUPS + group).slice(0, c.BOX_ROWS)
                    tma.async_copy_global_to_shared(x, [(row * WARPGROUPS + group) * 64, k], full, target)
            slot += 1
            if slot == c.STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def chained_sums(sizes, ring, slot, phase, c, group: gl.constexpr, SUMS: gl.constexpr):
    """A tile's sums, and its further columns', of dtype SUMS in one chain over K; the slot and phase behind it."""
    COLUMNS: gl.constexpr = c.COLUMNS
    EXTRA: gl.constexpr = c.EXTRA
    MORE: gl.constexpr = EXTRA if EXTRA > 0 else 8
    ACROSS: gl.constexpr = ring.w.shape[2]
    STAGES: gl.constexpr = c.STAGES
    SLICES: gl.constexpr = c.SLICES
    sums = gl.zeros([64, COLUMNS], SUMS, sums_layout(COLUMNS, ACROSS))
    more = gl.zeros([64, MORE], SUMS, sums_layout(MORE, ACROSS))
    for step in range(sizes.steps):
        mbarrier.wait(ring.full.index(slot), phase)
        for part in gl.static_range(SLICES):
            at = slot * SLICES + part
            left = ring.x.index(at * c.WARPGROUPS + group)
            sums = warpgroup_mma(left, ring.w.index(at).permute((1, 0)), sums, use_acc=True, is_async=True)
            if EXTRA > 0:
                more = warpgroup_mma(left, ring.extra.index(at).permute((1, 0)), more, use_acc=True, is_async=True)
        # The products before have read their stage, which is free while these run.
        if EXTRA > 0:
            sums, more = warpgroup_mma_wait(2 * SLICES, deps=[sums, more])
        else:
            sums = warpgroup_mma_wait(SLICES, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(ring.free.index((slot + STAGES - 1) % STAGES), count=1, pred=step > 0)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    if EXTRA > 0:
        sums, more = warpgroup_mma_wait(0, deps=[sums, more])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    gl.thread_barrier()
    mbarrier.arrive(ring.free.index((slot + STAGES - 1) % STAGES), count=1)
    return sums, more, slot, phase


@gluon.jit
def multiply_partition(out, bias, sizes, ring, staging, c, group: gl.constexpr):
    COLUMNS: gl.constexpr = c.COLUMNS
    EXTRA: gl.constexpr = c.EXTRA
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), sizes.row_blocks * sizes.column_blocks, gl.num_programs(0)):
        row, column = tile_place(tile, sizes, c)
        sums, more, slot, phase = chained_sums(sizes, ring, slot, phase, c, group, gl.float32)
        first_row = (row * c.WARPGROUPS + group) * 64
        first_column = column * (COLUMNS + EXTRA)
        if c.TURNS:
            first_column = column * (COLUMNS // 2)
            pieces, ups = parted_columns(sums, COLUMNS)
        else:
            pieces = column_pieces(sums, COLUMNS)
        if c.GATED:
            first_column = column * COLUMNS
            ups = column_pieces(more, EXTRA)
        elif EXTRA > 0:
            pieces = pieces + column_pieces(more, EXTRA)
        for number in gl.static_range(len(pieces)):
            piece = with_bias(pieces[number], bias, first_column + number * 64, sizes)
            if c.GATED or c.TURNS:
                gate = piece.to(c.DTYPE).to(gl.float32)
                up = with_bias(ups[number], bias, sizes.columns + first_column + number * 64, sizes)
                piece = gate / (1.0 + gl.exp(-gate)) * up.to(c.DTYPE).to(gl.float32)
            if c.TO_MAP:
                # The older of two buffers is free again; the only one of a narrow tile, once its copy is done.
                tma.store_wait(1 if number > 0 else 0)
                gl.thread_barrier()
                staged = staging.index(group * 2 + number % 2)
                staged.store(piece.to(c.DTYPE))
                fence_async_shared()
                gl.thread_barrier()
                tma.async_copy_shared_to_global(out, [first_row, first_column + number * 64], staged)
            else:
                store_plainly(piece, out, first_row, first_column + number * 64, sizes)
    tma.store_wait(0)


@gluon.jit
def column_pieces(sums, COLUMNS: gl.constexpr):
    """Sums [64, COLUMNS] as pieces of at most 64 columns, in order; this moves no register."""
    if COLUMNS <= 64:
        pieces = (sums,)
    elif COLUMNS == 128:
        first, second = gl.split(gl.permute(gl.reshape(sums, [64, 2, 64]), (0, 2, 1)))
        pieces = (gl.convert_layout(first, sums_layout(64)), gl.convert_layout(second, sums_layout(64)))
    else:
        low, high = gl.split(gl.permute(gl.reshape(sums, [64, 2, 128]), (0, 2, 1)))
        first = column_pieces(gl.convert_layout(low, sums_layout(128)), 128)
        second = column_pieces(gl.convert_layout(high, sums_layout(128)), 128)
        pieces = first + second
    return pieces


@gluon.jit
def parted_columns(sums, COLUMNS: gl.constexpr):
    """(gates, what they gate) of sums [64, COLUMNS] whose columns take turns, as pieces of at most 64 columns, in
    order; this moves no register."""
    if COLUMNS <= 128:
        gate, up = gl.split(gl.reshape(sums, [64, COLUMNS // 2, 2]))
        gates, ups = (gate,), (up,)
    else:
        low, high = gl.split(gl.permute(gl.reshape(sums, [64, 2, COLUMNS // 2]), (0, 2, 1)))
        gates, ups = parted_columns(low, COLUMNS // 2)
        gates_behind, ups_behind = parted_columns(high, COLUMNS // 2)
        gates, ups = gates + gates_behind, ups + ups_behind
    return gates, ups


@gluon.jit
def with_bias(piece, bias, column, sizes):
    """Add the bias of a piece's columns, from `column` on, before anything is rounded.

    Beyond the matrix it reads another's bias or nothing; no such column is stored."""
    if bias is not None:
        across = column + gl.arange(0, piece.shape[1], layout=gl.SliceLayout(0, piece.type.layout))
        piece += gl.load(bias + across, mask=across < sizes.of_bias, other=0.0).to(gl.float32)[None, :]
    return piece


@gluon.jit
def store_plainly(piece, out, row, column, sizes):
    """Round a piece to out's dtype and store what lies inside the result."""
    across = column + gl.arange(0, piece.shape[1], layout=gl.SliceLayout(0, piece.type.layout))
    down = row + gl.arange(0, 64, layout=gl.SliceLayout(1, piece.type.layout))
    at = out + down.to(gl.int64)[:, None] * sizes.columns + across[None, :]
    gl.store(at, piece.to(out.dtype.element_ty), mask=(down < sizes.rows)[:, None] & (across < sizes.columns)[None, :])


@gluon.jit(do_not_specialize=["rows", "columns", "row_blocks", "column_blocks", "steps"])
def gemm_kernel(
    x, w, extra, out, bias, rows, columns, row_blocks, column_blocks, steps,
    DTYPE: gl.constexpr, BOX_ROWS: gl.constexpr, COLUMNS: gl.constexpr, EXTRA: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, BAND: gl.constexpr, GATED: gl.constexpr, TO_MAP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Multiply all tiles.

    x: descriptor [rows, K] in boxes [BOX_ROWS, 64]; w: all rows of W, [.., K], in boxes [COLUMNS, 64]; extra: the same
    in boxes [EXTRA, 64], or None. out: descriptor [rows, columns] in boxes [64, min(COLUMNS, 64)] with TO_MAP, else a
    pointer to dense rows. bias: a pointer to a number for each row of W, or None. The others: see Sizes, Constants.
    """
    c: gl.constexpr = Constants(
        DTYPE=DTYPE, BOX_ROWS=BOX_ROWS, COLUMNS=COLUMNS, EXTRA=EXTRA, WARPGROUPS=WARPGROUPS, STAGES=STAGES,
        SLICES=SLICES, BAND=BAND, GATED=GATED, TO_MAP=TO_MAP, PDL=PDL,
    )  # fmt: skip
    sizes = Sizes(
        rows=rows, columns=columns, of_bias=columns * (2 if GATED else 1), row_blocks=row_blocks,
        column_blocks=column_blocks, steps=steps,
    )  # fmt: skip
    ring, staging = allocate_ring(c, DTYPE, min(COLUMNS, 64), 64, 1)
    gl.warp_specialize(
        [
            (multiply_partition, (out, bias, sizes, ring, staging, c, 0)),
            (load_partition, (x, w, extra, sizes, ring, c)),
            (multiply_partition, (out, bias, sizes, ring, staging, c, 1)),
        ][: 1 + WARPGROUPS],
        [1, 4][:WARPGROUPS],
        [40, 232][:WARPGROUPS],
    )
