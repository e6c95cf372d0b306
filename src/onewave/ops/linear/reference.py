"""The reference of `linear`, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.ops.linear.packed import PackedWeight


def linear(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x W^T + bias."""
    dense = weight.dequantize().to(x.dtype) if isinstance(weight, PackedWeight) else weight
    if out_dtype is torch.float32:
        return F.linear(x.float(), dense.float(), None if bias is None else bias.float())
    return F.linear(x, dense, bias).to(out_dtype or x.dtype)
