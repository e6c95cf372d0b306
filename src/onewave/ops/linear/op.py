"""The matrix product of every projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError, shown
from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.library import is_watched, outside_autocast, refuse_grad, register
from onewave.ops.linear.choose import LinearCall, choose
from onewave.ops.linear.packed import PackedWeight
from onewave.ops.prepared import prepared
from onewave.ops.quantize_rows import QuantizedRows
from onewave.ops.scaled_linear.matrix import ScaledMatrix
from onewave.ops.swiglu import swiglu

if TYPE_CHECKING:
    from onewave.wave.weights.pack import StreamMatrix  # a CPU never imports the wave

LinearWeight = Tensor | PackedWeight | ScaledMatrix


@prepared
def linear(
    x: Tensor, weight: LinearWeight | StreamMatrix, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x W^T + bias.

    x: [tokens, cols] bf16|fp16|fp32|fp64. weight: [rows, cols], a tensor of x's dtype; for float32 on the CPU, a
    PackedWeight; for float32 and 16 bits, a ScaledMatrix, which quantises x. bias: [rows]. Returns [tokens, rows] in
    out_dtype (x's dtype by default). Accumulates in float32 (float64 in float64). On packed and scaled weights, and of
    several tokens on Hopper, a token's result does not depend on the tokens beside it; elsewhere on CUDA it may change
    with their number, never with their values.
    A matrix that lies in a wave's stream is as good as the plain one. Raises ShapeError, UnsupportedError.
    """
    if isinstance(weight, ScaledMatrix):
        checks.tensors("linear", x=x)
        return weight.multiply(x, bias, out_dtype)
    if not isinstance(weight, (Tensor, PackedWeight)):
        return load("linear", "stream").linear(x, weight, bias, out_dtype)
    _check(x, weight, bias, out_dtype)
    if isinstance(weight, PackedWeight):
        if x.dtype is not torch.float32 or not x.is_cpu:
            raise UnsupportedError(
                "linear with packed weights: x", got=f"{x.dtype} on {x.device}", allowed="float32 on cpu"
            )
        if bias is not None and not (bias.is_cpu and bias.is_floating_point()):
            got = f"{bias.dtype} on {bias.device}"
            raise UnsupportedError("linear with packed weights: bias", got=got, allowed="a float dtype on cpu")
        refuse_grad("linear with packed weights", x, bias)
        out: Tensor = load("linear", "numba_impl").linear(x, weight)
        if bias is not None:
            out += bias
        return out if out_dtype is None else out.to(out_dtype)
    if is_watched(x, weight, bias):
        return torch.ops.onewave.linear(x, weight, bias, out_dtype)
    return _dense(x, weight, bias, out_dtype)


def linear_of_rows(
    x: Tensor | QuantizedRows, weight: LinearWeight | StreamMatrix, bias: Tensor | None = None
) -> Tensor:
    """linear, also of rows that a ScaledMatrix has had quantised already (`row_codes`). Raises ShapeError,
    UnsupportedError."""
    if isinstance(x, QuantizedRows):
        assert isinstance(weight, ScaledMatrix)
        return weight.multiply(x, bias)
    return linear(x, weight, bias)


def _check(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    packed = isinstance(weight, PackedWeight)
    checks.tensors("linear", x=x, **({} if packed else {"weight": weight}))
    if bias is not None:
        checks.tensors("linear", bias=bias)
    of_x, of_weight = x.shape, weight.shape
    if len(of_x) != 2 or len(of_weight) != 2 or of_x[1] != of_weight[1]:
        got = f"{tuple(x.shape)}, {tuple(weight.shape)}"
        raise ShapeError("linear: x, weight", got=got, allowed="[tokens, cols] and [rows, cols]")
    if bias is not None:
        checks.shape("linear", "bias", bias, (weight.shape[0],))
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
        raise UnsupportedError("linear: out_dtype", got=shown(out_dtype), allowed="a float dtype, or None")
    if packed:
        return
    checks.dtype("linear", "x", x.dtype, checks.FLOATS)
    _check_like("weight", weight, x)
    if bias is not None:
        _check_like("bias", bias, x)


@prepared
def linear_swiglu(x: Tensor, weight: LinearWeight | StreamMatrix, bias: Tensor | None = None) -> Tensor:
    """SwiGLU of a projection: swiglu(linear(x, weight, bias)), bit for bit, on Hopper in one launch.

    weight: [2 * intermediate, cols], gate rows, then up rows. Returns [tokens, intermediate] in x's dtype. Everything
    else as in linear. Raises ShapeError, UnsupportedError.
    """
    if isinstance(weight, ScaledMatrix):
        return swiglu(linear(x, weight, bias))
    if not isinstance(weight, (Tensor, PackedWeight)):
        return load("linear", "stream").linear_swiglu(x, weight, bias)
    if x.is_cuda and not isinstance(weight, PackedWeight) and weight.ndim == 2 and not is_watched(x, weight, bias):
        call = LinearCall.of(x=x, weight=weight, bias=bias, out_dtype=None, gated=weight.shape[0] % 2 == 0)
        if (choice := choose(call)).module == "hopper.launch" and call.gated:
            _check(x, weight, bias, None)
            return load("linear", choice.module).run(call, choice)
    return swiglu(linear(x, weight, bias))


def _check_like(name: str, other: Tensor, x: Tensor) -> None:
    if other.dtype is not x.dtype or other.device != x.device:
        got = f"{other.dtype} on {other.device}"
        raise UnsupportedError(f"linear: {name}", got=got, allowed=f"{x.dtype} on {x.device}, as x")


@outside_autocast
def _dense(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    call = LinearCall.of(x=x, weight=weight, bias=bias, out_dtype=out_dtype)
    choice = choose(call)
    return load("linear", choice.module).run(call, choice)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype, device=x.device)


register("linear", _dense, _fake)
