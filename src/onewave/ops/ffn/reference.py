"""The reference of `ffn`, in plain PyTorch."""

import torch.nn.functional as F
from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.ffn.call import FFNCall
from onewave.ops.library import outside_autocast


def run(call: FFNCall, choice: Choice) -> Tensor:
    """Return [rows, out]."""
    return ffn(call.x, call.w_up, call.w_down, call.w_gate, call.activation)


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
