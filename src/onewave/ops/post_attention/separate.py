"""post_attention as separate launches: products, norms, and SwiGLU in the product that makes what it takes."""

from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.linear.op import linear, linear_of_rows, linear_swiglu
from onewave.ops.post_attention.call import PostAttentionCall
from onewave.ops.quantize_rows import QuantizedRows
from onewave.ops.rms_norm.op import add_rms_norm
from onewave.ops.rms_norm.quantized import add_rms_norm_quantized
from onewave.ops.scaled_linear.matrix import ScaledMatrix
from onewave.ops.swiglu import swiglu


def run(call: PostAttentionCall, choice: Choice | None = None) -> tuple[Tensor | QuantizedRows, Tensor]:
    """Return (normed, residual stream)."""
    weights = call.weights
    update = linear(call.attended, weights.o, weights.o_bias)
    normed, residual = _normed(update, call.residual, weights.post_norm, call.eps, weights.gate_up)
    if isinstance(weights.down, ScaledMatrix):
        gate_up = linear_of_rows(normed, weights.gate_up, weights.gate_up_bias)
        update = weights.down.multiply(gate_up, weights.down_bias, gated=True)
    elif isinstance(normed, QuantizedRows):
        gate_up = linear_of_rows(normed, weights.gate_up, weights.gate_up_bias)
        update = linear(swiglu(gate_up), weights.down, weights.down_bias)
    else:
        update = linear(linear_swiglu(normed, weights.gate_up, weights.gate_up_bias), weights.down, weights.down_bias)
    return _normed(update, residual, weights.next_norm, call.eps, weights.next_matrix)


def _normed(
    update: Tensor, residual: Tensor, gain: Tensor, eps: float, matrix: object
) -> tuple[Tensor | QuantizedRows, Tensor]:
    """add_rms_norm, its rows quantised where the matrix that comes next would do so."""
    codes = matrix.row_codes if isinstance(matrix, ScaledMatrix) else None
    if codes is None:
        return add_rms_norm(update, residual, gain, eps)
    return add_rms_norm_quantized(update, residual, gain, eps, codes)
