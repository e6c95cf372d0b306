"""Matrices in groups as rows of blocks, the form that a CPU's kernels read."""

import numpy as np
import numpy.typing as npt

from onewave.base.grouped import Code, Floats, GroupedMatrix
from onewave.base.own_blocks import BLOCK
from onewave.base.quantized import QuantizedRows

_Bytes = npt.NDArray[np.uint8]


def nearest_blocks(matrix: GroupedMatrix) -> QuantizedRows | None:
    """Rows of the smallest block type that holds every value exactly; None where groups are no whole blocks."""
    form, (rows, cols) = matrix.format, matrix.shape
    group = form.group or cols
    if cols % BLOCK or group % BLOCK or matrix.minima is not None:
        return None
    blocks = cols // BLOCK
    scales = np.repeat(matrix.scales.expand(), group // BLOCK, axis=1)[:, :blocks]
    codes = matrix.codes.reshape(rows, blocks, BLOCK)
    halves = scales.astype(np.float16)
    in_half = bool((halves.astype(np.float32) == scales).all())
    zeros = None if matrix.zero_points is None else np.repeat(matrix.zero_points, group // BLOCK, axis=1)[:, :blocks]
    if form.code is Code.E4M3:
        kind, parts = "GF8", [_raw(scales), codes]
    elif form.bits == 4 and zeros is None and in_half:
        kind, parts = "Q4_0", [_raw(halves), _packed(np.add(codes, 8, dtype=np.int8).view(np.uint8))]
    elif form.bits == 4 and zeros is not None and form.code is Code.UNSIGNED and in_half:
        kind, parts = "G4Z", [_raw(halves), zeros[..., None].view(np.uint8), _packed(codes.view(np.uint8))]
    elif form.bits == 8 and zeros is None and in_half:
        kind, parts = "Q8_0", [_raw(halves), codes.view(np.uint8)]
    elif zeros is None or form.number != "F32":  # whose products with zero points would be rounded
        middle = 128 if form.code is Code.UNSIGNED and form.bits == 8 else 0
        signed = (codes.astype(np.int16) - middle).astype(np.int8)
        added = np.zeros_like(scales) if zeros is None else (middle - zeros.astype(np.float32)) * scales
        kind, parts = "G8", [_raw(scales), _raw(added), signed.view(np.uint8)]
    else:
        return None
    data: _Bytes = np.concatenate(parts, axis=-1, dtype=np.uint8).reshape(rows, -1)
    return QuantizedRows(kind, data, matrix.shape, matrix.columns)


def _raw(numbers: Floats | npt.NDArray[np.float16]) -> _Bytes:
    """The bytes of each number, [rows, blocks, size]."""
    return np.ascontiguousarray(numbers[..., None]).view(np.uint8)


def _packed(codes: _Bytes) -> _Bytes:
    """Codes 0 to 15 as Q4_0 has them: [rows, blocks, 32] -> [rows, blocks, 16]."""
    return np.bitwise_or(codes[..., :16], np.left_shift(codes[..., 16:], 4))
