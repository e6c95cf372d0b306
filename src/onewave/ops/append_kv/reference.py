"""What `append_kv` means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.ops.rms_norm.reference import rms_norm

__all__ = ["append_kv", "rotate"]


def rotate(x: Tensor, rotary: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the leading dimensions of every head by its token's angles, in at least float32.

    x: [tokens, heads, head_dim]. rotary: [tokens, rotary_dim] float32, cosines then sines. Pair i is dimensions i and
    i + rotary_dim / 2, or with interleaved 2i and 2i + 1; dimensions past rotary_dim stay.
    """
    half = rotary.shape[-1] // 2
    cos, sin = rotary[:, None, :half], rotary[:, None, half:]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    turning, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined, rest), dim=-1).to(x.dtype)


def append_kv(
    qkv: Tensor,
    rotary: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Split, add bias, normalise, rotate, write K and V; return the queries."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    if bias is not None:
        qkv = qkv + bias
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    k_cache[slots, :, positions] = rotate(k, rotary)
    v_cache[slots, :, positions] = v
    return rotate(q, rotary)
