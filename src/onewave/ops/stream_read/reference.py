"""The reference of `stream_read`, in plain PyTorch."""

import torch
from torch import Tensor


def stream_read(buffer: Tensor) -> Tensor:
    """The sum of all elements modulo 2^32, int32 [1]."""
    return buffer.sum(dtype=torch.int64, dim=0, keepdim=True).to(torch.int32)
