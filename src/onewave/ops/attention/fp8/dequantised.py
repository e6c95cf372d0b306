"""Attention in float8 by dequantised copies: by attention's own choice, or in float32 by the reference."""

import torch
from torch import Tensor

from onewave.ops.attention.call import AttentionCall
from onewave.ops.attention.fp8.call import Fp8Call
from onewave.ops.attention.op import run as run_attention
from onewave.ops.attention.plan import AttentionChoice


def run(call: Fp8Call, choice: AttentionChoice) -> Tensor:
    """Return the output; write call.lse."""
    exact = call.backend == "reference"
    # float16 would not hold what legal scales make of float8.
    dtype = torch.float32 if exact or call.on_cpu else torch.bfloat16
    tensors = (call.q, call.k, call.v)
    q, k, v = (_dequantised(t, s, dtype) for t, s in zip(tensors, call.filled_scales(), strict=True))
    backend = "reference" if exact else "auto"
    inner = AttentionCall(q, k, v, call.extras, call.options, backend, call.packed, None, call.lse)
    return run_attention(inner).to(call.out_dtype)


def _dequantised(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # [heads] beside [.., heads, seq, head_dim] or [tokens, heads, head_dim].
    shape = (-1, 1, 1) if tensor.ndim == 4 else (-1, 1)
    return (tensor.float() * scale.view(shape)).to(dtype)
