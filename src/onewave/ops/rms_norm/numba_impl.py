"""RMSNorm on the CPU in float32: rows over threads, each row twice through the first-level cache."""
# pyright: basic

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from onewave.ops.numba_math_impl import FAST, floats

__all__ = ["add_rms_norm", "rms_norm"]


@njit(inline="always", fastmath=FAST)
def _row(x_at, residual_at, weight_at, out_at, total_at, hidden, eps):
    x, weight, out = floats(x_at, hidden), floats(weight_at, hidden), floats(out_at, hidden)
    if residual_at != 0:
        residual, total = floats(residual_at, hidden), floats(total_at, hidden)
        for i in range(hidden):
            total[i] = x[i] + residual[i]
        x = total
    squares = np.float32(0.0)
    for i in range(hidden):
        squares += x[i] * x[i]
    scale = np.float32(1.0 / np.sqrt(squares / hidden + eps))
    for i in range(hidden):
        out[i] = x[i] * scale * weight[i]


@njit(cache=True, nogil=True, fastmath=FAST)
def _one_row(x_at, residual_at, weight_at, out_at, total_at, rows, hidden, eps):
    _row(x_at, residual_at, weight_at, out_at, total_at, hidden, eps)


@njit(cache=True, parallel=True, nogil=True, fastmath=FAST)
def _rows(x_at, residual_at, weight_at, out_at, total_at, rows, hidden, eps):
    for row in prange(rows):
        at = row * hidden * 4
        _row(x_at + at, residual_at + at if residual_at != 0 else 0, weight_at, out_at + at, total_at + at, hidden, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See op.rms_norm."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, 0, weight, out, 0, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See op.add_rms_norm."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual.data_ptr(), weight, out, total.data_ptr(), eps)
    return out, total


def _launch(x: Tensor, residual_at: int, weight: Tensor, out: Tensor, total_at: int, eps: float) -> None:
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    # One row is done before a second thread would have woken up.
    kernel = _one_row if rows == 1 else _rows
    kernel(x.data_ptr(), residual_at, weight.data_ptr(), out.data_ptr(), total_at, rows, hidden, eps)
