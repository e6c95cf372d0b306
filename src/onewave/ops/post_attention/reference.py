"""The reference of `post_attention`, in plain PyTorch."""

import torch.nn.functional as F
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.ops.choice import Choice
from onewave.ops.library import outside_autocast
from onewave.ops.post_attention.call import PostAttentionCall, PostAttentionWeights
from onewave.ops.rms_norm.reference import add_rms_norm
from onewave.ops.swiglu.reference import swiglu


def run(call: PostAttentionCall, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return (normed, residual stream)."""
    weights = call.weights
    if not all(isinstance(each, Tensor) for each in (weights.o, weights.gate_up, weights.down)):
        raise UnsupportedError("post_attention (backend=reference)", got="packed weights", allowed="plain tensors")
    return post_attention(call.attended, call.residual, weights, call.eps)


@outside_autocast
def post_attention(
    attended: Tensor, residual: Tensor, weights: PostAttentionWeights, eps: float
) -> tuple[Tensor, Tensor]:
    """Project, add, normalise, multiply by gate and up, SwiGLU, multiply down, add, normalise; every product rounded
    to its operands' dtype."""
    o, gate_up, down = weights.matrices
    normed, residual = add_rms_norm(F.linear(attended, o, weights.o_bias), residual, weights.post_norm, eps)
    hidden = swiglu(F.linear(normed, gate_up, weights.gate_up_bias))
    return add_rms_norm(F.linear(hidden, down, weights.down_bias), residual, weights.next_norm, eps)
