"""A step's results on their way to the host, and there."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from onewave.ops.sampling import TokenLogprobs


class HostLogprobs:
    """TokenLogprobs as Python lists."""

    def __init__(self, logprobs: TokenLogprobs) -> None:
        self.sampled: list[float] = to_list(logprobs.sampled)
        self.rank: list[int] = to_list(logprobs.rank)
        self.top: list[list[float]] = to_list(logprobs.top)
        self.top_ids: list[list[int]] = to_list(logprobs.top_ids)


def to_list(tensor: Tensor) -> list[Any]:
    return cast("list[Any]", tensor.tolist())  # pyright: ignore[reportUnknownMemberType] (torch's stub)


def to_pinned(tensor: Tensor) -> Tensor:
    """Start an asynchronous copy to page-locked host memory (PyTorch caches such blocks, so this allocates rarely)."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
