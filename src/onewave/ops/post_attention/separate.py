"""post_attention as separate launches: products, norms, and SwiGLU in the product that makes what it takes."""

from __future__ import annotations

from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.linear.op import linear, linear_of_swiglu, linear_swiglu
from onewave.ops.post_attention.call import PostAttentionCall
from onewave.ops.rms_norm.op import add_rms_norm
from onewave.ops.scaled_linear.matrix import ScaledMatrix


def run(call: PostAttentionCall, choice: Choice | None = None) -> tuple[Tensor, Tensor]:
    """Return (normed, residual stream)."""
    weights = call.weights
    update = linear(call.attended, weights.o, weights.o_bias)
    normed, residual = add_rms_norm(update, call.residual, weights.post_norm, call.eps)
    if isinstance(weights.down, ScaledMatrix):
        update = linear_of_swiglu(
            linear(normed, weights.gate_up, weights.gate_up_bias), weights.down, weights.down_bias
        )
    else:
        update = linear(linear_swiglu(normed, weights.gate_up, weights.gate_up_bias), weights.down, weights.down_bias)
    return add_rms_norm(update, residual, weights.next_norm, call.eps)
