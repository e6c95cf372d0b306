"""masked_multihead_attention on CUDA: decode attention's split-KV kernel with its prologue and epilogue switched on.

One launch computes q, k and v from the projection, appends, attends, merges and quantises. See
decode_attention/split_kv_impl.py.
"""

from __future__ import annotations

from torch import Tensor

from onewave.ops.decode_attention.triton.launch import FusedProjection, launch


def masked_multihead_attention(
    out: Tensor,
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    seq_lens: Tensor,
    *,
    bias: Tensor | None,
    src_mask: Tensor | None,
    finished: Tensor | None,
    rotary: Tensor | None,
    interleaved: bool,
    qkv_out_scale: Tensor | None,
    out_shift: Tensor | None,
    out_smooth: Tensor | None,
    out_scale: float | None,
    half_away: bool,
    max_bound: float,
    min_bound: float,
    scale: float | None,
    steps_per_block: int,
    backend: str = "triton",
) -> None:
    """Write out [rows, heads, head_dim] and the cache; see op.masked_multihead_attention. backend: see launch."""
    mask = None if src_mask is None else src_mask[:, :, 0]
    if mask is not None and mask.shape[2] < cache_v.shape[2]:
        # The kernel holds lengths below the capacity that it is told: it never reads past the mask.
        keys = mask.shape[2]
        cache_k, cache_v = cache_k.narrow(-2, 0, keys), cache_v[:, :, :keys]
    fused = FusedProjection(
        qkv=qkv.contiguous(),
        num_heads=out.shape[1],
        bias=_dense(bias),
        qkv_out_scale=_dense(qkv_out_scale),
        rotary=_dense(rotary),
        interleaved=interleaved,
        finished=_dense(finished),
        src_mask=mask,
        out_shift=_dense(out_shift),
        out_smooth=_dense(out_smooth),
        out_scale=out_scale,
        max_bound=max_bound,
        min_bound=min_bound,
        half_away=half_away,
    )
    launch(
        out[:, :, None], None, None, cache_k, cache_v, seq_lens, block_table=None, k_scale=None, v_scale=None,
        scale=scale, window=None, softcap=None, sinks=None, split_size=None, fused=fused,
        smallest_split=steps_per_block, backend=backend,
    )  # fmt: skip


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
