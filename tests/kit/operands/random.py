"""Random numbers that are the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of a shape, drawn in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def randn_half(*shape: int, seed: int = 0) -> Tensor:
    """The same in float16."""
    return randn(*shape, seed=seed, dtype=torch.float16)
