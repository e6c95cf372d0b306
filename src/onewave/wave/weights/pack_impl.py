"""Pack and unpack weight tiles in Triton; dequantise tiles of one-byte and of 4-bit weights.

Program ids: program_id(0) is the tile (below 16 bits the image), program_id(1) one of _PARTS parts of it.
Registers: 16 values a thread. A program copies between 16 KiB of the stream and rows x cols of a matrix, or of two
with alternating rows, in runs of 64 values (128 bytes) on both sides. Roofline: each weight read and written once.

constexpr  meaning [unit] (allowed values)
R          rows of a weight tile (8, 16, 32, 64)
COUNT      matrices with alternating rows (1, 2)
GAIN       whether columns are multiplied by a gain (False, True)
PART       values of a program
FORMAT     one-byte format (1: int8, 2: fp8 e4m3)
IMAGES     operands A [64, 128] in a tile (1, 2, 4)
BITS       bits of a weight in a group, or 16 of one beside them (4, 8, 16)
GROUP      columns that share a scale (16, 32, 64, 128)
MINIMA     whether groups have minima (False, True)
NUMBER     type of scales and minima (float16, float32)
FLOATS     whether eight bits are e4m3 numbers, in pairs
NESTED     whether scales and minima are nested (formats/nested.py)
TILE       bytes of a tile
BESIDE     bytes of an image's scales and minima
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.launch import launch_kernel
from onewave.wave.plan.layout import TileShape
from onewave.wave.weights.formats.tile_format import Groups, Tiles, UnpackedRows

if TYPE_CHECKING:
    from onewave.wave.weights.row_table import RowTable

_PARTS = 4  # programs a tile: 2,048 values each, 16 a thread


@triton.jit
def _image(first_block, tiles, R: tl.constexpr, COUNT: tl.constexpr, PART: tl.constexpr):
    """Locate a part of tile program_id(0): (value in the image, matrix, its row counted from the first, column)."""
    number = tl.program_id(0)
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    half, line, column = place // 4096, place // 64 % 64, place % 64
    row = (first_block + number // tiles) * R + line % R
    column += (number % tiles) * (8192 // R) + line // R * 128 + half * 64
    return place, row % COUNT, row // COUNT, column


@triton.jit(do_not_specialize=["height", "first_block", "tiles"])
def _pack_kernel(
    stream, places, first, second, gain, height, cols, stride, first_block, tiles,
    R: tl.constexpr, COUNT: tl.constexpr, GAIN: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    place, matrix, row, column = _image(first_block, tiles, R, COUNT, PART)
    inside = (row < height) & (column < cols)
    at = row.to(tl.int64) * stride + column
    value = tl.load(first + at, mask=inside & (matrix == 0), other=0.0)
    if COUNT == 2:
        value = tl.where(matrix == 0, value, tl.load(second + at, mask=inside & (matrix == 1), other=0.0))
    if GAIN:
        # In float32 and rounded once, as Weight.block does.
        factor = tl.load(gain + column, mask=column < cols, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * factor).to(stream.dtype.element_ty)
    target = tl.load(places + first_block * tiles + tl.program_id(0)).to(tl.int64) * 8192
    tl.store(stream + target + place, value)


@triton.jit(do_not_specialize=["height", "first_block", "tiles", "first_row"])
def _unpack_kernel(
    stream, places, out, height, cols, first_block, tiles, first_row,
    R: tl.constexpr, COUNT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    place, matrix, row, column = _image(first_block, tiles, R, COUNT, PART)
    source = tl.load(places + first_block * tiles + tl.program_id(0)).to(tl.int64) * 8192
    value = tl.load(stream + source + place)
    row -= first_row
    inside = (row >= 0) & (row < height) & (column < cols)
    tl.store(out + (matrix.to(tl.int64) * height + row) * cols + column, value, mask=inside)


@triton.jit
def _e4m3(low, high, second):
    """The first or second number of a pair's two bytes (rounding.paired)."""
    of_first = (high & 128) | ((high & 7) << 4) | (low >> 4)
    byte = tl.where(second, ((high & 8) << 4) | (high & 112) | (low & 15), of_first)
    # Exponent and mantissa in float32's places make a number that is too small by the biases' difference.
    bits = ((byte & 128) << 24) | ((byte & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit(do_not_specialize=["height", "first_block", "tiles", "first_row"])
def _unpack_bytes_kernel(
    stream, places, scales, out, height, cols, first_block, tiles, first_row,
    R: tl.constexpr, COUNT: tl.constexpr, FORMAT: tl.constexpr, IMAGES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    number, image = tl.program_id(0) // IMAGES, tl.program_id(0) % IMAGES
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    line, column = place // 128, place % 128
    # The order of row_bytes.bytes_of_registers, or of rounding.place_in_image and rounding.paired. The gather stays
    # within a tile, which L1 holds.
    at = ((column // 32 * 4 + line // 16) * 8 + line % 8) * 4 + column // 2 % 4
    if FORMAT == 1 and R == 8:
        at = (at * 4 + column // 8 % 2 * 2 + line // 8 % 2) * 4 + column % 2 * 2 + column // 16 % 2
    else:
        at = (at * 4 + column // 8 % 4) * 4 + column % 2 * 2 + line // 8 % 2
    source = (tl.load(places + first_block * tiles + number).to(tl.int64) * IMAGES + image) * 8192
    pair = tl.load((stream + source).to(tl.pointer_type(tl.int16)) + at // 2).to(tl.int32)
    low, high, second = pair & 255, (pair >> 8) & 255, at % 2 > 0
    whole = (first_block + number // tiles) * R + line % R
    scale = tl.load(scales + whole)
    if FORMAT == 1 and R == 8:
        value = (tl.where(second, high, low) << 24 >> 24).to(tl.float32)
    elif FORMAT == 1:
        magnitude = tl.where(second, high, low) & 127
        value = tl.where(tl.where(second, low, high) > 127, -magnitude, magnitude).to(tl.float32)
    else:
        value = _e4m3(low, high, second)
    matrix, row = whole % COUNT, whole // COUNT - first_row
    column += (number % tiles * IMAGES + image) * (8192 // R) + line // R * 128
    inside = (row >= 0) & (row < height) & (column < cols)
    target = out + (matrix.to(tl.int64) * height + row) * cols + column
    tl.store(target, (value * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["height", "first_block", "tiles", "first_row"])
def _unpack_groups_kernel(
    stream, places, scales, out, height, cols, first_block, tiles, first_row,
    R: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr,
    NUMBER: tl.constexpr, NESTED: tl.constexpr, FLOATS: tl.constexpr, BESIDE: tl.constexpr,
    IMAGES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    number, image = tl.program_id(0) // IMAGES, tl.program_id(0) % IMAGES
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    line, column = place // 128, place % 128
    VALUES: tl.constexpr = 1024 * BITS
    tile = stream + tl.load(places + first_block * tiles + number).to(tl.int64) * (IMAGES * (VALUES + BESIDE))
    values = tile + image * VALUES
    whole = (first_block + number // tiles) * R + line % R
    if BITS == 16:  # the order of wide.HalfTiles
        at = ((column // 16 * 4 + line // 16) * 8 + line % 8) * 4 + column // 2 % 4
        at = at * 8 + column // 8 % 2 * 4 + line // 8 % 2 * 2 + column % 2
        value = tl.load(values.to(tl.pointer_type(out.dtype.element_ty)) + at).to(tl.float32)
    else:  # the order of group_nibbles.nibble_images and of rounding.place_in_image
        step = column // 32 % 2 if BITS == 4 else column // 32
        at = ((step * 4 + line // 16) * 8 + line % 8) * 4 + column // 2 % 4
        if BITS == 4:
            at = (at * 4 + line // 8 % 2 * 2 + column // 8 % 2) * 4 + column % 2 * 2 + column // 16 % 2
        else:
            at = (at * 4 + column // 8 % 4) * 4 + column % 2 * 2 + line // 8 % 2
        code = tl.load(values + at).to(tl.int32)
        if BITS == 4:
            code = (code >> (column // 64 * 4)) & 15
        beside = tile + IMAGES * VALUES
        row_at = line // 16 * 16 + line % 8 * 2 + line // 8 % 2
        if NESTED:
            value = _nested(beside, image, row_at, column, code, BITS, IMAGES, BESIDE // 6)
        else:
            beside = (beside + image * BESIDE).to(tl.pointer_type(NUMBER)) + column // GROUP * 64 + row_at
            scale = tl.load(beside).to(tl.float32)
            if FLOATS:
                pair = tl.load(values.to(tl.pointer_type(tl.int16)) + at // 2).to(tl.int32)
                value = _e4m3(pair & 255, (pair >> 8) & 255, at % 2 > 0) * scale
            elif MINIMA:
                value = code.to(tl.float32) * scale + tl.load(beside + 128 // GROUP * 64).to(tl.float32)
            else:
                value = (code - (8 if BITS == 4 else 128)).to(tl.float32) * scale
        value *= tl.load(scales + whole)
    matrix, row = whole % COUNT, whole // COUNT - first_row
    column += (number % tiles * IMAGES + image) * (8192 // R) + line // R * 128
    inside = (row >= 0) & (row < height) & (column < cols)
    target = out + (matrix.to(tl.int64) * height + row) * cols + column
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _nested(beside, image, row_at, column, code, BITS: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr):
    """Dequantise codes of a nested format (formats/nested.py), but for the row's scale. ROWS: numbers of an image's
    rows in one of the three parts."""
    part, group = IMAGES * ROWS, column // 32
    numbers = beside.to(tl.pointer_type(tl.float16)) + image * ROWS + row_at
    pairs = beside.to(tl.pointer_type(tl.int16)) + image * ROWS + row_at
    if BITS == 4:
        scale, least = tl.load(numbers + 2 * part).to(tl.float32), tl.load(numbers + 2 * part + 64).to(tl.float32)
        pair = tl.load(pairs + group // 2 * part + group % 2 * 64).to(tl.int32)
    else:
        scale = tl.load(numbers + group * 64).to(tl.float32)
        least = tl.load(numbers + part + group * 64).to(tl.float32)
        pair = tl.load(pairs + 2 * part + group * 64).to(tl.int32)
    return _nested_value(code, column, scale, least, pair, BITS)


@triton.jit
def _nested_value(code, column, scale, least, pair, BITS: tl.constexpr):
    up, down = (pair << 24) >> 24, pair >> 8
    if BITS == 8:
        code -= 128
        up = tl.where((column // 16 % 2 == 1) & (least == 0), down, up)
    return code.to(tl.float32) * (scale * up.to(tl.float32)) + least * down.to(tl.float32)


@triton.jit(do_not_specialize=["height", "first_block", "tiles", "first_row"])
def _unpack_sixes_kernel(
    stream, places, scales, out, height, cols, first_block, tiles, first_row,
    R: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr, IMAGES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    number, image = tl.program_id(0) // IMAGES, tl.program_id(0) % IMAGES
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    line, column = place // 128, place % 128
    tile = stream + tl.load(places + first_block * tiles + number).to(tl.int64) * TILE
    # The order of six_bits.six_images.
    rows, half, plane = line // 16 * 8 + line % 8, line // 8 % 2, column // 8 % 2 * 2 + line // 8 % 2
    at = ((rows * 4 + column // 2 % 4) * 4 + column // 32) * 4 + column % 2 * 2 + column // 16 % 2
    first = tl.load(tile + image * 6144 + at).to(tl.int32)
    second = tl.load(tile + image * 6144 + 2048 + at).to(tl.int32)
    third = tl.load(tile + image * 6144 + 4096 + at).to(tl.int32)
    fourth = ((first & 3) << 4) | ((second & 3) << 2) | (third & 3)
    own = tl.where(plane == 0, first, tl.where(plane == 1, second, third))
    code = tl.where(plane == 3, fourth, own >> 2) ^ 32
    steps = (tile + IMAGES * 6144 + image * 512).to(tl.pointer_type(tl.int8))
    step = tl.load(steps + rows * 16 + column // 32 * 4 + half * 2 + column // 16 % 2)
    scale = tl.load((tile + IMAGES * 7168 + image * 128).to(tl.pointer_type(tl.float16)) + rows * 2 + half)
    whole = (first_block + number // tiles) * R + line % R
    value = (code - 32).to(tl.float32) * (scale.to(tl.float32) * step.to(tl.float32))
    value *= tl.load(scales + whole)
    matrix, row = whole % COUNT, whole // COUNT - first_row
    column += (number % tiles * IMAGES + image) * (8192 // R) + line // R * 128
    inside = (row >= 0) & (row < height) & (column < cols)
    target = out + (matrix.to(tl.int64) * height + row) * cols + column
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["cols"])
def _look_up_kernel(ids, codes, scales, minima, steps, row_scales, out, cols, BITS: tl.constexpr, PART: tl.constexpr):
    row = tl.load(ids + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    inside, GROUP = column < cols, 128 if BITS == 4 else 32
    at = row * tl.cdiv(cols, GROUP) + column // GROUP
    scale = tl.load(scales + at, mask=inside, other=0).to(tl.float32)
    least = tl.load(minima + at, mask=inside, other=0).to(tl.float32)
    pair = tl.load(steps + row * tl.cdiv(cols, 32) + column // 32, mask=inside, other=0).to(tl.int32)
    if BITS == 4:
        code = (tl.load(codes + row * (cols // 2) + column // 2, mask=inside, other=0) >> (column % 2 * 4)) & 15
    else:
        code = tl.load(codes + row * cols + column, mask=inside, other=0)
    value = _nested_value(code.to(tl.int32), column, scale, least, pair, BITS) * tl.load(row_scales + row)
    tl.store(out + tl.program_id(0).to(tl.int64) * cols + column, value.to(out.dtype.element_ty), mask=inside)


def pack_tiles(
    stream: Tensor, places: Tensor, matrices: tuple[Tensor, ...], gain: Tensor | None, shape: TileShape
) -> None:
    """Pack one or two matrices of one shape, with alternating rows, into their places of the stream.

    places: int32, of every tile, row block by row block. matrices: [height, cols], last axis contiguous.
    """
    height, cols = matrices[0].shape
    tiles = -(-cols // shape.cols)
    launch_kernel(
        _pack_kernel, (len(places), _PARTS),
        stream, places, matrices[0], matrices[-1], stream if gain is None else gain,
        height, cols, matrices[0].stride(0), 0, tiles,
        R=shape.rows, COUNT=len(matrices), GAIN=gain is not None, PART=8192 // _PARTS, num_warps=4,
    )  # fmt: skip


def unpack_tiles(stream: Tensor, places: Tensor, part: UnpackedRows, shape: TileShape) -> None:
    """Read rows of 16-bit weights back."""
    _unpack(_unpack_kernel, (stream, places), part, shape, 1)


def unpack_bytes(tiles: Tiles, places: Tensor, part: UnpackedRows, shape: TileShape, number: int) -> None:
    """Dequantise rows of one-byte weights: each value times its row's scale, rounded once to out's dtype. number: the
    kernel's FORMAT (1: int8, 2: fp8)."""
    read, images = (tiles.images, places, tiles.scales), shape.images
    _unpack(_unpack_bytes_kernel, read, part, shape, images, FORMAT=number, IMAGES=images)


def unpack_groups(tiles: Tiles, places: Tensor, part: UnpackedRows, shape: TileShape, groups: Groups) -> None:
    """Dequantise rows of weights in groups in float32, rounded once to out's dtype."""
    _unpack(
        _unpack_groups_kernel, (tiles.images, places, tiles.scales), part, shape, shape.images,
        BITS=groups.bits, GROUP=groups.size, MINIMA=groups.minima, FLOATS=groups.floats, NESTED=groups.nested,
        NUMBER=tl.float32 if groups.number is torch.float32 else tl.float16,
        BESIDE=shape.tile_bytes // shape.images - 1024 * groups.bits, IMAGES=shape.images,
    )  # fmt: skip


def unpack_sixes(tiles: Tiles, places: Tensor, part: UnpackedRows, shape: TileShape) -> None:
    """Dequantise rows of 6-bit weights, likewise."""
    read, images = (tiles.images, places, tiles.scales), shape.images
    _unpack(_unpack_sixes_kernel, read, part, shape, images, TILE=shape.tile_bytes, IMAGES=images)


def _unpack(
    kernel: Any, read: tuple[Tensor | None, ...], part: UnpackedRows, shape: TileShape, images: int, **constants: Any
) -> None:
    """Launch a kernel for all images of a part's tiles. read: its first arguments."""
    _, height, cols = part.out.shape
    tiles = -(-cols // shape.cols)
    launch_kernel(
        kernel, (part.blocks * tiles * images, _PARTS),
        *read, part.out, height, cols, part.first_block, tiles, part.first_row,
        R=shape.rows, COUNT=part.count, PART=8192 // _PARTS, num_warps=4, **constants,
    )  # fmt: skip


def look_up_rows(table: RowTable, ids: Tensor, out: Tensor) -> None:
    """Dequantise rows of a table, likewise. ids: int64|int32 [n]. out: [n, cols]."""
    cols = out.shape[1]
    launch_kernel(
        _look_up_kernel, (len(ids), -(-cols // 1024)),
        ids, table.codes, table.scales, table.minima, table.steps, table.row_scales, out, cols,
        BITS=table.bits, PART=1024, num_warps=4,
    )  # fmt: skip
