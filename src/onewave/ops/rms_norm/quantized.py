"""A residual addition and RMSNorm whose rows are quantised on the way."""

import torch
from torch import Tensor

from onewave.ops.backends import load
from onewave.ops.library import is_watched
from onewave.ops.quantize_rows import QuantizedRows, quantize_rows
from onewave.ops.quantize_rows.choose import QuantizeCall, RowChoice, choose
from onewave.ops.rms_norm.op import add_rms_norm, check_added


def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[QuantizedRows, Tensor]:
    """add_rms_norm, and quantize_rows of what it gives, on a GPU in one pass.

    x, residual: [rows, hidden], weight: [hidden], as of add_rms_norm. dtype: of the codes, int8|float8_e4m3fn, by each
    row's own scale. Returns (quantised rows, x + residual). Squares may be added in another order than in add_rms_norm,
    the same for each row whatever is beside it. Raises as both.
    """
    if x.is_cuda and x.ndim == 2 and not is_watched(x, residual, weight):
        eps = check_added(x, residual, weight, eps)
        if isinstance(choose(QuantizeCall(x, dtype)), RowChoice):
            kernel = load("rms_norm", "triton_impl").add_rms_norm_quantized
            codes, scale, total = kernel(x, residual, weight.contiguous(), eps, dtype)
            return QuantizedRows(codes, scale, weight.dtype), total
    normed, total = add_rms_norm(x, residual, weight, eps)
    return QuantizedRows(*quantize_rows(normed, dtype), weight.dtype), total
