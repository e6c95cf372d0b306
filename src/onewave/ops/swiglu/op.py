"""SwiGLU: the gate of the feed-forward block."""

from __future__ import annotations

from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops.backends import implementation

__all__ = ["swiglu"]


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row times its second half.

    gate_up: [tokens, 2 * intermediate] bf16|fp16|fp32, contiguous. Returns [tokens, intermediate], same dtype.
    Computed in float32 and rounded once. Raises ShapeError. Source: Shazeer 2020, arXiv:2002.05202.
    """
    if gate_up.shape[-1] % 2:
        raise ShapeError("swiglu: last axis", got=str(gate_up.shape[-1]), allowed="an even length (gate then up)")
    return implementation("swiglu", gate_up).swiglu(gate_up)
