"""Products with a matrix that lies in a wave's stream. Tiles are read where they lie by as many tokens as
choose.max_tile_tokens says. Other products have the matrix unpacked into a buffer that the next one reuses, or take it
from among those that are kept. Bits are the same, except that unpacking rounds weights of one-byte tiles
(packed_kernel.py)."""

import torch
from torch import Tensor

from onewave.base.device import device_of
from onewave.ops.backends import load
from onewave.ops.linear.choose import CompactChoice, PackedChoice, choose_in_stream
from onewave.ops.linear.op import linear as linear_of_tensor
from onewave.ops.linear.op import linear_swiglu as linear_swiglu_of_tensor
from onewave.wave.weights.pack import StreamMatrix


def linear(x: Tensor, matrix: StreamMatrix, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """`linear`, as of the plain matrix."""
    choice = _choice(x, matrix, out_dtype)
    if choice is not None:
        return load("linear", choice.module).run(x, matrix.tiles, bias, out_dtype, choice)
    whole = matrix.stream.kept(matrix) if x.shape[1] % 8 == 0 else None
    if whole is not None:  # by our product, which gives parts the bits of the whole
        return linear_of_tensor(x, whole, bias, out_dtype)
    out: Tensor | None = None
    for first, rows in matrix.parts():
        last = first + rows.shape[0]
        part = linear_of_tensor(x, rows, None if bias is None else bias[first:last], out_dtype)
        if last - first == matrix.shape[0]:
            return part
        if out is None:
            out = part.new_empty(x.shape[0], matrix.shape[0])
        out[:, first:last] = part
    assert out is not None
    return out


def linear_swiglu(x: Tensor, matrix: StreamMatrix, bias: Tensor | None) -> Tensor:
    """`linear_swiglu`, as of the plain matrix. Its rows take turns in the stream, gate and gated."""
    choice = _choice(x, matrix, None, gated=True)
    if choice is not None:
        return load("linear", choice.module).run(x, matrix.tiles, bias, None, choice)
    return linear_swiglu_of_tensor(x, matrix.dense(), bias)


def kept(matrix: StreamMatrix) -> Tensor | None:
    """Return the matrix where it is kept unpacked, for operators that take nothing else."""
    return matrix.stream.kept(matrix)


def _choice(
    x: Tensor, matrix: StreamMatrix, out_dtype: torch.dtype | None, *, gated: bool = False
) -> CompactChoice | PackedChoice | None:
    """Choose the kernel that runs from the tiles; None where the matrix is unpacked."""
    tiles = None if matrix.stream.keeping else matrix.tiles
    if tiles is None or not x.is_cuda or (matrix.count > 1 and not gated):
        return None
    tile = (tiles.form, matrix.stream.shape.rows, matrix.stream.shape.images)
    return choose_in_stream(x, tiles.rows, tile, out_dtype, device_of(x.device), gated=gated)
