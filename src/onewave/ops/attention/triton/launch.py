"""Launch the portable kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onewave.gpu.launch import launch_kernel
from onewave.ops.attention.call import AttentionCall
from onewave.ops.attention.plan import AttentionChoice
from onewave.ops.attention.triton.kernel import attention_kernel


def run(call: AttentionCall, choice: AttentionChoice) -> Tensor:
    """Write and return the output, and call.lse."""
    result = call.output()
    out, lse, q, k, v = call.rows(result)
    if q.numel() == 0:
        return result
    num_heads, num_queries, head_dim = q.shape[1:]
    num_kv_heads, num_keys = k.shape[1:3]
    wanted, packed, sinks, (_, slopes, bias) = call.options, call.packed, call.dense_sinks, call.extras
    ragged, shift = packed is not None, wanted.shift(num_queries, num_keys)
    if wanted.right is not None and not ragged:
        num_keys = min(num_keys, num_queries + shift + wanted.right)
        k, v = k[:, :, :num_keys], v[:, :, :num_keys]
    if choice.descriptors and wanted.left is not None and not ragged:
        first = max(0, shift - wanted.sides[0])
        k, v = k[:, :, first:], v[:, :, first:]
    is_bool = bias is not None and bias.dtype is torch.bool
    if bias is not None:
        bias = bias.view((1,) * (4 - bias.ndim) + bias.shape)
        bias = bias.view(torch.uint8) if is_bool else bias
    slopes = slopes[None] if slopes is not None and slopes.ndim == 1 else slopes
    keys_and_values = (_descriptor(x, choice.block_n, choice.width) for x in (k, v)) if choice.descriptors else (k, v)
    launch_kernel(
        attention_kernel, (choice.num_programs,),
        q, *keys_and_values, out, lse, sinks, slopes, bias, *call.starts,
        *(tensor.stride()[:3] for tensor in (q, k, v, out)), (0, 0, 0) if lse is None else lse.stride(),
        _broadcast_strides(slopes, 2), _broadcast_strides(bias, 4),
        num_heads, num_heads // num_kv_heads, num_queries if packed is None else packed.max_seqlen_q, num_keys,
        choice.tiles, shift, *wanted.sides, *wanted.factors,
        PACK=choice.packed_heads, HEAD_DIM=head_dim, WIDTH=choice.width, BLOCK_M=choice.block_m, BLOCK_N=choice.block_n,
        TMA=choice.descriptors, ALIBI=slopes is not None, BIAS=0 if bias is None else 1 if is_bool else 2,
        POSITIVE=wanted.scale > 0, TAIL=ragged or wanted.right is not None or num_keys % choice.block_n != 0,
        num_warps=choice.num_warps, num_stages=choice.num_stages, **call.flags,
    )  # fmt: skip
    return result


def _broadcast_strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    """Strides with 0 where an axis has one element."""
    if tensor is None:
        return (0,) * axes
    return tuple(0 if n == 1 else step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _descriptor(tensor: Tensor, block_n: int, width: int) -> TensorDescriptor:
    """Describe [batch, heads, keys, head_dim] in tiles of one head's keys."""
    # An axis of one element may have any stride; the descriptor wants an aligned one.
    strides = [tensor.shape[3] if n == 1 else step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    strides[3] = 1
    return TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, block_n, width])
