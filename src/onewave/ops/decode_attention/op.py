"""Decode attention: one new token a row against the KV cache."""

from __future__ import annotations

from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops.backends import implementation

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
    """Attend one query a row to the keys its sequence has in the cache, the new one included.

    q: [rows, heads, head_dim]. k_cache, v_cache: [slots, kv_heads, capacity, head_dim]. slots: [rows] int64, the cache
    row of each sequence. seq_lens: [rows] int64, number of keys (>= 1). window: only the last `window` keys count.
    Returns [rows, heads, head_dim] in q's dtype. On CUDA the lengths stay on the device and the keys are split in
    pieces of fixed size summed in a fixed order, so a row's result does not depend on its neighbours.
    Raises ShapeError.
    """
    if q.ndim != 3 or q.shape[1] % k_cache.shape[1] or q.shape[2] != k_cache.shape[3]:
        raise ShapeError(
            "decode_attention: q",
            got=str(tuple(q.shape)),
            allowed=f"[rows, a multiple of {k_cache.shape[1]}, {k_cache.shape[3]}]",
        )
    return implementation("decode_attention", q).decode_attention(
        q, k_cache, v_cache, slots, seq_lens, window=window, scale=scale
    )
