"""Random operands of attention on a GPU amid NaN, and attention in the low precision itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onewave.ops.attention.masks import options, visible_keys

NAN = float("nan")
LENGTHS = [
    (1, 1), (1, 17), (63, 64), (64, 63), (113, 203), (239, 1), (799, 3), (1023, 1024), (1024, 1023), (640, 128),
    (5, 0), (300, 300), (129, 1000), (1000, 129), (2048, 2048),
]  # fmt: skip
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": (37, 11)},
    {"causal": True, "window": 200},
    {"causal": True, "window": 64, "align": "top-left"},
    {"causal": True, "softcap": 20.0},
    {"sinks": True},
    {"causal": True, "sinks": True, "window": 100, "softcap": 5.0},
    {"window": (300, -1)},
]


def framed(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, tokens_first: bool, scale: float = 1.0) -> Tensor:
    """A random [batch, heads, seq, head_dim] tensor with NaN on all sides, heads inside tokens or outside."""
    batch, heads, length, head_dim = shape
    values = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * scale
    if tokens_first:
        frame = torch.full((batch, length + 9, heads + 1, head_dim + 8), NAN, dtype=dtype, device="cuda")
        view = frame[:, 4 : 4 + length, :heads, :head_dim].transpose(1, 2)
    else:
        frame = torch.full((batch, heads, length + 9, head_dim + 8), NAN, dtype=dtype, device="cuda")
        view = frame[:, :, 4 : 4 + length, :head_dim]
    return view.copy_(values)


def rounded(q: Tensor, k: Tensor, v: Tensor, mask: dict[str, Any]) -> Tensor:
    """Attention in the dtype itself, step by step: what low precision costs."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q @ keys.transpose(-1, -2)).float() * q.shape[3] ** -0.5
    if mask.get("softcap"):
        scores = mask["softcap"] * torch.tanh(scores / mask["softcap"])
    wanted = options(
        "attention", head_dim=q.shape[3], causal=mask.get("causal", False), scale=None, window=mask.get("window"),
        softcap=None, align=mask.get("align", "bottom-right"),
    )  # fmt: skip
    seen = visible_keys(wanted, q.shape[2], k.shape[2], q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if mask.get("sinks") is not None:
        sink = mask["sinks"].float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].nan_to_num(0)
    if seen is not None:
        weights = weights.masked_fill(~seen.any(-1)[:, None], 0)
    return weights.to(q.dtype) @ values
