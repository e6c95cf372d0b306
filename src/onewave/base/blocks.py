"""GGUF's blocks of 4 to 8 bits as matrices in groups. Source: ggml's ggml-quants.c, dequantize_row_*."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from onewave.base.gguf_types import TYPES_BY_NAME
from onewave.base.grouped import Code, Codes, Floats, GroupedMatrix, GroupFormat, GroupNumbers, Offset

_Bytes = npt.NDArray[np.uint8]
_Opened = tuple[Codes, GroupNumbers, GroupNumbers | None]

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


def open_blocks(data: _Bytes, qtype: str) -> GroupedMatrix:
    """Unpack rows of blocks into one code a weight; every value stays exactly what it is.

    data: uint8 [rows, bytes of a row], whole blocks. qtype: a key of BLOCK_FORMATS.
    """
    kind = TYPES_BY_NAME[qtype]
    rows = data.shape[0]
    blocks = data.reshape(rows, -1, kind.block_bytes)
    cols = blocks.shape[1] * kind.block_elements
    codes, scales, minima = _OPENERS[qtype](blocks)
    return GroupedMatrix(BLOCK_FORMATS[qtype], (rows, cols), codes.reshape(rows, cols), scales, None, minima)


def _half(blocks: _Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, float32 [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0].astype(np.float32)


def nibbles(packed: _Bytes) -> _Bytes:
    """uint8 [..., n] -> [..., 2 n]: all low nibbles, then all high ones."""
    return np.concatenate((np.bitwise_and(packed, 15), np.right_shift(packed, 4)), axis=-1)


def _fifth_bits(blocks: _Bytes, start: int) -> _Bytes:
    """16 where bit i of the 32 at byte `start` is set: uint8 [rows, blocks, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[..., start : start + 4]).reshape(-1), bitorder="little")
    return np.left_shift(bits, 4).reshape(*blocks.shape[:-1], 32)


def _signed(codes: _Bytes, middle: int) -> npt.NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(middle)


def _q4_0(blocks: _Bytes) -> _Opened:
    return _signed(nibbles(blocks[..., 2:]), 8), GroupNumbers(_half(blocks, 0)), None


def _q4_1(blocks: _Bytes) -> _Opened:
    return nibbles(blocks[..., 4:]), GroupNumbers(_half(blocks, 0)), GroupNumbers(-_half(blocks, 2))


def _q5_0(blocks: _Bytes) -> _Opened:
    codes = nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _signed(codes, 16), GroupNumbers(_half(blocks, 0)), None


def _q5_1(blocks: _Bytes) -> _Opened:
    codes = nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return codes, GroupNumbers(_half(blocks, 0)), GroupNumbers(-_half(blocks, 2))


def _q8_0(blocks: _Bytes) -> _Opened:
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8), GroupNumbers(_half(blocks, 0)), None


def _steps(blocks: _Bytes) -> tuple[_Bytes, _Bytes]:
    """Six-bit steps of eight scales and minima, in the 12 bytes from byte 4: uint8 [rows, groups] each."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales: _Bytes = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1, dtype=np.uint8)
    minima: _Bytes = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1, dtype=np.uint8)
    return scales.reshape(len(blocks), -1), minima.reshape(len(blocks), -1)


def _k_quant(blocks: _Bytes, codes: _Bytes) -> _Opened:
    scales, minima = _steps(blocks)
    return codes, GroupNumbers(_half(blocks, 0), scales), GroupNumbers(_half(blocks, 2), minima)


def _chunks(packed: _Bytes) -> _Bytes:
    """128 bytes a block, in chunks of 32 whose low nibbles come before their high ones: [rows, blocks, 8, 32]."""
    rows, blocks = packed.shape[:2]
    return nibbles(packed.reshape(rows, blocks, 4, 32)).reshape(rows, blocks, 8, 32)


def _q4_k(blocks: _Bytes) -> _Opened:
    return _k_quant(blocks, _chunks(blocks[..., 16:]))


def _q5_k(blocks: _Bytes) -> _Opened:
    fifth = np.right_shift(blocks[..., None, 16:48], np.arange(8, dtype=np.uint8)[:, None])
    codes = np.bitwise_or(_chunks(blocks[..., 48:]), np.left_shift(fifth & 1, 4))
    return _k_quant(blocks, codes)


def _q6_k(blocks: _Bytes) -> _Opened:
    rows, count = blocks.shape[:2]
    low = nibbles(blocks[..., :128].reshape(rows, count, 2, 64)).reshape(rows, count, 2, 4, 32)
    high = blocks[..., 128:192].reshape(rows, count, 2, 1, 32)
    high = np.right_shift(high, np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    steps = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(rows, -1)
    return _signed(np.bitwise_or(low, np.left_shift(high, 4)), 32), GroupNumbers(_half(blocks, 208), steps), None


_OPENERS: dict[str, Callable[[_Bytes], _Opened]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
