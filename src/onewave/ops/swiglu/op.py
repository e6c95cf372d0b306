"""SwiGLU: the gate of the feed-forward block."""

import torch
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.backends import implementation
from onewave.ops.library import is_watched, register
from onewave.ops.prepared import prepared


@prepared
def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row times its second half.

    gate_up: [..., 2 * intermediate] bf16|fp16|fp32 (float64 on a CPU). Returns [..., intermediate], same dtype.
    Computed in float32 and rounded once. Raises ShapeError, UnsupportedError. Source: Shazeer 2020, arXiv:2002.05202.
    """
    checks.tensors("swiglu", gate_up=gate_up)
    if gate_up.dtype not in (checks.FLOATS[:3] if gate_up.is_cuda else checks.FLOATS):
        got = f"{gate_up.dtype} on {gate_up.device}"
        raise UnsupportedError("swiglu: dtype", got=got, allowed="bfloat16, float16 or float32 (float64 on a CPU)")
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        raise ShapeError("swiglu: last axis", got=str(tuple(gate_up.shape)), allowed="an even length (gate then up)")
    return torch.ops.onewave.swiglu(gate_up) if is_watched(gate_up) else _swiglu(gate_up)


def _swiglu(gate_up: Tensor) -> Tensor:
    return implementation("swiglu", gate_up).swiglu(gate_up)


def _fake(gate_up: Tensor) -> Tensor:
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


register("swiglu", _swiglu, _fake)
