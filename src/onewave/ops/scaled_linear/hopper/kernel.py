"""y = (x W^T) of one-byte operands for Hopper (TMA, mbarriers, wgmma), in Gluon: linear/hopper/kernel.py's product.

Tiles, their order, the ring and the partitions are that kernel's; a row of 128 bytes holds 128 columns of K here.

int8   one chain of wgmma over K, sums in int32 registers: exact
e4m3   tensor cores add fp8 products with some 14 bits, so no accumulator lives longer than 128 columns of K: these are
       summed from zero, then added to float32 registers, column block after column block, whatever the tile. The
       next block's products run meanwhile. Source: DeepSeek-V3 2024, arXiv:2412.19437, section 3.3.2

So a row's bits depend on nothing but the row and W. The epilogue, 64 columns at a time: float32, weight scale, x scale,
bias, shift, smooth, rounding; no two of these are fused (enable_fp_fusion), so int8 has the bits of reference.py.

Bound: the tensor cores from some hundred rows on; reading operands of such tiles takes nearly all of shared memory's
bandwidth. Few rows: the weights' bytes.

constexpr      meaning                                          allowed
DTYPE          of x and W                                       gl.int8, gl.float8e4nv
OUT_DTYPE      of the result, where it goes out by TMA          gl.bfloat16, gl.float16
COLUMNS        columns of a tile                                32, 64, 128
EXTRA          more columns of a tile                           0; of int8 64 or 128 where COLUMNS is 128
SLICES         slices of 128 columns of K a stage               1, 2; of e4m3 2
X_SCALE, ..    see triton_impl.py                               see triton_impl.py
the others     see linear/hopper/kernel.py                      see linear/hopper/kernel.py
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
from onewave.ops.linear.hopper.kernel import (
    allocate_ring,
    chained_sums,
    column_pieces,
    load_partition,
    store_plainly,
    sums_layout,
    tile_place,
)
from onewave.ops.scaled_linear.rounding_impl import to_int8


class Constants(NamedTuple):
    """The constexprs of the kernel's functions; see the module."""

    DTYPE: Any
    OUT_DTYPE: Any
    BOX_ROWS: Any
    COLUMNS: Any
    EXTRA: Any
    WARPGROUPS: Any
    STAGES: Any
    SLICES: Any
    BAND: Any
    TO_MAP: Any
    PDL: Any
    X_SCALE: Any
    W_SCALE: Any
    OUT: Any
    LOW: Any
    HIGH: Any
    HALF_AWAY: Any
    GATED: Any = False


class Sizes(NamedTuple):
    """rows, columns: of the result; row_blocks, column_blocks: of tiles; steps: of SLICES x 128 along K."""

    rows: Any
    columns: Any
    row_blocks: Any
    column_blocks: Any
    steps: Any


class Numbers(NamedTuple):
    """Pointers of the epilogue's numbers, or None; factor: of int8 results."""

    x_scale: Any
    w_scale: Any
    bias: Any
    shift: Any
    smooth: Any
    factor: Any


@gluon.jit
def promoted_sums(sizes, ring, slot, phase, c, group: gl.constexpr):
    """A tile's sums of e4m3, each 128 columns of K added in float32; the slot and phase behind it.

    A stage is two such blocks: the second one's products run while the first one is added.
    """
    COLUMNS: gl.constexpr = c.COLUMNS
    sums = gl.zeros([64, COLUMNS], gl.float32, sums_layout(COLUMNS, 128))
    zero = gl.zeros([64, COLUMNS], gl.float32, sums_layout(COLUMNS, 128))
    for _ in range(sizes.steps):
        mbarrier.wait(ring.full.index(slot), phase)
        at = slot * 2
        left, right = ring.x.index(at * c.WARPGROUPS + group), ring.w.index(at).permute((1, 0))
        first = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
        left, right = ring.x.index((at + 1) * c.WARPGROUPS + group), ring.w.index(at + 1).permute((1, 0))
        second = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
        sums += warpgroup_mma_wait(1, deps=[first])
        second = warpgroup_mma_wait(0, deps=[second])
        gl.thread_barrier()
        mbarrier.arrive(ring.free.index(slot), count=1)
        sums += second
        slot += 1
        if slot == c.STAGES:
            slot = 0
            phase ^= 1
    return sums, sums, slot, phase


@gluon.jit
def multiply_partition(out, numbers, sizes, ring, staging, c, group: gl.constexpr):
    COLUMNS: gl.constexpr = c.COLUMNS
    EXTRA: gl.constexpr = c.EXTRA
    # Scales are read here, which the kernel before may make.
    after_last(c.PDL)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), sizes.row_blocks * sizes.column_blocks, gl.num_programs(0)):
        row, column = tile_place(tile, sizes, c)
        if c.DTYPE == gl.int8:
            sums, more, slot, phase = chained_sums(sizes, ring, slot, phase, c, group, gl.int32)
        else:
            sums, more, slot, phase = promoted_sums(sizes, ring, slot, phase, c, group)
        first_row = (row * c.WARPGROUPS + group) * 64
        first_column = column * (COLUMNS + EXTRA)
        pieces = column_pieces(sums, COLUMNS)
        if EXTRA > 0:
            pieces = pieces + column_pieces(more, EXTRA)
        for number in gl.static_range(len(pieces)):
            at = first_column + number * 64
            piece = finished(pieces[number], numbers, first_row, at, sizes, c)
            if c.TO_MAP:
                # The older of two buffers is free again; the only one of a narrow tile, once its copy is done.
                tma.store_wait(1 if number > 0 else 0)
                gl.thread_barrier()
                staged = staging.index(group * 2 + number % 2)
                staged.store(piece.to(c.OUT_DTYPE))
                fence_async_shared()
                gl.thread_barrier()
                tma.async_copy_shared_to_global(out, [first_row, at], staged)
            else:
                store_plainly(piece, out, first_row, at, sizes)
    tma.store_wait(0)


@gluon.jit
def finished(piece, numbers, row, column, sizes, c):
    """A piece of a tile behind the epilogue, float32 or int8; sums as they are where OUT is 0."""
    if c.OUT > 0:
        layout: gl.constexpr = piece.type.layout
        down = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        across = column + gl.arange(0, piece.shape[1], layout=gl.SliceLayout(0, layout))
        inside = across < sizes.columns
        piece = piece.to(gl.float32)
        if c.W_SCALE == 1:
            piece = piece * gl.load(numbers.w_scale)
        if c.W_SCALE == 2:
            piece = piece * gl.load(numbers.w_scale + across, mask=inside, other=0.0)[None, :]
        if c.X_SCALE == 1:
            piece = piece * gl.load(numbers.x_scale)
        if c.X_SCALE == 2:
            piece = piece * gl.load(numbers.x_scale + down, mask=down < sizes.rows, other=0.0)[:, None]
        if numbers.bias is not None:
            piece = piece + gl.load(numbers.bias + across, mask=inside, other=0.0).to(gl.float32)[None, :]
        if numbers.shift is not None:
            piece = piece + gl.load(numbers.shift + across, mask=inside, other=0.0).to(gl.float32)[None, :]
        if numbers.smooth is not None:
            piece = piece * gl.load(numbers.smooth + across, mask=inside, other=0.0).to(gl.float32)[None, :]
        if c.OUT == 2:
            piece = to_int8(piece, numbers.factor, c.LOW, c.HIGH, c.HALF_AWAY)
    return piece


@gluon.jit(do_not_specialize=["factor", "rows", "columns", "row_blocks", "column_blocks", "steps"])
def scaled_kernel(
    x, w, extra, out, x_scale, w_scale, bias, shift, smooth, factor, rows, columns, row_blocks, column_blocks, steps,
    DTYPE: gl.constexpr, OUT_DTYPE: gl.constexpr, BOX_ROWS: gl.constexpr, COLUMNS: gl.constexpr, EXTRA: gl.constexpr,
    WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr, BAND: gl.constexpr, TO_MAP: gl.constexpr,
    PDL: gl.constexpr, X_SCALE: gl.constexpr, W_SCALE: gl.constexpr, OUT: gl.constexpr, LOW: gl.constexpr,
    HIGH: gl.constexpr, HALF_AWAY: gl.constexpr,
):  # fmt: skip
    """Multiply all tiles.

    x: descriptor [rows, K] in boxes [BOX_ROWS, 128]; w: all rows of W, [.., K], in boxes [COLUMNS, 128]; extra: the
    same in boxes [EXTRA, 128], or None. out: descriptor [rows, columns] in boxes [64, min(COLUMNS, 64)] with TO_MAP,
    else a pointer to dense rows. The others: see Numbers, Sizes, Constants.
    """
    c: gl.constexpr = Constants(
        DTYPE=DTYPE, OUT_DTYPE=OUT_DTYPE, BOX_ROWS=BOX_ROWS, COLUMNS=COLUMNS, EXTRA=EXTRA, WARPGROUPS=WARPGROUPS,
        STAGES=STAGES, SLICES=SLICES, BAND=BAND, TO_MAP=TO_MAP, PDL=PDL, X_SCALE=X_SCALE, W_SCALE=W_SCALE, OUT=OUT,
        LOW=LOW, HIGH=HIGH, HALF_AWAY=HALF_AWAY,
    )  # fmt: skip
    sizes = Sizes(rows=rows, columns=columns, row_blocks=row_blocks, column_blocks=column_blocks, steps=steps)
    numbers = Numbers(x_scale=x_scale, w_scale=w_scale, bias=bias, shift=shift, smooth=smooth, factor=factor)
    ring, staging = allocate_ring(c, OUT_DTYPE, min(COLUMNS, 64), 128, 1)
    gl.warp_specialize(
        [
            (multiply_partition, (out, numbers, sizes, ring, staging, c, 0)),
            (load_partition, (x, w, extra, sizes, ring, c)),
            (multiply_partition, (out, numbers, sizes, ring, staging, c, 1)),
        ][: 1 + WARPGROUPS],
        [1, 4][:WARPGROUPS],
        [40, 232][:WARPGROUPS],
    )
