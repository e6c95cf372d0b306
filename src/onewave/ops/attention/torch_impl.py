"""Attention by PyTorch's scaled_dot_product_attention: what a CPU uses for everything that it can say."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.ops.attention.call import AttentionCall, like
from onewave.ops.attention.masks import Options, visible_keys
from onewave.ops.attention.plan import AttentionChoice
from onewave.ops.library import outside_autocast


def run(call: AttentionCall, choice: AttentionChoice) -> Tensor:
    """Return the output, where PyTorch put it if it lies there as promised."""
    result = attention(call.q, call.k, call.v, call.options, call.extras.bias)
    if call.out is None and result.stride() == like(call.q, device="meta").stride():
        return result
    return call.output().copy_(result)


@outside_autocast
def attention(q: Tensor, k: Tensor, v: Tensor, wanted: Options, bias: Tensor | None = None) -> Tensor:
    """See op.attention; Sq and Sk at least 1, a bias bool or alone and of q's dtype.

    Keys that no query sees are left out, or zeros where a bias hides them, since they may hold NaN, which a mask would
    spread. A mask is built only where the plain causal flag can't say it.
    """
    if torch.empty_like(q, device="meta").stride(-1) != 1:
        q = q.contiguous()  # of queries that overlap: PyTorch's CPU kernel would write its rows over each other
    num_queries, grouped = q.shape[2], q.shape[1] != k.shape[1]
    shift = wanted.shift(num_queries, k.shape[2])
    last_place = shift + num_queries - 1
    bias = None if bias is None else bias.view((1,) * (4 - bias.ndim) + bias.shape)
    first = 0 if wanted.left is None else max(0, shift - wanted.left)
    end = k.shape[2] if wanted.right is None else min(k.shape[2], last_place + wanted.right + 1)
    if end - first < k.shape[2]:
        k, v = k[:, :, first:end], v[:, :, first:end]
        bias = bias if bias is None or bias.shape[3] == 1 else bias[..., first:end]
        shift, last_place = shift - first, last_place - first
    num_keys = k.shape[2]
    # Sides that hide nothing here need no mask.
    right = None if wanted.right is None or shift + wanted.right >= num_keys - 1 else wanted.right
    left = None if wanted.left is None or last_place - wanted.left <= 0 else wanted.left
    if bias is None and left is None and right is None:
        return F.scaled_dot_product_attention(q, k, v, scale=wanted.scale, enable_gqa=grouped)
    # PyTorch's flag aligns top-left, and hides scores before it scales them: -inf, times a scale below 0, is inf.
    if bias is None and left is None and right == 0 and shift == 0 and wanted.scale > 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=wanted.scale, enable_gqa=grouped)
    visible = visible_keys(wanted, num_queries, num_keys, q.device, shift)
    mask = bias if visible is None else visible if bias is None else bias & visible
    if bias is not None and mask is not None:
        unseen = _unseen(mask, k.shape[1])
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=wanted.scale, enable_gqa=grouped)


def _unseen(mask: Tensor, kv_heads: int) -> Tensor:
    """[batch or 1, kv_heads or 1, keys or 1, 1]: keys that a mask, bool or added to the scores, hides from every query
    of a KV head."""
    seen = (mask if mask.dtype is torch.bool else ~torch.isneginf(mask)).any(2)
    if seen.shape[1] > 1:
        seen = seen.reshape(len(seen), kv_heads, -1, seen.shape[2]).any(2)
    return ~seen[..., None]
