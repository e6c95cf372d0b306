"""The reference of `quantize_rows`, in plain PyTorch."""

import torch
from torch import Tensor

from onewave.base.rounding import divided
from onewave.ops.choice import Choice
from onewave.ops.quantize_rows.choose import QuantizeCall
from onewave.ops.swiglu import swiglu

LARGEST = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}
"""A row's largest magnitude over its scale: half of the codes' range."""
_LOWEST = {torch.int8: -128.0, torch.float8_e4m3fn: -448.0}
_HIGHEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
EMPTY_SCALE = torch.finfo(torch.float32).eps
"""The scale of a row of zeros."""
SMALLEST_SCALE = 2.0**-100
"""Below it a row counts as one of zeros: kernels divide exactly from here on."""


def run(call: QuantizeCall, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return (codes, scale)."""
    x = (swiglu(call.x) if call.swiglu else call.x).float()
    scale = call.scale
    if scale is None:
        largest = x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(len(x))
        scale = divided(largest, LARGEST[call.dtype])
        scale = torch.where(scale < SMALLEST_SCALE, EMPTY_SCALE, scale)
    # Zeros lose their sign, as they do in the kernel.
    values = (x / scale.reshape(-1, 1) + 0.0).clamp(_LOWEST[call.dtype], _HIGHEST[call.dtype])
    if call.dtype is torch.int8:
        # NaN has no int8; the row's scale is NaN then, and so are its products.
        values = values.nan_to_num(0.0).round()
    return values.to(call.dtype), scale
