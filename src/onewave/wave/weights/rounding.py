"""Images of one-byte weights (base/rounding.py) in a stream, as widen.operand_a reads them."""

import torch
from torch import Tensor

from onewave.base.weight_formats import RowRounding


def bytes_of_threads(operands: Tensor) -> Tensor:
    """Reorder operands A, uint8 [images, 64, 128], by the threads that use them (place_in_image): [images, 8192]."""
    cut = operands.reshape(-1, 4, 2, 8, 4, 4, 4, 2)
    return cut.permute(0, 4, 1, 3, 6, 5, 7, 2).reshape(-1, 8192)


def operands_of_threads(images: Tensor) -> Tensor:
    """Undo bytes_of_threads: uint8 [images, 8192] to operands A [images, 64, 128]."""
    row = torch.arange(64, device=images.device)[:, None]
    return images[:, place_in_image(row, torch.arange(128, device=images.device)[None, :])]


def place_in_image(row: Tensor, column: Tensor) -> Tensor:
    """Locate operand A's value [row, column] among an image's values; int64, any shape.

    Slowest first: 32 columns, 16 rows, row in 8, pair of columns in 8, 8 columns in 32, column of a pair, half of 16
    rows. So a thread's 16 bytes are two 16-column steps of its own part of A, and four bytes are two registers.
    """
    at = (column // 32 * 4 + row // 16) * 8 + row % 8
    at = (at * 4 + column // 2 % 4) * 4 + column // 8 % 4
    return at * 4 + column % 2 * 2 + row // 8 % 2


def paired(values: Tensor, rounding: RowRounding) -> Tensor:
    """Reorder the 16 bits of each two bytes so that byte_values.widened needs the fewest instructions.

    values: uint8, from round_rows, an even number along the last axis. Returns uint8 of the same shape. From the
    highest bit (S: sign, M: magnitude or mantissa, E: exponent; a, b: first, second byte): int8: Sa Mb Sb Ma; fp8: Sa,
    the upper three bits of Eb, Sb, Ea, Ma, the lowest bit of Eb, Mb.
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


def unpaired(pairs: Tensor, rounding: RowRounding) -> Tensor:
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
