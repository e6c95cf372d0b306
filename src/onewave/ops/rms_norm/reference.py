"""The reference of `rms_norm` and `add_rms_norm`, in plain PyTorch."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit RMS in float32, round to weight's dtype, multiply by weight."""
    x32 = x.float()
    unit = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (unit.to(weight.dtype) * weight).contiguous()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual); the sum is rounded to residual's dtype first."""
    total = (x + residual).to(residual.dtype).contiguous()
    return rms_norm(total, weight, eps), total
