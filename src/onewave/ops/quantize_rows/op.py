"""Quantise activations to one byte, by row or with one scale."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.library import is_watched, register
from onewave.ops.prepared import prepared
from onewave.ops.quantize_rows.choose import QuantizeCall, choose


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """The result of quantize_rows for rows of a dtype, each by its own scale."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype


_CODES = (torch.int8, torch.float8_e4m3fn)


@prepared
def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.int8, scale: Tensor | None = None, *, swiglu: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise each row: codes = round(x / scale), clipped; x is about codes * scale.

    x: [rows, cols] bf16|fp16|fp32; with swiglu [rows, 2 * cols], and SwiGLU of it, rounded to x's dtype as `swiglu`
    does, is quantised. dtype: int8 (-128 to 127) or float8_e4m3fn (-448 to 448). scale: float32, one number; None: each
    row's own, its largest magnitude over 127.5 (int8) or 448 (e4m3), 2^-23 where that is below 2^-100.
    Returns (codes [rows, cols], scale: float32 [rows], or the given one). Divides in float32 and rounds once, ties to
    even. A row with a NaN or infinite number gets such a scale, so its products show it. Raises ShapeError,
    UnsupportedError, InvalidArgumentError. Source: compressed-tensors' quantization/utils/helpers.py.
    """
    name = "quantize_rows"
    checks.tensors(name, x=x)
    checks.optional(name, {"scale": scale})
    if x.ndim != 2 or (swiglu and x.shape[1] % 2):
        allowed = "[rows, cols], an even number of columns with swiglu"
        raise ShapeError(f"{name}: x", got=str(tuple(x.shape)), allowed=allowed)
    checks.dtype(name, "x", x.dtype, checks.FLOATS[:3])
    checks.dtype(name, "dtype", dtype, _CODES)
    if scale is not None:
        if scale.numel() != 1:
            raise ShapeError(f"{name}: scale", got=str(tuple(scale.shape)), allowed="one number")
        checks.dtype(name, "scale", scale.dtype, (torch.float32,))
        checks.one_device(name, x, (scale,))
    if is_watched(x, scale):
        codes, scales = torch.ops.onewave.quantize_rows(x, dtype, scale, swiglu)
    else:
        codes, scales = _run(x, dtype, scale, swiglu)
    return codes, scales if scale is None else scale


def _run(x: Tensor, dtype: torch.dtype, scale: Tensor | None, swiglu: bool) -> tuple[Tensor, Tensor]:
    call = QuantizeCall(x, dtype, scale, swiglu)
    choice = choose(call)
    return load("quantize_rows", choice.module).run(call, choice)


def _library(x: Tensor, dtype: torch.dtype, scale: Tensor | None, swiglu: bool) -> tuple[Tensor, Tensor]:
    codes, scales = _run(x, dtype, scale, swiglu)
    return codes, scales if scale is None else scales.clone()


def _fake(x: Tensor, dtype: torch.dtype, scale: Tensor | None, swiglu: bool) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    codes = torch.empty((rows, cols // 2 if swiglu else cols), dtype=dtype, device=x.device)
    return codes, x.new_empty(rows, dtype=torch.float32) if scale is None else torch.empty_like(scale)


register("quantize_rows", _library, _fake)
