"""Random numbers that are the same in every run."""

from functools import partial

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels run: in the interpreter where there is no GPU."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
    """Normal numbers of a shape, drawn in float32 on a CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def randn_on_gpu(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same, drawn on a GPU."""
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


randn_bf16 = partial(randn, dtype=torch.bfloat16)
randn_half = partial(randn, dtype=torch.float16)
randn_here = partial(randn, device=DEVICE)
