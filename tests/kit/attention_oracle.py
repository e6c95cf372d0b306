"""Attention once more, written apart from the package: one mask and one bias matrix, heads repeated, plain softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def oracle(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) in q's own dtype: float64 for the truth, a low dtype for PyTorch's own error."""
    heads, num_queries, head_dim = q.shape[1:]
    groups, num_keys = heads // k.shape[1], k.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = options.get("scale")
    scores = q @ k.transpose(-1, -2) * (head_dim**-0.5 if scale is None else scale)
    softcap = options.get("softcap")
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    i, j = torch.arange(num_queries, device=q.device)[:, None], torch.arange(num_keys, device=q.device)[None]
    offset = 0 if options.get("align") == "top-left" else num_keys - num_queries
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        slopes = slopes[None] if slopes.ndim == 1 else slopes
        scores = scores - (slopes[..., None, None] * (i + offset - j).abs()).to(q.dtype)
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
    if options.get("causal"):
        allowed &= j <= i + offset
    window = options.get("window")
    if isinstance(window, int):
        allowed &= j > i + offset - window
    elif window is not None:
        allowed &= (j >= i + offset - window[0]) if window[0] >= 0 else True
        allowed &= (j <= i + offset + window[1]) if window[1] >= 0 else True
    bias = options.get("bias")
    if bias is not None and bias.dtype is torch.bool:
        allowed = allowed & bias
    elif bias is not None:
        allowed = allowed & (bias > float("-inf"))
        scores = scores + bias.to(q.dtype)
    scores = scores.masked_fill(~allowed, float("-inf"))
    sinks = options.get("sinks")
    columns = [scores]
    if sinks is not None:
        columns.append(sinks.to(q.dtype)[None, :, None, None].expand(q.shape[0], -1, num_queries, 1))
    logits = torch.cat(columns, -1)
    blind = (
        (~allowed).all(-1).expand(scores.shape[:-1]) if num_keys else torch.ones_like(scores[..., :0].sum(-1)).bool()
    )
    weights = logits.softmax(-1)[..., :num_keys] if logits.shape[-1] else logits
    # Keys that no row of a head sees may hold NaN.
    dead = (~allowed).expand(scores.shape).all(-2)
    out = weights.masked_fill(blind[..., None], 0.0) @ v.masked_fill(dead[..., None], 0.0)
    return out, logits.logsumexp(-1).masked_fill(blind, float("-inf"))


def within_rule(out: Tensor, exact: Tensor, baseline: Tensor) -> bool:
    """The operators' rule: at most twice PyTorch's own error at the same dtype, and no NaN."""
    if out.numel() == 0:
        return out.shape == exact.shape
    error = (out.double() - exact).abs().max().item()
    return error <= 2 * (baseline.double() - exact).abs().max().item() + 1e-5
