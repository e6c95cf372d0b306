"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops.backends import implementation
from onewave.ops.library import is_watched, register

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit RMS, then multiply by weight.

    x: [..., hidden] bf16|fp16|fp32, last axis contiguous. weight: [hidden], x's dtype or a narrower one.
    Returns x's shape in the weight's dtype. Sums in float32; rounds to that dtype before the weight multiply, as Llama
    does. Raises ShapeError. Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    _check(x, weight)
    if is_watched(x, weight):
        return torch.ops.onewave.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise: one pass over both.

    x, residual: [tokens, hidden], contiguous, residual in x's dtype or float32. weight: [hidden], dtype of x.
    Returns (normed, x + residual), both [tokens, hidden]: normed in x's dtype, the sum in the residual's, rounded
    before it is normalised.
    Raises ShapeError.
    """
    _check(x, weight)
    if residual.shape != x.shape:
        raise ShapeError("add_rms_norm: residual", got=str(tuple(residual.shape)), allowed=str(tuple(x.shape)))
    if is_watched(x, residual, weight):
        return torch.ops.onewave.add_rms_norm(x, residual, weight, eps)
    return _add_rms_norm(x, residual, weight, eps)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ShapeError("rms_norm: weight", got=str(tuple(weight.shape)), allowed=f"({x.shape[-1]},)")


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return implementation("rms_norm", weight).rms_norm(x, weight, eps)


def _fake_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=weight.dtype, device=x.device)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return implementation("rms_norm", weight).add_rms_norm(x, residual, weight, eps)


def _fake_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    return out, torch.empty(x.shape, dtype=residual.dtype, device=x.device)


register("rms_norm", _rms_norm, _fake_rms_norm)
register("add_rms_norm", _add_rms_norm, _fake_add_rms_norm)
