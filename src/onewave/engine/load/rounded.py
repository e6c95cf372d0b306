"""A plain model with the very weights of a wave that holds them rounded, kept in the model's dtype.

Nothing is saved by that: it lets other decode paths, and a CPU, run the same model. As in a stream the gains of the
norms before qkv, gate_up and the head are multiplied into these matrices and rounded with them, and the head is a
matrix of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from onewave.base.group_rounding import rounded
from onewave.base.weight_formats import Rounding
from onewave.models.llama import MATRICES, NORMS, LayerWeights, LlamaWeights, plain
from onewave.ops.linear import pack_dense

# Of float32 rows that are rounded together.
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


def tile_weights(weights: LlamaWeights) -> LlamaWeights:
    """The same matrices as a CPU multiplies them in float32 (ops.linear.pack_dense), so that a row's bits do not depend
    on the rows beside it. Raises UnsupportedError for packed matrices."""
    layers = tuple(
        replace(layer, **{name: pack_dense(_matrix(layer, name)) for name in MATRICES}) for layer in weights.layers
    )
    return replace(weights, layers=layers, head=pack_dense(plain(weights.head, "quantization")))


def _rounded_layer(layer: LayerWeights, rounding: Rounding, ones: Tensor) -> LayerWeights:
    for name in MATRICES:
        _round(_matrix(layer, name), getattr(layer, NORMS[name]) if name in NORMS else None, rounding)
    return replace(layer, **dict.fromkeys(NORMS.values(), ones))


def _matrix(layer: LayerWeights, name: str) -> Tensor:
    return plain(getattr(layer, name), "quantization")


def _round(matrix: Tensor, gain: Tensor | None, rounding: Rounding) -> None:
    step = max(1, _WORKING_BYTES // (4 * matrix.shape[1]))
    for first in range(0, len(matrix), step):
        rows = matrix[first : first + step]
        wide = rows.float() if gain is None else rows.float() * gain.float()
        rows.copy_(rounded(wide, rounding, matrix.dtype))
