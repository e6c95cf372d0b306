"""SwiGLU on the CPU in float32: rows over threads."""
# pyright: basic

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from onewave.ops.numba_math_impl import FAST, exp, floats

__all__ = ["swiglu"]


@njit(inline="always", fastmath=FAST)
def _row(gate_up_at, out_at, width):
    gate, up, out = floats(gate_up_at, width), floats(gate_up_at + width * 4, width), floats(out_at, width)
    for i in range(width):
        out[i] = gate[i] / (np.float32(1.0) + exp(-gate[i])) * up[i]


@njit(cache=True, nogil=True, fastmath=FAST)
def _one_row(gate_up_at, out_at, rows, width):
    _row(gate_up_at, out_at, width)


@njit(cache=True, parallel=True, nogil=True, fastmath=FAST)
def _rows(gate_up_at, out_at, rows, width):
    for row in prange(rows):
        _row(gate_up_at + row * width * 8, out_at + row * width * 4, width)


def swiglu(gate_up: Tensor) -> Tensor:
    """See op.swiglu."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=torch.float32)
    rows = out.numel() // max(1, width)
    kernel = _one_row if rows == 1 else _rows
    kernel(gate_up.data_ptr(), out.data_ptr(), rows, width)
    return out
