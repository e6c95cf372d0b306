"""What `attention` means: softmax(q k^T * scale + mask) v, written out in float32."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention"]


def attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None) -> Tensor:
    """Causal, bottom-right aligned; see op.attention for shapes."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    groups = q.shape[1] // k.shape[1]
    k32, v32 = (t.float().repeat_interleave(groups, dim=1) for t in (k, v))
    scores = q.float() @ k32.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    query = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
    key = torch.arange(num_keys, device=q.device)[None, :]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v32).to(q.dtype)
