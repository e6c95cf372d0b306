"""bfloat16 weights in thirteen bits each, without loss: compact tiles of the stream.

Values. The exponents of a row's weights lie close together: 31 powers of two below the largest weight hold all but one
in hundreds of millions. So a weight keeps its sign, its mantissa, and its exponent's distance (0 to 31) from the row's
`base`, 31 below the largest exponent. The five bits are the exponent of a bfloat16 number: the weight times a power of
two, the same for the row; its inverse goes into the row's scale. Nothing is rounded. Distance 0 is a
subnormal number as in bfloat16, so zeros, and smaller weights that end in zero bits, are exact as well. All other
weights are listed beside their tile, whole, and multiplied apart (widen.add_listed).

Layout. A tile is one or two images, side by side, each operand A [64, 128] of a product in two halves of 64 columns. A
thread's 32 weights of a half, 16 pairs in neighbouring columns, are thirteen words (compact_values.py). Each word holds
a pair. The three other pairs are spread over the gaps: first bits in the first three words of a group, three in each;
the next three in a word of the last group; the signs in the thirteenth word. A tile has three planes, of the first,
second and third words of all its halves, four a thread; then the thirteenth words.

List. LIST_WORDS words: the count, then one word a weight: the upper 16 bits are the weight, 2^64 times what the tile
would hold; the lower 16 its half, thread and place among the thread's 32.
"""

import torch
from torch import Tensor

from onewave.wave.plan.layout import LIST_WORDS, TileShape

MAX_BASE = 190
"""The largest base of a row, for weights below 2^95. With a larger one its scale would overflow float32."""
_DISTANCES = 31
# Powers of two by which listed numbers are larger, and activations are raised (byte_values.py).
_RAISED = 64
_OUT_OF_REACH = -1
# First bit of the gap of three bits in a word. A number is its sign, then 12 bits.
_GAP = 12


def bases_of(rows: Tensor) -> Tensor:
    """Find the base of each row of bfloat16 weights, as a stored exponent: int32 [n]."""
    return ((rows.view(torch.int16) & 0x7FFF).amax(dim=1).int() >> 7).sub_(_DISTANCES).clamp_(min=0)


def scales_of(bases: Tensor) -> Tensor:
    """Return the scale of each row's sums of products with raised activations: float32 [n]."""
    return torch.ldexp(torch.ones((), device=bases.device), (bases - _RAISED).float())


def compact_images(rows: Tensor, bases: Tensor, shape: TileShape) -> tuple[Tensor, Tensor, Tensor]:
    """Pack whole row blocks as compact tiles. rows: bfloat16 [blocks * shape.rows, cols]. bases: bases_of(rows).

    Returns uint8 [blocks * tiles, shape.tile_bytes], tile by tile along a row block, columns padded with zeros to whole
    tiles; int32 [blocks * tiles, LIST_WORDS], their lists; and a flag: whether tiles and lists hold all weights.
    """
    cols = rows.shape[1]
    tiles = -(-cols // shape.cols)
    if tiles * shape.cols != cols:
        rows = torch.nn.functional.pad(rows, (0, tiles * shape.cols - cols))
    numbers, listed = _numbers(rows.contiguous().view(torch.int16).int() & 0xFFFF, bases[:, None])
    lists, all_listed = _lists(_of_threads(listed, shape).flatten(1))
    found = _of_threads(numbers, shape)
    pairs = (found[..., 0::2] | (found[..., 1::2] << 16)).reshape(*found.shape[:-1], 4, 4)
    planes, last = pairs[..., :3].clone(), pairs[..., 3, 3].clone()
    for k in range(3):
        rest = pairs[..., k, 3]
        for part in range(3):
            planes[..., k, part] |= _bits(rest, 9 - 3 * part) << _GAP
        planes[..., 3, k] |= _bits(rest, 0) << _GAP
        last |= ((rest >> 15) & 0x00010001) << (_GAP + k)
    words = torch.cat((planes.permute(0, 4, 1, 2, 3).flatten(1), last.flatten(1)), dim=1)
    return words.contiguous().view(torch.uint8), lists, all_listed & (bases <= MAX_BASE).all()


def _bits(pairs: Tensor, first: int) -> Tensor:
    """Take three bits of each of two numbers, from bit `first` on."""
    return (pairs >> first) & 0x00070007


def _numbers(bits: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Convert weights, int32 bits, to the numbers that tiles hold, and to the upper 16 bits of their words in lists.

    The latter are 0 where the number is exact, -1 where no list word can hold the weight.
    """
    exponent, mantissa, sign = (bits >> 7) & 0xFF, bits & 0x7F, bits & 0x8000
    distance = exponent - base
    whole = torch.where(exponent > 0, mantissa | 0x80, mantissa)  # in units of a number of exponent 1
    down = (base + 1 - exponent.clamp(min=1)).clamp(0, 8)
    shifted = whole >> down
    exact = (shifted << down) == whole
    near = (distance > 0) & (exponent > 0)
    number = torch.where(near, (distance << 7) | mantissa, torch.where(exact, shifted, 0)) | sign
    raised = distance + _RAISED
    listed = torch.where((exponent > 0) & (raised > 0), sign | (raised << 7) | mantissa, _OUT_OF_REACH)
    return number, torch.where(near | exact, 0, listed)


def _of_threads(values: Tensor, shape: TileShape) -> Tensor:
    """Reorder values of whole row blocks, [rows, cols], by the threads that use them: [tiles, halves, 128, 32]."""
    count = len(values)
    operand = values.view(count // shape.rows, shape.rows, -1, shape.quarters, 128).permute(0, 2, 3, 1, 4)
    # [16 rows, half of them, row in 8, half, 16 columns, half of them, pair of columns, column]
    cut = operand.reshape(-1, 4, 2, 8, 2, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    return cut.reshape(-1, 2 * shape.images, 128, 32)


def _rows_of(values: Tensor, cols: int, shape: TileShape) -> Tensor:
    """Undo _of_threads: [rows, cols]."""
    tiles = -(-cols // shape.cols)
    cut = values.reshape(-1, 2, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, 7, 3, 1, 5, 6, 4, 8)
    operand = cut.reshape(-1, tiles * shape.images, shape.quarters, shape.rows, 128).permute(0, 3, 1, 2, 4)
    return operand.reshape(-1, tiles * shape.cols)[:, :cols]


def _lists(listed: Tensor) -> tuple[Tensor, Tensor]:
    """Build tiles' lists from the upper bits of each value's word, [tiles, values]; also whether they hold all."""
    lists = torch.zeros(len(listed), LIST_WORDS, dtype=torch.int32, device=listed.device)
    counts = (listed != 0).sum(dim=1)
    lists[:, 0] = counts.clamp(max=LIST_WORDS - 1)
    tile, place = torch.nonzero(listed, as_tuple=True)
    at = 1 + torch.arange(len(tile), device=listed.device) - (counts.cumsum(dim=0) - counts)[tile]
    upper = listed[tile, place]
    fits = at < LIST_WORDS
    lists[tile[fits], at[fits]] = ((upper << 16) | place.int())[fits]
    return lists, fits.all() & (upper != _OUT_OF_REACH).all()


def restore_images(images: Tensor, lists: Tensor, scales: Tensor, cols: int, shape: TileShape) -> Tensor:
    """Undo compact_images: bfloat16 [rows, cols]. scales: float32, scales_of the rows' bases."""
    halves = 2 * shape.images
    words = images.view(torch.int32)
    planes = words[:, : 3 * halves * 512].view(-1, 3, halves, 128, 4)
    last = words[:, 3 * halves * 512 :].view(-1, halves, 128)
    pairs = torch.empty(*last.shape, 4, 4, dtype=torch.int32, device=images.device)
    pairs[..., :3] = planes.permute(0, 2, 3, 4, 1)
    pairs[..., 3, 3] = last
    for k in range(3):
        rest = _bits(planes[:, k, ..., 3], _GAP) | ((last >> (_GAP + k) & 0x00010001) << 15)
        for part in range(3):
            rest |= _bits(planes[:, part, ..., k], _GAP) << (9 - 3 * part)
        pairs[..., k, 3] = rest
    pairs &= -0x70007001
    numbers = torch.stack((pairs << 16, pairs & -0x10000), dim=-1).view(torch.float32).double().flatten(1)
    # Unused list words go to an extra place at the end, so that the host need not wait for their number.
    word, nowhere = lists[:, 1:], numbers.shape[1]
    listed = torch.arange(LIST_WORDS - 1, device=images.device) < lists[:, :1]
    place = torch.where(listed, word & 0xFFFF, nowhere).long()
    values = (word & -0x10000).view(torch.float32).double() * 2.0**-_RAISED
    numbers = torch.nn.functional.pad(numbers, (0, 1)).scatter_(1, place, values)[:, :nowhere]
    rows = _rows_of(numbers, cols, shape)
    return (rows * (scales.double() * 2.0**_RAISED)[:, None]).to(torch.bfloat16)
