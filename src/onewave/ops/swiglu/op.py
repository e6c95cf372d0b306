"""SwiGLU: the gate of the feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops.swiglu import reference

__all__ = ["swiglu"]


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row times its second half.

    gate_up: [tokens, 2 * intermediate] bf16|fp16|fp32, contiguous. Returns [tokens, intermediate], same dtype.
    Computed in float32 and rounded once. Raises ShapeError. Source: Shazeer 2020, arXiv:2002.05202.
    """
    if gate_up.shape[-1] % 2:
        raise ShapeError("swiglu: last axis", got=str(gate_up.shape[-1]), allowed="an even length (gate then up)")
    if gate_up.is_cuda:
        from onewave.ops.swiglu import triton_impl

        return triton_impl.swiglu(gate_up)
    if gate_up.dtype is torch.float32:
        from onewave.ops.swiglu import numba_impl

        return numba_impl.swiglu(gate_up)
    return reference.swiglu(gate_up)
