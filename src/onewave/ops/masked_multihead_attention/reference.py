"""The reference of `masked_multihead_attention`, in plain PyTorch, one row at a time."""

import torch
from torch import Tensor

from onewave.ops.append_kv.reference import rotate
from onewave.ops.choice import Choice
from onewave.ops.kv_layout import key_rows
from onewave.ops.library import outside_autocast
from onewave.ops.masked_multihead_attention.call import MaskedCall, check_lengths


def run(call: MaskedCall, choice: Choice) -> None:
    """Write call.out and append to the cache."""
    # The lengths are read in any case, and half a batch must not be written before a wrong one is found.
    check_lengths(call)
    assert call.out is not None
    masked_multihead_attention(call.out, call)


@outside_autocast
def masked_multihead_attention(out: Tensor, call: MaskedCall) -> None:
    """Write out [rows, heads, head_dim] and append to the cache; see op.masked_multihead_attention.

    All arithmetic is in float32 (float64 for a float64 cache); q, k and v are rounded to the cache's dtype once, after
    bias and rotation, and the output once. Reads seq_lens on the host.
    """
    qkv, cache_k, cache_v, seq_lens, scale = call.qkv, call.cache_k, call.cache_v, call.seq_lens, call.scale
    fused = call.fused
    bias, src_mask, finished, rotary, qkv_out_scale, out_shift, out_smooth = fused[:7]
    num_kv_heads, head_dim = cache_v.shape[1], cache_v.shape[3]
    num_heads = call.num_heads
    exact = torch.promote_types(cache_v.dtype, torch.float32)
    x = qkv.to(exact).contiguous()  # a product sums in another order where its rows lie apart
    if qkv_out_scale is not None:
        x = x * qkv_out_scale.to(exact)
    if bias is not None:
        x = x + bias.to(exact)
    q, k, v = torch.split(x, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if rotary is not None:
        q, k = rotate(q, rotary, interleaved=fused.interleaved), rotate(k, rotary, interleaved=fused.interleaved)
    q, k, v = (part.to(cache_v.dtype) for part in (q, k, v))
    keys = key_rows(cache_k)
    done: list[bool] = [False] * len(q) if finished is None else finished.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    histories: list[int] = seq_lens.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    for row, history in enumerate(histories):
        if history < 0 or done[row]:
            continue
        keys[row, :, history] = k[row].reshape(num_kv_heads, *keys.shape[3:])
        cache_v[row, :, history] = v[row]
        seen_k = keys[row, :, : history + 1].flatten(2).to(exact)
        seen_v = cache_v[row, :, : history + 1].to(exact)
        scores = q[row].to(exact).reshape(num_kv_heads, -1, head_dim) @ seen_k.transpose(1, 2)
        scores = scores.flatten(0, 1) * (head_dim**-0.5 if scale is None else scale)
        if src_mask is not None:
            scores = scores + src_mask[row, :, 0, : history + 1].to(exact)
        # A head whose mask leaves no key gives 0, not NaN.
        weights = scores.softmax(-1).masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
        mixed = (weights.view(num_kv_heads, -1, history + 1) @ seen_v).flatten(0, 1)
        if out_shift is not None:
            mixed = mixed + out_shift.to(exact)
        if out_smooth is not None:
            mixed = mixed * out_smooth.to(exact)
        if fused.out_scale is not None:
            mixed = quantise(mixed, fused.out_scale, fused.max_bound, fused.min_bound, half_away=fused.half_away)
        out[row] = mixed.to(out.dtype)


def quantise(x: Tensor, scale: float, max_bound: float, min_bound: float, *, half_away: bool) -> Tensor:
    """clip(round(max_bound * scale * x), min_bound, max_bound), products from the left in x's dtype; holds integers."""
    scaled = torch.tensor(max_bound, dtype=x.dtype) * torch.tensor(scale, dtype=x.dtype) * x
    rounded = scaled.round()  # half to even
    if half_away:
        # The fraction decides: adding 0.5 first would round 0.49999997 up.
        whole = scaled.trunc()
        rounded = torch.where((scaled - whole).abs() >= 0.5, whole + scaled.sign(), whole)
    return rounded.clamp(min_bound, max_bound)
