"""What `ffn` means, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from onewave.ops.library import outside_autocast


@outside_autocast
def ffn(x: Tensor, w_up: Tensor, w_down: Tensor, w_gate: Tensor | None, activation: str | None) -> Tensor:
    """down(f(gate x) * up x), or down(f(up x)) without a gate; each product rounded to x's dtype."""
    up = F.linear(x, w_up)
    inner = up if w_gate is None else F.linear(x, w_gate)
    if activation == "silu":
        inner = F.silu(inner)
    elif activation == "gelu":
        inner = F.gelu(inner)
    return F.linear(inner if w_gate is None else inner * up, w_down)
