"""Pack and unpack compact tiles in Triton, bit for bit as compact.py does.

Program ids: program_id(0) is a row (_bases_kernel) or a tile (_pack_kernel, _unpack_kernel), with a thread for each of
the wave's threads (128 a half). Order of a tile: load pairs of weights in the matrix's order, 16 bytes a thread; make
the thirteen bits of both of a pair at once; exchange the pairs through shared memory, once, to the threads that store
them. Unpacking is the reverse. Registers: one tile.

A weight that is neither 0 nor a normal number of the tile (a subnormal one, or a listed one) is one in hundreds of
millions. A tile that has one is packed again, exactly, 32 threads' words at a time, so that the common case does not
pay for the registers. Roofline: pack: weights read twice, tiles written once; unpack: tiles read, weights written once.

constexpr  meaning [unit] (allowed values)
R          rows of a weight tile (8, 16, 32, 64)
COUNT      matrices with alternating rows (1, 2)
IMAGES     operands A [64, 128] in a tile (1, 2)
GAIN       whether columns are multiplied by a gain (False, True)
PAIRED     whether two neighbouring values are one aligned word everywhere (False, True)
PART       pairs of a row that its program loads at a time
"""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.launch import launch_kernel
from onewave.wave.plan.layout import LIST_WORDS, TileShape
from onewave.wave.weights.compact import MAX_BASE
from onewave.wave.weights.formats.tile_format import UnpackedRows

_ROW_PAIRS = 1024  # pairs that a row's program loads at a time: 16 bytes a thread, twice
_LIST_WORDS = tl.constexpr(LIST_WORDS)
_MAX_BASE = tl.constexpr(MAX_BASE)
_NO_KEY = tl.constexpr(0x7FFFFFFF)
_RAISED = tl.constexpr(2.0**64)


class _Matrices(namedtuple("_Matrices", "first second gain height cols stride")):
    """One or two matrices [height, cols] with alternating rows, stride apart, and the gain of their columns."""


class _Constants(namedtuple("_Constants", "R COUNT IMAGES GAIN PAIRED")):
    """The constexprs of packing; the table at the top has their meaning."""


class _Rows(namedtuple("_Rows", "out height cols first_row")):
    """Rows to read back: out [COUNT, height, cols], each matrix's rows from first_row on."""


@triton.jit
def _pairs(rows, pair, inside, matrices, GAIN: tl.constexpr, PAIRED: tl.constexpr):
    """Load pairs of bfloat16 weights, times their gain, as uint32 words; 0 beyond cols.

    rows: pointers to the rows that are `inside`. PAIRED: whether both can be loaded as one word, gains too.
    """
    cols = matrices.cols
    gain = matrices.gain
    if PAIRED:
        inside = inside & (pair < cols // 2)
        words = tl.load(rows.to(tl.pointer_type(tl.uint32)) + pair, mask=inside, other=0)
    else:
        values = rows.to(tl.pointer_type(tl.uint16)) + 2 * pair
        low = tl.load(values, mask=inside & (2 * pair < cols), other=0).to(tl.uint32)
        words = low | (tl.load(values + 1, mask=inside & (2 * pair + 1 < cols), other=0).to(tl.uint32) << 16)
    if GAIN:
        if PAIRED:
            factors = tl.load(gain.to(tl.pointer_type(tl.uint32)) + pair, mask=inside, other=0)
            low = (factors << 16).to(tl.float32, bitcast=True)
            high = (factors & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            low = tl.load(gain + 2 * pair, mask=inside & (2 * pair < cols), other=0.0).to(tl.float32)
            high = tl.load(gain + 2 * pair + 1, mask=inside & (2 * pair + 1 < cols), other=0.0).to(tl.float32)
        low = _rounded((words << 16).to(tl.float32, bitcast=True) * low)
        words = (low >> 16) | (_rounded((words & 0xFFFF0000).to(tl.float32, bitcast=True) * high) & 0xFFFF0000)
    return words


@triton.jit
def _rounded(value):
    """Round float32 bits so that the upper 16 are the nearest bfloat16's, ties to even.

    Done by hand, because the interpreter rounds differently from a GPU.
    """
    bits = tl.where(value == value, value.to(tl.uint32, bitcast=True), 0x7FC00000)  # is it a number?
    return bits + 0x7FFF + ((bits >> 16) & 1)


@triton.jit(do_not_specialize=["height"])
def _bases_kernel(
    scales, reached, first, second, gain, height, cols, stride,
    COUNT: tl.constexpr, GAIN: tl.constexpr, PAIRED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    matrices = _Matrices(first=first, second=second, gain=gain, height=height, cols=cols, stride=stride)
    whole = tl.program_id(0)
    row = whole // COUNT
    values = first if COUNT == 1 else tl.where(whole % COUNT == 0, first, second)
    values += row.to(tl.int64) * stride
    largest = tl.zeros([PART], tl.uint32)
    for low in range(0, tl.where(row < height, cols, 0), 2 * PART):
        pair = low // 2 + tl.arange(0, PART)
        words = _pairs(values, pair, row < height, matrices, GAIN, PAIRED)
        largest = tl.maximum(largest, tl.maximum(words & 0x7FFF0000, (words << 16) & 0x7FFF0000))
    base = tl.maximum((tl.max(largest, axis=0) >> 23).to(tl.int32) - 31, 0)
    # 2^(base - 64), by its exponent: infinite where there is no such number.
    bits = tl.minimum(base + 63, 255) << 23
    tl.store(scales + whole, bits.to(tl.float32, bitcast=True))
    tl.store(reached, 0, mask=base > _MAX_BASE)


@triton.jit
def _place(tile, line, pair, tiles, R: tl.constexpr, IMAGES: tl.constexpr):
    """Locate a line of a tile's images and a pair of its columns: the row of the stream, and the pair in that row."""
    column = tile % tiles * (IMAGES * 64 // R) + line // R
    return tile // tiles * R + line % R, column * 64 + pair


@triton.jit
def _of_tile(tile, line, pair, scales, matrices, tiles, c):
    """Load _pairs of these lines [n, 1] and pairs [1, m] of a tile, and the lines' bases."""
    whole, column = _place(tile, line, pair, tiles, c.R, c.IMAGES)
    row = whole // c.COUNT
    values = matrices.first if c.COUNT == 1 else tl.where(whole % c.COUNT == 0, matrices.first, matrices.second)
    values += row.to(tl.int64) * matrices.stride
    words = _pairs(values, column, row < matrices.height, matrices, c.GAIN, c.PAIRED)
    return words, (tl.load(scales.to(tl.pointer_type(tl.int32)) + whole) >> 23) - 63


@triton.jit
def _bits(pairs, FIRST: tl.constexpr):
    """Move three bits of each of two numbers, from bit FIRST on, to a word's gap."""
    return ((pairs >> FIRST) & 0x00070007) << 12


@triton.jit
def _joined(word0, word1, word2, word3, SIZE: tl.constexpr):
    """Interleave the words of four tensors [SIZE / 4]."""
    return tl.reshape(tl.join(tl.join(word0, word2), tl.join(word1, word3)), [SIZE])


@triton.jit
def _store_words(target, pairs, first, THREADS: tl.constexpr, IMAGES: tl.constexpr):
    """Store thirteen words of each thread of a tile, from thread `first` on.

    pairs: of numbers, [THREADS * 4, half of 16 columns, half of 16 rows].
    """
    even, odd = tl.split(pairs)
    word0, word2 = tl.split(even)
    word1, rest = tl.split(odd)
    even, odd = tl.split(tl.reshape(rest, [THREADS, 2, 2]))
    rest0, rest2 = tl.split(even)
    rest1, rest3 = tl.split(odd)
    word0 |= _joined(_bits(rest0, 9), _bits(rest1, 9), _bits(rest2, 9), _bits(rest0, 0), THREADS * 4)
    word1 |= _joined(_bits(rest0, 6), _bits(rest1, 6), _bits(rest2, 6), _bits(rest1, 0), THREADS * 4)
    word2 |= _joined(_bits(rest0, 3), _bits(rest1, 3), _bits(rest2, 3), _bits(rest2, 0), THREADS * 4)
    rest3 |= ((rest0 & 0x80008000) >> 3) | ((rest1 & 0x80008000) >> 2) | ((rest2 & 0x80008000) >> 1)
    at = first * 4 + tl.arange(0, THREADS * 4)
    tl.store(target + at, word0)
    tl.store(target + 1024 * IMAGES + at, word1)
    tl.store(target + 2048 * IMAGES + at, word2)
    tl.store(target + 3072 * IMAGES + first + tl.arange(0, THREADS), rest3)


@triton.jit
def _exactly(bits, base):
    """compact.py's _numbers, of bfloat16 bits as int32."""
    exponent, mantissa, sign = (bits >> 7) & 0xFF, bits & 0x7F, bits & 0x8000
    distance = exponent - base
    whole = tl.where(exponent > 0, mantissa | 0x80, mantissa)
    down = tl.minimum(tl.maximum(base + 1 - tl.maximum(exponent, 1), 0), 8)
    shifted = whole >> down
    exact = (shifted << down) == whole
    near = (distance > 0) & (exponent > 0)
    number = tl.where(near, (distance << 7) | mantissa, tl.where(exact, shifted, 0)) | sign
    raised = distance + 64
    listed = tl.where((exponent > 0) & (raised > 0), sign | (raised << 7) | mantissa, 0xFFFF)
    return number, tl.where(near | exact, 0, listed)


@triton.jit
def _store_list(listed, low, high, first, place):
    """Write words of a tile's list from word `first` on, ascending by place.

    low, high: the upper 16 bits of the words of each pair's two numbers, or 0. place: the first number's.
    """
    low = tl.where(low > 0, (place << 16) | low, _NO_KEY)
    high = tl.where(high > 0, ((place + 1) << 16) | high, _NO_KEY)
    key = tl.min(tl.minimum(low, high))
    at = first
    while (key < _NO_KEY) & (at < _LIST_WORDS):
        tl.store(listed + at, (key >> 16) | ((key & 0xFFFF).to(tl.uint32) << 16).to(tl.int32, bitcast=True))
        key = tl.min(tl.minimum(tl.where(low > key, low, _NO_KEY), tl.where(high > key, high, _NO_KEY)))
        at += 1


@triton.jit
def _pack_exactly(target, listed, reached, tile, scales, matrices, tiles, c):
    """Pack any tile exactly, 32 threads' words at a time, and write its list. Returns the number of listed weights."""
    count = tl.full([], 0, tl.int32)
    for part in range(8 * c.IMAGES):
        line = part // 8 * 64 + part % 4 * 16 + tl.arange(0, 16)[:, None]
        pair = part // 4 % 2 * 32 + tl.arange(0, 32)[None, :]
        words, base = _of_tile(tile, line, pair, scales, matrices, tiles, c)
        low, of_low = _exactly((words & 0xFFFF).to(tl.int32), base)
        high, of_high = _exactly((words >> 16).to(tl.int32), base)
        # [half of 16 rows, row in 8, 16 columns, half of them, pair in 8 columns]
        cut = tl.reshape(low.to(tl.uint32) | (high.to(tl.uint32) << 16), [2, 8, 4, 2, 4])
        cut = tl.reshape(tl.permute(cut, (1, 4, 2, 3, 0)), [128, 2, 2])
        _store_words(target, cut, part * 32, 32, c.IMAGES)
        found = tl.sum((of_low > 0).to(tl.int32) + (of_high > 0).to(tl.int32))
        if found > 0:
            thread = part * 32 + line % 8 * 4 + pair % 4
            place = thread * 32 + pair // 8 % 4 * 8 + pair // 4 % 2 * 4 + line // 8 % 2 * 2
            _store_list(listed, of_low, of_high, count + 1, place)
            count += found
            unreached = tl.max(tl.maximum(of_low, of_high)) == 0xFFFF
            tl.store(reached, 0, mask=unreached | (count >= _LIST_WORDS))
    return count


@triton.jit(do_not_specialize=["height", "tiles"])
def _pack_kernel(
    images, lists, scales, reached, places, first, second, gain, height, cols, stride, tiles,
    R: tl.constexpr, COUNT: tl.constexpr, IMAGES: tl.constexpr, GAIN: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    # Annotated, because Triton would turn the constants into values otherwise.
    c: tl.constexpr = _Constants(R=R, COUNT=COUNT, IMAGES=IMAGES, GAIN=GAIN, PAIRED=PAIRED)
    matrices = _Matrices(first=first, second=second, gain=gain, height=height, cols=cols, stride=stride)
    tile = tl.program_id(0)
    place = tl.load(places + tile).to(tl.int64)
    target = images.to(tl.pointer_type(tl.uint32)) + place * (IMAGES * 3328)
    listed = lists + place * _LIST_WORDS
    line, pair = tl.arange(0, 64 * IMAGES)[:, None], tl.arange(0, 64)[None, :]
    words, base = _of_tile(tile, line, pair, scales, matrices, tiles, c)
    # Both halves of a word at once: a number of distance 1 or more is the weight less the base, and 0 is 0.
    above = (words | 0x80008000) - (((base + 1) << 7) * 0x00010001).to(tl.uint32)
    near = above & 0x80008000
    numbers = (((above & 0x7FFF7FFF) + 0x00800080) & (near - (near >> 15))) | (words & 0x80008000)
    # [image, 16 rows, half of them, row in 8, half, 16 columns, half of them, pair in 8 columns]
    cut = tl.reshape(numbers, [IMAGES, 4, 2, 8, 2, 4, 2, 4])
    cut = tl.reshape(tl.permute(cut, (0, 4, 1, 3, 7, 5, 6, 2)), [IMAGES * 1024, 2, 2])
    _store_words(target, cut, 0, 256 * IMAGES, IMAGES)
    count = tl.full([], 0, tl.int32)
    if tl.max(((words & 0x7FFF7FFF) + 0x7FFF7FFF) & (near ^ 0x80008000)) > 0:
        tl.debug_barrier()  # the exact words overwrite the first ones
        count = _pack_exactly(target, listed, reached, tile, scales, matrices, tiles, c)
    at = tl.arange(0, _LIST_WORDS)
    count = tl.minimum(count, _LIST_WORDS - 1)
    tl.store(listed + at, tl.where(at == 0, count, 0), mask=(at == 0) | (at > count))


@triton.jit
def _fourth(words, SIZE: tl.constexpr):
    """Take the last of every four words."""
    _, odd = tl.split(tl.reshape(words, [SIZE, 2, 2]))
    _, fourth = tl.split(odd)
    return fourth


@triton.jit
def _restore_listed(listed, count, tile, scales, rows, tiles, c):
    """Write the weights of a tile's list."""
    at = tl.arange(0, _LIST_WORDS)
    inside = (at > 0) & (at <= count)
    word = tl.load(listed + at, mask=inside, other=0)
    number = word & 0x3FFF
    line = number // 8192 * 64 + number // 1024 % 4 * 16 + number // 2 % 2 * 8 + number // 128 % 8
    pair = number // 4096 % 2 * 32 + number // 8 % 4 * 8 + number // 4 % 2 * 4 + number // 32 % 4
    whole, column = _place(tile, line, pair, tiles, c.R, c.IMAGES)
    column = 2 * column + number % 2
    value = (word & -0x10000).to(tl.float32, bitcast=True) * tl.load(scales + whole)
    bits = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
    row = whole // c.COUNT - rows.first_row
    inside = inside & (row >= 0) & (row < rows.height) & (column < rows.cols)
    target = rows.out + ((whole % c.COUNT).to(tl.int64) * rows.height + row) * rows.cols + column
    tl.store(target.to(tl.pointer_type(tl.uint16)), bits, mask=inside)


@triton.jit(do_not_specialize=["height", "first_block", "tiles", "first_row"])
def _unpack_kernel(
    images, lists, places, scales, out, height, cols, first_block, tiles, first_row,
    R: tl.constexpr, COUNT: tl.constexpr, IMAGES: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    THREADS: tl.constexpr = 256 * IMAGES
    tile = first_block * tiles + tl.program_id(0)
    place = tl.load(places + tile).to(tl.int64)
    source = images.to(tl.pointer_type(tl.uint32)) + place * (THREADS * 13)
    at = tl.arange(0, THREADS * 4)
    word0 = tl.load(source + at)
    word1 = tl.load(source + THREADS * 4 + at)
    word2 = tl.load(source + THREADS * 8 + at)
    rest3 = tl.load(source + THREADS * 12 + tl.arange(0, THREADS))
    gap0, gap1, gap2 = word0 & 0x70007000, word1 & 0x70007000, word2 & 0x70007000
    rest = tl.reshape((gap0 >> 3) | (gap1 >> 6) | (gap2 >> 9), [THREADS, 2, 2])
    even, odd = tl.split(rest)
    rest0, rest2 = tl.split(even)
    rest1, _ = tl.split(odd)
    rest0 |= (_fourth(gap0, THREADS) >> 12) | ((rest3 << 3) & 0x80008000)
    rest1 |= (_fourth(gap1, THREADS) >> 12) | ((rest3 << 2) & 0x80008000)
    rest2 |= (_fourth(gap2, THREADS) >> 12) | ((rest3 << 1) & 0x80008000)
    rest = _joined(rest0, rest1, rest2, rest3, THREADS * 4)
    cut = tl.join(tl.join(word0, word2), tl.join(word1, rest)) & 0x8FFF8FFF
    # [image, half, 16 rows, row in 8, pair in 8 columns, 16 columns, half of them, half of 16 rows]
    cut = tl.permute(tl.reshape(cut, [IMAGES, 2, 4, 8, 4, 4, 2, 2]), (0, 2, 7, 3, 1, 5, 6, 4))
    numbers = tl.reshape(cut, [64 * IMAGES, 64])

    line, pair = tl.arange(0, 64 * IMAGES)[:, None], tl.arange(0, 64)[None, :]
    whole, column = _place(tile, line, pair, tiles, R, IMAGES)
    scale = tl.load(scales + whole)
    low = ((numbers << 16).to(tl.float32, bitcast=True) * _RAISED * scale).to(tl.uint32, bitcast=True)
    high = ((numbers & 0xFFFF0000).to(tl.float32, bitcast=True) * _RAISED * scale).to(tl.uint32, bitcast=True)
    row = whole // COUNT - first_row
    inside = (row >= 0) & (row < height)
    target = out + ((whole % COUNT).to(tl.int64) * height + row) * cols
    if PAIRED:
        pairs = target.to(tl.pointer_type(tl.uint32)) + column
        tl.store(pairs, (low >> 16) | (high & 0xFFFF0000), mask=inside & (column < cols // 2))
    else:
        values = target.to(tl.pointer_type(tl.uint16)) + 2 * column
        tl.store(values, (low >> 16).to(tl.uint16), mask=inside & (2 * column < cols))
        tl.store(values + 1, (high >> 16).to(tl.uint16), mask=inside & (2 * column + 1 < cols))

    listed = lists + place * _LIST_WORDS
    count = tl.load(listed)
    if count > 0:
        tl.debug_barrier()  # listed weights are written last
        c: tl.constexpr = _Constants(R=R, COUNT=COUNT, IMAGES=IMAGES, GAIN=False, PAIRED=PAIRED)
        rows = _Rows(out=out, height=height, cols=cols, first_row=first_row)
        _restore_listed(listed, count, tile, scales, rows, tiles, c)


def pack_compact(
    images: Tensor, lists: Tensor, scales: Tensor, reached: Tensor, places: Tensor, matrices: tuple[Tensor, ...],
    gain: Tensor | None, shape: TileShape,
) -> None:  # fmt: skip
    """Pack one or two bfloat16 matrices of one shape, with alternating rows, into their places of a compact stream.

    images: uint8 [stream tiles, shape.tile_bytes]. lists: int32 [stream tiles, LIST_WORDS]. scales: float32, of the
    matrices' row blocks. reached: bool, set to False if the format does not hold a weight. places: int32, of each tile,
    row block by row block. matrices: [height, cols], last axis contiguous. gain: [cols], contiguous, multiplied in
    float32 and rounded once.
    """
    height, cols = matrices[0].shape
    tiles = -(-cols // shape.cols)
    first, second, stride = matrices[0], matrices[-1], matrices[0].stride(0)
    gains = first if gain is None else gain
    flag = reached.view(torch.uint8)
    paired = gains.dtype is torch.bfloat16 and _paired(cols, stride, first, second, gains)
    count, gained = len(matrices), gain is not None
    launch_kernel(
        _bases_kernel, (len(places) // tiles * shape.rows,),
        scales, flag, first, second, gains, height, cols, stride,
        COUNT=count, GAIN=gained, PAIRED=paired, PART=_ROW_PAIRS, num_warps=4,
    )  # fmt: skip
    launch_kernel(
        _pack_kernel, (len(places),),
        images, lists, scales, flag, places, first, second, gains, height, cols, stride, tiles,
        R=shape.rows, COUNT=count, IMAGES=shape.images, GAIN=gained, PAIRED=paired, num_warps=8 * shape.images,
    )  # fmt: skip


def unpack_compact(
    images: Tensor, lists: Tensor, places: Tensor, scales: Tensor, part: UnpackedRows, shape: TileShape
) -> None:
    """Read rows of a compact stream back, as bfloat16, with their gain.

    scales: float32, of the rows of all blocks; the others as in pack_compact.
    """
    _, height, cols = part.out.shape
    tiles = -(-cols // shape.cols)
    launch_kernel(
        _unpack_kernel, (part.blocks * tiles,),
        images, lists, places, scales, part.out, height, cols, part.first_block, tiles, part.first_row,
        R=shape.rows, COUNT=part.count, IMAGES=shape.images, PAIRED=_paired(cols, cols, part.out),
        num_warps=8 * shape.images,
    )  # fmt: skip


def _paired(cols: int, stride: int, *matrices: Tensor) -> bool:
    """Whether two neighbouring 16-bit values, from an even column on, are one aligned word in all rows."""
    return cols % 2 == 0 and stride % 2 == 0 and all(matrix.data_ptr() % 4 == 0 for matrix in matrices)
