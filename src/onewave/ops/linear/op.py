"""The matrix product of every projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops.backends import implementation
from onewave.ops.library import check_optional, check_tensors, is_watched, register
from onewave.ops.linear.packed import PackedWeight

__all__ = ["LinearWeight", "linear"]

LinearWeight = Tensor | PackedWeight


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + bias.

    x: [tokens, cols] bf16|fp16|fp32. weight: [rows, cols], a tensor of x's dtype or, for float32 on the CPU, a
    PackedWeight. bias: [rows]. Returns [tokens, rows] in out_dtype (x's dtype by default). Accumulates in float32. On
    packed weights a token's result does not depend on the tokens beside it; on CUDA it may change with their number,
    never with their values. Raises ShapeError, UnsupportedError.
    """
    check_tensors("linear", x=x)
    check_optional("linear", {"bias": bias})
    if not isinstance(weight, PackedWeight):
        check_tensors("linear", weight=weight)
    if x.ndim != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError("linear: x", got=str(tuple(x.shape)), allowed=f"[tokens, {weight.shape[1]}]")
    if isinstance(weight, PackedWeight):
        if x.dtype != torch.float32 or x.is_cuda:
            raise UnsupportedError(
                "linear with packed weights: x", got=f"{x.dtype} on {x.device}", allowed="float32 on cpu"
            )
        out: Tensor = implementation("linear", x).linear(x, weight)
        if bias is not None:
            out += bias
        return out if out_dtype is None else out.to(out_dtype)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype is not x.dtype or other.device != x.device):
            got = f"{other.dtype} on {other.device}"
            raise UnsupportedError(f"linear: {name}", got=got, allowed=f"{x.dtype} on {x.device}, as x")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError("linear: bias", got=str(tuple(bias.shape)), allowed=f"({weight.shape[0]},)")
    if is_watched(x, weight, bias):
        return torch.ops.onewave.linear(x, weight, bias, out_dtype)
    return _dense(x, weight, bias, out_dtype)


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    if x.is_cuda:
        kernels = implementation("linear", x)
        if kernels.suits(x, weight, out_dtype or x.dtype):
            return kernels.linear(x, weight, bias, out_dtype or x.dtype)
    return F.linear(x, weight, bias).to(out_dtype or x.dtype)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype, device=x.device)


register("linear", _dense, _fake)
