"""Weights rounded to one byte: int8 or fp8 (e4m3) values with one float32 scale a row.

A row's scale is its largest magnitude over the format's largest, so each value is off by at most half a step of the
format. The bytes' images in a stream are what widen.operand_a reads; the scale multiplies the float32 sum of a
row's product, so nothing else is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.wave.plan.layout import TileShape
from onewave.wave.weights.formats import Rounding

__all__ = ["byte_images", "paired", "place_in_image", "restore_rows", "round_rows", "unpaired"]


_SMALLEST_NORMAL = 2.0**-126


def round_rows(rows: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Round each row: float32 [n, cols] to (uint8 [n, cols], the formats' bits; float32 [n], scales).

    Ties to even. A row that is zero, or too small for its scale to be a normal number, becomes zeros. A row with a
    value that is no number, or infinite, gets such a scale, so that its products show it.
    """
    largest = rows.abs().amax(dim=1)
    scales = largest / rounding.largest
    scales = torch.where(scales < _SMALLEST_NORMAL, 1.0, scales)
    values = torch.nan_to_num(rows / scales[:, None]).clamp(-rounding.largest, rounding.largest)
    made = values.round().to(torch.int8) if rounding.name == "int8" else values.to(torch.float8_e4m3fn)
    return made.view(torch.uint8), scales


def restore_rows(made: Tensor, scales: Tensor, rounding: Rounding, dtype: torch.dtype) -> Tensor:
    """What the bytes stand for, rounded once to dtype: uint8 [n, cols], float32 [n]. Returns [n, cols]."""
    values = made.view(torch.int8 if rounding.name == "int8" else torch.float8_e4m3fn).to(torch.float32)
    return (values * scales[:, None]).to(dtype)


def byte_images(made: Tensor, shape: TileShape, rounding: Rounding) -> Tensor:
    """Whole row blocks as tiles of images of operand A. made: uint8 [blocks * shape.rows, cols], of round_rows.

    Returns uint8 [blocks * tiles, shape.images * 8192]: tile by tile along a row block, columns padded with zeros to
    whole tiles. The order of an image's values is that of place_in_image, two after another a pair (see paired).
    """
    count, cols = made.shape
    tiles = -(-cols // shape.cols)
    if tiles * shape.cols != cols:
        made = torch.nn.functional.pad(made, (0, tiles * shape.cols - cols))
    operand = made.view(count // shape.rows, shape.rows, tiles * shape.images, shape.quarters, 128)
    cut = operand.permute(0, 2, 3, 1, 4).reshape(-1, 4, 2, 8, 4, 4, 4, 2)
    return paired(cut.permute(0, 4, 1, 3, 6, 5, 7, 2).reshape(-1, shape.images * 8192), rounding)


def place_in_image(row: Tensor, column: Tensor) -> Tensor:
    """Where operand A's value [row, column] lies among an image's values; int64, any shape.

    From the slowest: 32 columns, 16 rows, row in 8, pair of columns in 8, 8 columns in 32, column of a pair, half of 16
    rows: so a thread's 16 bytes are two 16-column steps of its own part of A, four bytes two registers.
    """
    at = (column // 32 * 4 + row // 16) * 8 + row % 8
    at = (at * 4 + column // 2 % 4) * 4 + column // 8 % 4
    return at * 4 + column % 2 * 2 + row // 8 % 2


def paired(values: Tensor, rounding: Rounding) -> Tensor:
    """Each two bytes' 16 bits in the order in which 16-bit numbers are made of them in the fewest instructions
    (byte_values.widened). values: uint8, of round_rows, an even number along the last axis. Returns uint8, as many.

    From the highest bit (S: sign, M: magnitude or mantissa, E: exponent; a: of the first, b: of the second byte), int8:
    Sa Mb Sb Ma; fp8: Sa, the upper three bits of Eb, Sb, Ea, Ma, the lowest bit of Eb, Mb.
    """
    first, second = values.view(*values.shape[:-1], -1, 2).unbind(-1)
    if rounding.name == "int8":
        a, b = (byte.view(torch.int8) for byte in (first, second))
        low = a.abs().view(torch.uint8) | (second & 128)
        high = b.abs().view(torch.uint8) | (first & 128)
    else:
        low = (first << 4) | (second & 15)
        high = (first & 128) | (second & 112) | ((second & 128) >> 4) | ((first & 112) >> 4)
    return torch.stack((low, high), dim=-1).view(values.shape)


def unpaired(pairs: Tensor, rounding: Rounding) -> Tensor:
    """Undo paired."""
    low, high = pairs.view(*pairs.shape[:-1], -1, 2).unbind(-1)
    if rounding.name == "int8":
        a, b = ((magnitude & 127).view(torch.int8) for magnitude in (low, high))
        first = torch.where(high > 127, -a, a).view(torch.uint8)
        second = torch.where(low > 127, -b, b).view(torch.uint8)
    else:
        first = (high & 128) | ((high & 7) << 4) | (low >> 4)
        second = ((high & 8) << 4) | (high & 112) | (low & 15)
    return torch.stack((first, second), dim=-1).view(pairs.shape)
