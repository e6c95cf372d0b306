"""Round weights to one byte or four bits and pack them in Triton, bit for bit as plain PyTorch does (base/rounding.py
and base/group_rounding.py, formats/).

Program ids: program_id(0) is a row (_scales_kernel, _search_kernel) or an image of a tile (_bytes_kernel,
_nibbles_kernel). The search reads a row CHUNK groups at a time, tries every candidate for their scales, and ends with
the row's own scale, of its largest one. Packing reads the weights again, an operand A [64, 128], and permutes codes in
registers to the order that threads read. Registers: CHUNK groups or CHUNK values; an operand. Roofline: weights read
twice and tiles written once; the search is bound by its instructions, hundreds a weight.

Products are not contracted with sums (enable_fp_fusion=False) and quotients are IEEE's: else bits would differ.

constexpr  meaning [unit] (allowed values)
R          rows of a weight tile (8, 16, 32, 64)
COUNT      matrices with alternating rows (1, 2)
GAIN       whether columns are multiplied by a gain (False, True)
GROUP      columns that share a scale (32, 64, 128)
HALVINGS   its binary logarithm
CHUNK      groups or values of a row that its program holds at a time
CANDIDATES scales to try
IMAGES     operands A [64, 128] in a tile (1, 2, 4)
BESIDE     bytes of an image's scales
FORMAT     one-byte format (1: int8, 2: fp8 e4m3)
LARGEST    its largest magnitude in use
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.base.group_rounding import CANDIDATES, EXPONENT
from onewave.base.weight_formats import GroupRounding, RowRounding
from onewave.gpu.launch import launch_kernel
from onewave.wave.plan.layout import TileShape
from onewave.wave.weights.formats.tile_format import Tiles

_CHUNK_VALUES = 4096
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_EXPONENT = tl.constexpr(EXPONENT)
# Added and taken away again, it rounds a number below 2^22 to the nearest whole one, ties to even.
_ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit
def _weights(values, row, column, height, cols, gain, GAIN: tl.constexpr):
    """Load weights in float32, times their columns' gain; 0 beyond the matrix. values: pointers to the rows."""
    inside = column < cols
    found = tl.load(values + column, mask=inside & (row < height), other=0.0).to(tl.float32)
    if GAIN:
        found *= tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def _rows(first, second, matrix, offset, COUNT: tl.constexpr):
    """Point to rows of the first or second matrix."""
    return (first if COUNT == 1 else tl.where(matrix == 0, first, second)) + offset


@triton.jit
def _lines(number, image, tiles, R: tl.constexpr, IMAGES: tl.constexpr):
    """Locate the lines of an image: rows of the stream and first columns, [64, 1] each."""
    line = tl.arange(0, 64)[:, None]
    return number // tiles * R + line % R, (number % tiles * IMAGES + image) * (8192 // R) + line // R * 128


@triton.jit
def _sums(values, CHUNK: tl.constexpr, GROUP: tl.constexpr, HALVINGS: tl.constexpr):
    """Sum each group in the order of group_rounding: its first half and its second, until there is one value."""
    for step in tl.static_range(HALVINGS):
        values = tl.sum(tl.reshape(values, [CHUNK, 2, GROUP >> (step + 1)]), axis=1)
    return tl.reshape(values, [CHUNK])


@triton.jit
def _searched(
    values, factors, CHUNK: tl.constexpr, GROUP: tl.constexpr, HALVINGS: tl.constexpr, CANDIDATES: tl.constexpr
):
    """Find the scale of each group, [CHUNK, GROUP] -> [CHUNK]; NaN for one with a value that is not finite."""
    high, low = tl.max(values, axis=1), tl.min(values, axis=1)
    largest = tl.where(high > -low, high, low) * -0.125
    ratios = tl.div_rn(values, tl.broadcast_to(largest[:, None], values.shape))
    best, found = tl.zeros([CHUNK], tl.float32), largest
    for candidate in range(CANDIDATES):
        codes = ratios * tl.load(factors + candidate) + _ROUNDING - _ROUNDING
        codes = tl.minimum(tl.maximum(codes, -8.0), 7.0)
        product = _sums(ratios * codes, CHUNK, GROUP, HALVINGS)
        square = _sums(codes * codes, CHUNK, GROUP, HALVINGS)
        better = tl.div_rn(product * product, square)
        found = tl.where(better > best, largest * tl.div_rn(product, square), found)
        best = tl.where(better > best, better, best)
    wrong = tl.max((tl.abs(values) < float("inf")).to(tl.int32) ^ 1, axis=1)
    return tl.where(wrong > 0, float("nan"), found)


@triton.jit(do_not_specialize=["height", "groups"])
def _search_kernel(
    scales, row_scales, factors, first, second, gain, height, cols, stride, groups,
    COUNT: tl.constexpr, GAIN: tl.constexpr, GROUP: tl.constexpr, HALVINGS: tl.constexpr, CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    whole = tl.program_id(0).to(tl.int64)
    row = whole // COUNT
    values = _rows(first, second, whole % COUNT, row * stride, COUNT)
    largest = tl.zeros([CHUNK], tl.float32)
    for start in range(0, groups, CHUNK):
        group = start + tl.arange(0, CHUNK)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        weights = _weights(values, row, column, height, cols, gain, GAIN)
        found = _searched(weights, factors, CHUNK, GROUP, HALVINGS, CANDIDATES)
        tl.store(scales + whole * groups + group, found, mask=group < groups)
        largest = tl.maximum(largest, tl.where(found == found, tl.abs(found), 0.0))
    bits = tl.max(largest, axis=0).to(tl.int32, bitcast=True)
    exponent = tl.where(bits > 0, tl.maximum((bits >> 23) - 126 - _EXPONENT, -126), 0)
    tl.store(row_scales + whole, ((exponent + 127) << 23).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["height"])
def _scales_kernel(
    scales, first, second, gain, height, cols, stride,
    COUNT: tl.constexpr, GAIN: tl.constexpr, LARGEST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    whole = tl.program_id(0).to(tl.int64)
    row = whole // COUNT
    values = _rows(first, second, whole % COUNT, row * stride, COUNT)
    largest, wrong = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.int32)
    for start in range(0, cols, CHUNK):
        found = tl.abs(_weights(values, row, start + tl.arange(0, CHUNK), height, cols, gain, GAIN))
        largest = tl.maximum(largest, found)
        wrong |= (found != found).to(tl.int32)
    scale = tl.div_rn(tl.max(largest, axis=0), LARGEST)
    scale = tl.where(scale < _SMALLEST_NORMAL, 1.0, scale)
    tl.store(scales + whole, tl.where(tl.max(wrong, axis=0) > 0, float("nan"), scale))


@triton.jit
def _e4m3(numbers):
    """Round to e4m3, ties to even; none is NaN or above 448. By hand, as the interpreter rounds differently."""
    bits = numbers.to(tl.int32, bitcast=True)
    above = bits & 0x7FFFFFFF
    normal = ((above + 0x7FFFF + (above >> 20 & 1)) >> 20) - (120 << 3)
    subnormal = (tl.abs(numbers) * 512.0 + _ROUNDING - _ROUNDING).to(tl.int32)
    return tl.where(above < (121 << 23), subnormal, normal) | (bits >> 24 & 128)


@triton.jit(do_not_specialize=["height", "tiles"])
def _bytes_kernel(
    images, scales, places, first, second, gain, height, cols, stride, tiles,
    R: tl.constexpr, COUNT: tl.constexpr, GAIN: tl.constexpr, LARGEST: tl.constexpr, FORMAT: tl.constexpr,
    IMAGES: tl.constexpr,
):  # fmt: skip
    number, image = tl.program_id(0) // IMAGES, tl.program_id(0) % IMAGES
    target = images + (tl.load(places + number).to(tl.int64) * IMAGES + image) * 8192
    whole, first_column = _lines(number, image, tiles, R, IMAGES)
    row, column = whole // COUNT, first_column + tl.arange(0, 128)[None, :]
    values = _rows(first, second, whole % COUNT, row.to(tl.int64) * stride, COUNT)
    weights = _weights(values, row, column, height, cols, gain, GAIN)
    numbers = tl.div_rn(weights, tl.broadcast_to(tl.load(scales + whole), [64, 128]))
    numbers = tl.minimum(tl.maximum(tl.where(numbers == numbers, numbers, 0.0), -LARGEST), LARGEST)
    codes = (numbers + _ROUNDING - _ROUNDING).to(tl.int32) if FORMAT == 1 else _e4m3(numbers)
    if FORMAT == 1 and R == 8:  # as row_bytes.bytes_of_registers has them
        # [16 rows, half of them, row in 8, 32 columns, 16 of them, 8 of them, pair, column]
        cut = tl.reshape(codes, [4, 2, 8, 4, 2, 2, 4, 2])
        a, b = tl.split(tl.reshape(tl.permute(cut, (3, 0, 2, 6, 5, 1, 7, 4)), [4096, 2]))
    else:
        # [16 rows, half of them, row in 8, 32 columns, 8 of them, pair, column]
        cut = tl.reshape(codes, [4, 2, 8, 4, 4, 4, 2])
        a, b = tl.split(tl.reshape(tl.permute(cut, (3, 0, 2, 5, 4, 6, 1)), [4096, 2]))
    if FORMAT == 1 and R == 8:
        low, high = a & 255, b & 255
    elif FORMAT == 1:  # as rounding.paired has them
        low, high = tl.abs(a) | (b & 128), tl.abs(b) | (a & 128)
    else:
        low = ((a & 15) << 4) | (b & 15)
        high = (a & 128) | (b & 112) | ((b & 128) >> 4) | ((a & 112) >> 4)
    tl.store(target.to(tl.pointer_type(tl.uint16)) + tl.arange(0, 4096), (low | (high << 8)).to(tl.uint16))


@triton.jit(do_not_specialize=["height", "groups", "tiles"])
def _nibbles_kernel(
    images, scales, row_scales, places, first, second, gain, height, cols, stride, groups, tiles,
    R: tl.constexpr, COUNT: tl.constexpr, GAIN: tl.constexpr, GROUP: tl.constexpr, IMAGES: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    A_ROW: tl.constexpr = 128 // GROUP
    number, image = tl.program_id(0) // IMAGES, tl.program_id(0) % IMAGES
    tile = images + tl.load(places + number).to(tl.int64) * (IMAGES * (4096 + BESIDE))
    whole, first_column = _lines(number, image, tiles, R, IMAGES)
    row, column = whole // COUNT, first_column + tl.arange(0, 128)[None, :]
    values = _rows(first, second, whole % COUNT, row.to(tl.int64) * stride, COUNT)
    weights = _weights(values, row, column, height, cols, gain, GAIN)

    line = tl.arange(0, 64)[:, None]
    group = first_column // GROUP + tl.arange(0, A_ROW)[None, :]
    found = tl.load(scales + whole.to(tl.int64) * groups + group, mask=group < groups, other=0.0)
    row_scale = tl.load(row_scales + whole)
    inverse = (0x7F000000 - row_scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    narrow = (found * inverse).to(tl.float16)
    row_at = line // 16 * 16 + line % 8 * 2 + line // 8 % 2
    beside = (tile + IMAGES * 4096 + image * BESIDE).to(tl.pointer_type(tl.float16))
    tl.store(beside + tl.arange(0, A_ROW)[None, :] * 64 + row_at, narrow)

    step = tl.broadcast_to((narrow.to(tl.float32) * row_scale)[:, :, None], [64, A_ROW, GROUP])
    step = tl.reshape(step, [64, 128])
    codes = tl.where(step != 0.0, tl.div_rn(weights, step), 0.0)
    codes = tl.minimum(tl.maximum(tl.where(codes == codes, codes, 0.0), -8.0), 7.0) + _ROUNDING - _ROUNDING
    codes = tl.where(column < cols, codes + 8.0, 0.0).to(tl.int32)
    # [16 rows, half of them, row in 8, half of the columns, 32 columns, 16 of them, 8 of them, pair, column]
    cut = tl.reshape(codes, [4, 2, 8, 2, 2, 2, 2, 4, 2])
    cut = tl.reshape(tl.permute(cut, (4, 0, 2, 7, 1, 6, 8, 5, 3)), [4096, 2])
    low, high = tl.split(cut)
    tl.store(tile + image * 4096 + tl.arange(0, 4096), (low | (high << 4)).to(tl.uint8))


@cache
def _factors(device: torch.device) -> Tensor:
    """The candidates on a device: float32."""
    return torch.tensor(CANDIDATES, dtype=torch.float32, device=device)


def pack_nibbles(
    into: Tiles, places: Tensor, matrices: tuple[Tensor, ...], gain: Tensor | None, shape: TileShape,
    form: GroupRounding,
) -> None:  # fmt: skip
    """Round one or two matrices of one shape, with alternating rows, and pack them into their places of a stream.

    Arguments as of TileFormat.pack_by_kernel. form: without minima.
    """
    assert into.scales is not None
    cols, device = matrices[0].shape[1], matrices[0].device
    tiles, groups = -(-cols // shape.cols), -(-cols // form.group)
    rows = len(places) // tiles * shape.rows
    found = torch.empty(rows, groups, device=device)
    read, constants = _read(matrices, gain)
    launch_kernel(
        _search_kernel, (rows,),
        found, into.scales, _factors(device), *read, groups,
        GROUP=form.group, HALVINGS=form.group.bit_length() - 1, CHUNK=_CHUNK_VALUES // form.group,
        CANDIDATES=len(CANDIDATES), **constants,
    )  # fmt: skip
    launch_kernel(
        _nibbles_kernel, (len(places) * shape.images,),
        into.images, found, into.scales, places, *read, groups, tiles,
        R=shape.rows, GROUP=form.group, IMAGES=shape.images, BESIDE=128 * form.beside_rows, **constants,
    )  # fmt: skip


def pack_bytes(
    into: Tiles, places: Tensor, matrices: tuple[Tensor, ...], gain: Tensor | None, shape: TileShape, form: RowRounding
) -> None:
    """Round one or two matrices to one byte, likewise."""
    assert into.scales is not None
    tiles = -(-matrices[0].shape[1] // shape.cols)
    read, constants = _read(matrices, gain)
    constants["LARGEST"] = form.largest
    launch_kernel(
        _scales_kernel, (len(places) // tiles * shape.rows,), into.scales, *read, CHUNK=_CHUNK_VALUES, **constants
    )
    launch_kernel(
        _bytes_kernel, (len(places) * shape.images,),
        into.images, into.scales, places, *read, tiles,
        R=shape.rows, FORMAT=form.number, IMAGES=shape.images, **constants,
    )  # fmt: skip


def _read(matrices: tuple[Tensor, ...], gain: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of all kernels: tensors and sizes that they read, and constants and options."""
    first, second = matrices[0], matrices[-1]
    read = (first, second, first if gain is None else gain, *first.shape, first.stride(0))
    return read, {"COUNT": len(matrices), "GAIN": gain is not None, "num_warps": 4, "enable_fp_fusion": False}
