"""Blocks of 32 columns for matrices in groups that no GGUF type holds.

G4Z  d fp16, zero point uint8, 16 bytes of nibbles as in Q4_0    d * (q - zero point)
G8   d, m float32, 32 int8                                       d * q + m
GF8  d float32, 32 e4m3                                          d * q
"""

import numpy as np
import numpy.typing as npt

from onewave.base.blocks import nibbles
from onewave.base.grouped import Code, GroupedMatrix, GroupFormat, GroupNumbers, Offset

_Bytes = npt.NDArray[np.uint8]

OWN_BLOCK_BYTES = {"G4Z": 19, "G8": 40, "GF8": 36}
"""Bytes of a block of 32 columns."""
BLOCK = 32


def open_own_blocks(data: _Bytes, qtype: str) -> GroupedMatrix:
    """Unpack rows of blocks. data: uint8 [rows, bytes of a row]. qtype: a key of OWN_BLOCK_BYTES."""
    rows = data.shape[0]
    blocks = data.reshape(rows, -1, OWN_BLOCK_BYTES[qtype])
    shape = (rows, blocks.shape[1] * BLOCK)

    def numbers(first: int, kind: str) -> GroupNumbers:
        part = np.ascontiguousarray(blocks[..., first : first + np.dtype(kind).itemsize])
        return GroupNumbers(part.view(kind)[..., 0].astype(np.float32))

    if qtype == "G4Z":
        form = GroupFormat(Code.UNSIGNED, 4, BLOCK, Offset.ZERO_POINT)
        return GroupedMatrix(form, shape, nibbles(blocks[..., 3:]).reshape(shape), numbers(0, "<f2"), blocks[..., 2])
    if qtype == "GF8":
        form = GroupFormat(Code.E4M3, 8, BLOCK, number="F32")
        return GroupedMatrix(form, shape, blocks[..., 4:].reshape(shape), numbers(0, "<f4"))
    form = GroupFormat(Code.SIGNED, 8, BLOCK, Offset.MINIMUM, number="F32")
    codes = np.ascontiguousarray(blocks[..., 8:]).view(np.int8).reshape(shape)
    return GroupedMatrix(form, shape, codes, numbers(0, "<f4"), None, GroupNumbers(-numbers(4, "<f4").base))
