"""What `decode_attention` means, one row at a time."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, empty_like

__all__ = ["decode_attention"]


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """One query a row over that row's own keys; reads slots and seq_lens on the host."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads = k_cache.shape[1]
    out = empty_like(q)
    for row in range(len(q)):
        slot, length = int(slots[row]), int(seq_lens[row])
        start = 0 if window is None else max(0, length - window)
        # The query heads that share a KV head become the rows of one small attention: K and V are read once.
        grouped = q[row].view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        keys, values = k_cache[slot, None, :, start:length], v_cache[slot, None, :, start:length]
        out[row] = F.scaled_dot_product_attention(grouped, keys, values, scale=scale).view(num_heads, head_dim)
    return out
