"""RMSNorm, alone and fused with the residual addition before it."""

from types import ModuleType

import torch
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.backends import implementation, load
from onewave.ops.library import is_watched, register
from onewave.ops.prepared import prepared

_CUDA_DTYPES = checks.FLOATS[:3]


@prepared
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit RMS, then multiply by weight.

    x: [..., hidden] bf16|fp16|fp32 (float64 on a CPU). weight: [hidden], one of these dtypes.
    Returns x's shape in the weight's dtype. Sums in float32; rounds to that dtype before the weight multiply, as Llama
    does. Raises ShapeError, UnsupportedError, InvalidArgumentError (eps).
    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    eps = _check("rms_norm", x, weight, eps)
    if is_watched(x, weight):
        return torch.ops.onewave.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


@prepared
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise: one pass over both.

    x, residual: [..., hidden], residual in x's dtype or float32. weight: [hidden], as of rms_norm.
    Returns (normed, x + residual), both of x's shape: normed in the weight's dtype, the sum in the residual's,
    rounded before it is normalised. Raises as rms_norm.
    """
    eps = check_added(x, residual, weight, eps)
    if is_watched(x, residual, weight):
        return torch.ops.onewave.add_rms_norm(x, residual, weight, eps)
    return _add_rms_norm(x, residual, weight, eps)


def check_added(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> float:
    """Check what add_rms_norm takes; return eps, of whatever kind of number. Raises as add_rms_norm."""
    eps = _check("add_rms_norm", x, weight, eps)
    checks.tensors("add_rms_norm", residual=residual)
    checks.shape("add_rms_norm", "residual", residual, tuple(x.shape))
    if residual.dtype not in (x.dtype, torch.float32) or residual.device != x.device:
        got = f"{residual.dtype} on {residual.device}"
        allowed = f"{x.dtype} or float32 on {x.device}"
        raise UnsupportedError("add_rms_norm: residual", got=got, allowed=allowed)
    return eps


def _check(name: str, x: Tensor, weight: Tensor, eps: float) -> float:
    """eps, of whatever kind of number."""
    checks.tensors(name, x=x, weight=weight)
    checks.eps(name, eps)
    shape = x.shape
    if len(shape) == 0 or shape[-1] == 0 or weight.shape != shape[-1:]:
        got = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        raise ShapeError(f"{name}: shapes", got=got, allowed="x [.., hidden] and weight [hidden], hidden at least 1")
    if x.is_cpu and weight.is_cpu and x.dtype is weight.dtype is torch.float32:
        return float(eps)
    taken = _CUDA_DTYPES if x.is_cuda else checks.FLOATS
    if x.dtype not in taken or weight.dtype not in taken or weight.device != x.device:
        got = f"{x.dtype} on {x.device} and {weight.dtype} on {weight.device}"
        raise UnsupportedError(f"{name}: x, weight", got=got, allowed="bfloat16, float16 or float32 on one device")
    return float(eps)


def _implementation(weight: Tensor, *others: Tensor) -> ModuleType:
    """The compiled loops of a CPU read one dtype."""
    if not weight.is_cuda:
        for other in others:
            if other.dtype is not weight.dtype:
                return load("rms_norm", "reference")
    return implementation("rms_norm", weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _implementation(weight, x).rms_norm(x, weight.contiguous(), eps)


def _fake_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=weight.dtype, device=x.device)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _implementation(weight, x, residual).add_rms_norm(x, residual, weight.contiguous(), eps)


def _fake_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    return out, torch.empty(x.shape, dtype=residual.dtype, device=x.device)


register("rms_norm", _rms_norm, _fake_rms_norm)
register("add_rms_norm", _add_rms_norm, _fake_add_rms_norm)
