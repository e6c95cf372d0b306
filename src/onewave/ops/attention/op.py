"""Prefill attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attention"]


def attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None) -> Tensor:
    """Causal attention, aligned bottom-right: the last query sees the last key.

    q: [batch, heads, Sq, head_dim]; k, v: [batch, kv_heads, Sk, head_dim], Sk >= Sq, heads a multiple of kv_heads
    (query head h reads KV head h // (heads / kv_heads)). window: each query sees at most this many keys, itself
    included. scale: defaults to 1/sqrt(head_dim). Returns [batch, heads, Sq, head_dim] in q's dtype. Runs PyTorch's
    scaled_dot_product_attention; a mask is built only where the plain causal flag can't say it.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if window is not None and window >= num_keys:
        window = None
    if num_queries == num_keys and window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=num_queries > 1, scale=scale, enable_gqa=grouped)
    query = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
    key = torch.arange(num_keys, device=q.device)[None, :]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
