"""A plain model with the very weights of a wave that holds them rounded to one byte, kept in the model's dtype.

Nothing is saved by that: it lets other decode paths, and a CPU, run the same model. As in a stream the gains of the
norms before qkv, gate_up and the head are multiplied into these matrices and rounded with them, and the head is a
matrix of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.base.rounding import restore_rows, round_rows
from onewave.base.weight_formats import Rounding
from onewave.models.llama import LayerWeights, LlamaWeights, MatrixWeight
from onewave.ops.linear import pack_dense

# Of float32 rows that are rounded together.
_WORKING_BYTES = 64 << 20


@torch.inference_mode()
def round_weights(weights: LlamaWeights, rounding: Rounding) -> LlamaWeights:
    """Round every matrix but the embedding, in place, and return the model's new weights.

    A value is its byte's times its row's scale, rounded once to the matrix's dtype. Raises UnsupportedError for packed
    matrices.
    """
    ones = torch.ones_like(weights.norm)
    layers = tuple(_rounded_layer(layer, rounding, ones) for layer in weights.layers)
    head = _dense(weights.head)
    if weights.head is weights.embedding:
        head = head.clone()
    _round(head, weights.norm, rounding)
    return LlamaWeights(weights.embedding, layers, ones, head)


def tile_weights(weights: LlamaWeights) -> LlamaWeights:
    """The same matrices as a CPU multiplies them in float32 (ops.linear.pack_dense), so that a row's bits do not depend
    on the rows beside it. Raises UnsupportedError for packed matrices."""
    layers = tuple(
        replace(
            layer,
            qkv=pack_dense(_dense(layer.qkv)),
            o=pack_dense(_dense(layer.o)),
            gate_up=pack_dense(_dense(layer.gate_up)),
            down=pack_dense(_dense(layer.down)),
        )
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=pack_dense(_dense(weights.head)))


def _rounded_layer(layer: LayerWeights, rounding: Rounding, ones: Tensor) -> LayerWeights:
    _round(_dense(layer.qkv), layer.input_norm, rounding)
    _round(_dense(layer.o), None, rounding)
    _round(_dense(layer.gate_up), layer.post_norm, rounding)
    _round(_dense(layer.down), None, rounding)
    return replace(layer, input_norm=ones, post_norm=ones)


def _round(matrix: Tensor, gain: Tensor | None, rounding: Rounding) -> None:
    step = max(1, _WORKING_BYTES // (4 * matrix.shape[1]))
    for first in range(0, len(matrix), step):
        rows = matrix[first : first + step]
        wide = rows.float() if gain is None else rows.float() * gain.float()
        rows.copy_(restore_rows(*round_rows(wide, rounding), rounding, matrix.dtype))


def _dense(weight: MatrixWeight) -> Tensor:
    if not isinstance(weight, Tensor):
        raise UnsupportedError("quantization", got="packed weights", allowed="plain ones")
    return weight
