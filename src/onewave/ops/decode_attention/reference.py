"""The reference of `decode_attention`, one row at a time."""

from typing import Any

import torch
from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.decode_attention.caches import cached_rows, check_lengths
from onewave.ops.decode_attention.call import DecodeCall
from onewave.ops.library import outside_autocast


def run(call: DecodeCall, choice: Choice) -> tuple[Tensor, Tensor | None]:
    """Return (out, lse); a row of negative length is left as it is."""
    seq_lens, v_cache = call.seq_lens, call.v_cache
    if call.on_cpu:  # where reading costs little
        check_lengths(
            "decode_attention", seq_lens, call.capacity, call.block_table, v_cache.shape[0], v_cache.shape[2],
            call.visible,
        )  # fmt: skip
    # 16-bit products would round scores, which PyTorch's own attention does not.
    exact = call.q.to(torch.promote_types(call.q.dtype, torch.float32))
    result, result_lse = _over_own_keys(exact, call)
    out, lse = call.output(), call.new_lse() if call.wants_lse and call.lse is None else call.lse
    kept = (seq_lens >= 0)[:, None, None]
    out.copy_(torch.where(kept[..., None], result, out))
    if lse is not None:
        lse.copy_(torch.where(kept, result_lse, lse))
    return out, lse


def decode_attention(*operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a DecodeCall of q, k_cache, v_cache, seq_lens and options, in q's dtype."""
    return _over_own_keys(operands[0], DecodeCall(*operands, **options))


@outside_autocast
def _over_own_keys(q: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Each row over its own keys, in q's dtype with the softmax in at least float32; reads seq_lens on the host."""
    k_cache, v_cache, seq_lens, block_table = call.k_cache, call.v_cache, call.seq_lens, call.block_table
    k_scale, v_scale, sinks = call.k_scale, call.v_scale, call.sinks
    scale, window, softcap = call.scale, call.window, call.softcap
    rows, num_heads, num_queries, head_dim = q.shape
    num_kv_heads = v_cache.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((rows, num_heads, num_queries), float("-inf"), dtype=exact, device=q.device)
    for row, length in enumerate(map(int, seq_lens)):
        if length <= 0:
            continue
        # Keys that no query sees may hold NaN.
        first = 0 if window is None else max(0, length - (num_queries - 1) - window)
        k, v = cached_rows(k_cache, v_cache, row, first, length, block_table)
        k, v = k.to(q.dtype), v.to(q.dtype)
        # The query heads that share a KV head are rows of one product: K and V are read once.
        grouped = q[row].reshape(num_kv_heads, -1, head_dim)
        scores = (grouped @ k.transpose(-1, -2)).to(exact).view(num_heads, num_queries, length - first)
        scores = scores * (head_dim**-0.5 if scale is None else scale)
        if k_scale is not None:
            scores = scores * k_scale.repeat_interleave(num_heads // num_kv_heads)[:, None, None]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        limit = torch.arange(length - num_queries + 1, length + 1, device=q.device)[:, None]
        key = torch.arange(first, length, device=q.device)
        hidden = key >= limit
        if window is not None:
            hidden |= key < limit - window
        scores = scores.masked_fill(hidden, float("-inf"))
        norm = (
            scores
            if sinks is None
            else torch.cat((scores, sinks.to(exact)[:, None, None].expand(-1, num_queries, 1)), -1)
        )
        empty = hidden.all(-1)
        lse[row] = norm.logsumexp(-1).masked_fill(empty, float("-inf"))
        weights = norm.softmax(-1)[..., : length - first].masked_fill(empty[:, None], 0.0)
        mixed = weights.to(q.dtype).view(num_kv_heads, -1, length - first) @ v
        if v_scale is not None:
            mixed = mixed * v_scale[:, None, None].to(q.dtype)
        out[row] = mixed.view(num_heads, num_queries, head_dim)
    return out, lse.float() if exact is torch.float32 else lse
