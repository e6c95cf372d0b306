"""GGUF's blocks of 4 to 8 bits as matrices in groups. Source: ggml's ggml-quants.c, dequantize_row_*."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from onewave.base.gguf_types import TYPES_BY_NAME
from onewave.base.grouped import Array, Code, GroupedMatrix, GroupFormat, GroupNumbers, Offset

_Opened = tuple[Array, GroupNumbers, GroupNumbers | None]

BLOCK_FORMATS = {
    "Q4_0": GroupFormat(Code.SIGNED, 4, 32),
    "Q4_1": GroupFormat(Code.UNSIGNED, 4, 32, Offset.MINIMUM),
    "Q5_0": GroupFormat(Code.SIGNED, 5, 32),
    "Q5_1": GroupFormat(Code.UNSIGNED, 5, 32, Offset.MINIMUM),
    "Q8_0": GroupFormat(Code.SIGNED, 8, 32),
    "Q4_K": GroupFormat(Code.UNSIGNED, 4, 32, Offset.MINIMUM, nested=256),
    "Q5_K": GroupFormat(Code.UNSIGNED, 5, 32, Offset.MINIMUM, nested=256),
    "Q6_K": GroupFormat(Code.SIGNED, 6, 16, nested=256),
}
"""GGUF's types that `open_blocks` reads, by name."""


def open_blocks(data: Array, qtype: str) -> GroupedMatrix:
    """Unpack rows of blocks into one code a weight; every value stays exactly what it is.

    data: uint8 [rows, bytes of a row], whole blocks: a NumPy array, or a tensor where it lies. qtype: a key of
    BLOCK_FORMATS.
    """
    kind = TYPES_BY_NAME[qtype]
    rows = data.shape[0]
    blocks = data.reshape(rows, -1, kind.block_bytes)
    cols = blocks.shape[1] * kind.block_elements
    codes, scales, minima = _OPENERS[qtype](blocks)
    return GroupedMatrix(BLOCK_FORMATS[qtype], (rows, cols), codes.reshape(rows, cols), scales, None, minima)


def cat(*parts: Array) -> Array:
    """Put arrays of one kind side by side, along their last axis."""
    return torch.cat(parts, dim=-1) if _is_tensor(parts[0]) else np.concatenate(parts, axis=-1)


def as_int8(array: Array) -> Array:
    """The same bytes as int8, in one piece."""
    return array.contiguous().view(torch.int8) if _is_tensor(array) else np.ascontiguousarray(array).view(np.int8)


def as_bytes(array: Array) -> Array:
    """The bytes of each number, along the last axis: uint8."""
    if _is_tensor(array):  # flat: a column of one number, transposed, is in one piece, but no view of it has bytes
        return array.flatten().view(torch.uint8).reshape(*array.shape[:-1], -1)
    return np.ascontiguousarray(array).view(np.uint8)


def _half(blocks: Array, start: int) -> Array:
    """The float16 at byte `start` of each block, float32 [rows, blocks]."""
    part = blocks[..., start : start + 2]
    if _is_tensor(part):
        return part.contiguous().view(torch.float16)[..., 0].float()
    return np.ascontiguousarray(part).view("<f2")[..., 0].astype(np.float32)


def _shifted(blocks: Array, shifts: Sequence[int]) -> Array:
    """Bytes shifted right by each of these: uint8 [..., n] -> [..., shifts, n]."""
    by = np.array(shifts, np.uint8)[:, None]
    return blocks[..., None, :] >> (torch.as_tensor(by).to(blocks.device) if _is_tensor(blocks) else by)


def _is_tensor(array: Array) -> bool:
    return isinstance(array, torch.Tensor)


def nibbles(packed: Array) -> Array:
    """uint8 [..., n] -> [..., 2 n]: all low nibbles, then all high ones."""
    return cat(packed & 15, packed >> 4)


def _fifth_bits(blocks: Array, start: int) -> Array:
    """16 where bit i of the 32 at byte `start` is set: uint8 [rows, blocks, 32]."""
    bits = _shifted(blocks[..., start : start + 4, None], range(8)) & 1
    return (bits << 4).reshape(*blocks.shape[:-1], 32)


def _signed(codes: Array, middle: int) -> Array:
    return as_int8(codes) - middle


def _q4_0(blocks: Array) -> _Opened:
    return _signed(nibbles(blocks[..., 2:]), 8), GroupNumbers(_half(blocks, 0)), None


def _q4_1(blocks: Array) -> _Opened:
    return nibbles(blocks[..., 4:]), GroupNumbers(_half(blocks, 0)), GroupNumbers(-_half(blocks, 2))


def _q5_0(blocks: Array) -> _Opened:
    codes = nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _signed(codes, 16), GroupNumbers(_half(blocks, 0)), None


def _q5_1(blocks: Array) -> _Opened:
    codes = nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return codes, GroupNumbers(_half(blocks, 0)), GroupNumbers(-_half(blocks, 2))


def _q8_0(blocks: Array) -> _Opened:
    return as_int8(blocks[..., 2:]), GroupNumbers(_half(blocks, 0)), None


def _k_quant(blocks: Array, codes: Array) -> _Opened:
    """With six-bit steps of eight scales and minima, in the 12 bytes from byte 4."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = cat(first & 63, third & 15 | first >> 6 << 4).reshape(len(blocks), -1)
    minima = cat(second & 63, third >> 4 | second >> 6 << 4).reshape(len(blocks), -1)
    return codes, GroupNumbers(_half(blocks, 0), scales), GroupNumbers(_half(blocks, 2), minima)


def _chunks(packed: Array) -> Array:
    """128 bytes a block, in chunks of 32 whose low nibbles come before their high ones: [rows, blocks, 8, 32]."""
    rows, blocks = packed.shape[:2]
    return nibbles(packed.reshape(rows, blocks, 4, 32)).reshape(rows, blocks, 8, 32)


def _q4_k(blocks: Array) -> _Opened:
    return _k_quant(blocks, _chunks(blocks[..., 16:]))


def _q5_k(blocks: Array) -> _Opened:
    fifth = _shifted(blocks[..., 16:48], range(8)) & 1
    return _k_quant(blocks, _chunks(blocks[..., 48:]) | fifth << 4)


def _q6_k(blocks: Array) -> _Opened:
    rows, count = blocks.shape[:2]
    low = nibbles(blocks[..., :128].reshape(rows, count, 2, 64)).reshape(rows, count, 2, 4, 32)
    high = _shifted(blocks[..., 128:192].reshape(rows, count, 2, 32), (0, 2, 4, 6)) & 3
    steps = as_int8(blocks[..., 192:208]).reshape(rows, -1)
    return _signed(low | high << 4, 32), GroupNumbers(_half(blocks, 208), steps), None


_OPENERS: dict[str, Callable[[Array], _Opened]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
