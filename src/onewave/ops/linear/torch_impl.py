"""x W^T by PyTorch's matmul."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.linear.choose import LinearCall

# Rows of a 16-bit weight that a CPU widens to float32 at a time.
_ROWS_AT_ONCE = 4096


def run(call: LinearCall, choice: Choice) -> Tensor:
    """Return the product in out_dtype; float32 of 16-bit operands is not rounded to 16 bits on the way."""
    x, weight, bias, out_dtype = call.x, call.weight, call.bias, call.out_dtype
    if out_dtype is not torch.float32 or x.dtype.itemsize > 2:
        return F.linear(x, weight, bias).to(out_dtype or x.dtype)
    if x.is_cuda:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)
    wide = x.float()
    out = wide.new_empty((len(x), len(weight)))
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        out[:, rows] = F.linear(wide, weight[rows].float())
    return out if bias is None else out.add_(bias)
