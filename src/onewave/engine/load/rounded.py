"""A plain model with the very weights of a wave that holds them rounded: in the model's dtype, or as blocks on a CPU.

Nothing is saved by the former: it lets other decode paths run the same model. As in a stream the gains of the norms
before qkv, gate_up and the head are multiplied into these matrices and rounded with them, and the head is a matrix of
its own.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from onewave.base.group_rounding import round_groups, rounded
from onewave.base.grouped import Code, GroupedMatrix, GroupFormat, GroupNumbers
from onewave.base.repack import nearest_blocks
from onewave.base.rounding import round_rows
from onewave.base.weight_formats import (
    NIBBLES,
    ROUNDINGS,
    ROW_ROUNDINGS,
    GroupRounding,
    Rounding,
    RowRounding,
    ScaledFormat,
)
from onewave.models.llama import MATRICES, NORMS, LayerWeights, LlamaWeights, plain
from onewave.ops.linear import PackedWeight, pack, pack_dense
from onewave.ops.scaled_linear import ScaledMatrix, ScaledPart

_FORMATS = {
    "int4": GroupFormat(Code.SIGNED, 4, NIBBLES[128, False].group, number="F32"),
    "int8": GroupFormat(Code.SIGNED, 8, None, number="F32"),
    "fp8": GroupFormat(Code.E4M3, 8, None, number="F32"),
}
assert _FORMATS.keys() == ROUNDINGS.keys()
# Bytes of float32 rows that are rounded together.
_WORKING_BYTES = 64 << 20


@torch.inference_mode()
def round_weights(weights: LlamaWeights, rounding: Rounding) -> LlamaWeights:
    """Round every matrix but the embedding, in place, and return the model's new weights.

    A value is the format's, rounded once to the matrix's dtype. Raises UnsupportedError for packed
    matrices.
    """
    ones = torch.ones_like(weights.norm)
    layers = tuple(_rounded_layer(layer, rounding, ones) for layer in weights.layers)
    head = plain(weights.head, "quantization")
    if weights.head is weights.embedding:
        head = head.clone()
    _round(head, weights.norm, rounding)
    return LlamaWeights(weights.embedding, layers, ones, head)


@torch.inference_mode()
def pack_rounded(weights: LlamaWeights, rounding: Rounding) -> LlamaWeights:
    """The model of `round_weights`, from float32 weights on a CPU, as blocks of codes that it multiplies as they are.

    The embedding becomes 16 bits' rows where it holds the same numbers there. Raises UnsupportedError for packed
    matrices.
    """
    ones = torch.ones_like(weights.norm)

    def layer(one: LayerWeights) -> LayerWeights:
        gains = {name: getattr(one, NORMS[name]) if name in NORMS else None for name in MATRICES}
        packed = {name: _packed(_matrix(one, name), gain, rounding) for name, gain in gains.items()}
        return replace(one, **packed, **dict.fromkeys(NORMS.values(), ones))

    head = _packed(plain(weights.head, "quantization"), weights.norm, rounding)
    embedding = _narrowest(plain(weights.embedding, "quantization"))
    return LlamaWeights(embedding, tuple(layer(one) for one in weights.layers), ones, head)


@torch.inference_mode()
def scale_weights(weights: LlamaWeights, form: ScaledFormat, *, tiled: bool) -> LlamaWeights:
    """The model with its layers' matrices in one byte, a scale a row, whose products round activations by token.

    Norms' gains stay apart, and the embedding and the head as they are, as W8A8 checkpoints have them. tiled: in the
    form of a CPU's kernels, whose sums do not depend on the batch. Raises UnsupportedError for packed matrices.
    """
    rounding = ROW_ROUNDINGS[form.codes]

    def scaled(matrix: Tensor) -> ScaledMatrix:
        parts = [round_rows(rows, rounding) for rows in _steps(matrix, None)]
        codes, scale = (torch.cat([part[which] for part in parts]) for which in range(2))
        kind = torch.int8 if form.codes == "int8" else torch.float8_e4m3fn
        return ScaledMatrix((ScaledPart(codes.view(kind), scale),))

    layers = [replace(one, **{name: scaled(_matrix(one, name)) for name in MATRICES}) for one in weights.layers]
    if not tiled:
        return replace(weights, layers=tuple(layers))
    embedding = _narrowest(plain(weights.embedding, "quantization"))
    tied = weights.head is weights.embedding
    head = embedding if tied else _narrowest(plain(weights.head, "quantization"))
    return replace(weights, embedding=embedding, layers=tuple(layers), head=head)


def _narrowest(table: Tensor) -> PackedWeight:
    """A table in 16 bits if they hold it exactly."""
    for kind in (torch.bfloat16, torch.float16):
        narrow = table.to(kind)
        if torch.equal(narrow.float(), table):
            return pack_dense(narrow)
    return pack_dense(table)


def _packed(matrix: Tensor, gain: Tensor | None, rounding: Rounding) -> PackedWeight:
    parts = [_codes(rows, rounding) for rows in _steps(matrix, gain)]
    codes, scales = (np.concatenate([part[which].numpy() for part in parts]) for which in range(2))
    made = GroupedMatrix(_FORMATS[rounding.name], (matrix.shape[0], matrix.shape[1]), codes, GroupNumbers(scales))
    blocks = nearest_blocks(made)
    return pack_dense(torch.as_tensor(made.dequantize())) if blocks is None else pack(blocks)


def _codes(rows: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Round float32 rows to codes as in _FORMATS and float32 scales [rows, groups]."""
    if isinstance(rounding, GroupRounding):
        made = round_groups(rows, rounding)
        return made.codes.view(torch.int8) - 8, made.scales.float() * made.row_scales[:, None]
    assert isinstance(rounding, RowRounding)
    codes, scales = round_rows(rows, rounding)
    return codes.view(torch.int8) if rounding.name == "int8" else codes, scales[:, None]


def _rounded_layer(layer: LayerWeights, rounding: Rounding, ones: Tensor) -> LayerWeights:
    for name in MATRICES:
        _round(_matrix(layer, name), getattr(layer, NORMS[name]) if name in NORMS else None, rounding)
    return replace(layer, **dict.fromkeys(NORMS.values(), ones))


def _matrix(layer: LayerWeights, name: str) -> Tensor:
    return plain(getattr(layer, name), "quantization")


def _round(matrix: Tensor, gain: Tensor | None, rounding: Rounding) -> None:
    first = 0
    for wide in _steps(matrix, gain):
        matrix[first : first + len(wide)] = rounded(wide, rounding, matrix.dtype)
        first += len(wide)


def _steps(matrix: Tensor, gain: Tensor | None) -> Iterator[Tensor]:
    """Some rows at a time in float32, times the gain of each column."""
    step = max(1, _WORKING_BYTES // (4 * matrix.shape[1]))
    for first in range(0, len(matrix), step):
        rows = matrix[first : first + step].float()
        yield rows if gain is None else rows * gain.float()
