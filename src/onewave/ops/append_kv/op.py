"""Everything between the QKV projection and attention: bias, q/k norm, rotary embedding, KV-cache write."""

from __future__ import annotations

from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops.backends import implementation

__all__ = ["append_kv"]


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
    """Add bias, normalise and rotate q and k, write k and v into the cache, return q.

    qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous. rotary: [tokens, rotary_dim] float32, cosines
    then sines, half-split (NeoX) style. k_cache, v_cache: [slots, num_kv_heads, capacity, head_dim], dtype of qkv.
    slots, positions: [tokens] int64: token i is written to cache[slots[i], :, positions[i]]. bias: [qkv.shape[1]].
    q_norm, k_norm: [head_dim], applied before the rotation (Qwen3). Returns q: [tokens, num_heads, head_dim].
    Rotation is in float32, rounded once. qkv may be overwritten. Raises ShapeError.
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.ndim != 2 or qkv.shape[1] != width:
        raise ShapeError("append_kv: qkv", got=str(tuple(qkv.shape)), allowed=f"[tokens, {width}]")
    return implementation("append_kv", qkv).append_kv(
        qkv,
        rotary,
        k_cache,
        v_cache,
        slots,
        positions,
        num_heads=num_heads,
        bias=bias,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
    )
