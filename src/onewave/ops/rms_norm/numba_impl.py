"""RMSNorm on the CPU in float32: rows over threads, each row twice through L1."""

import numpy as np
import torch
from torch import Tensor

from onewave.ops.cpu.math_impl import doubles, floats, integers
from onewave.ops.cpu.team_impl import Job, kernel


@kernel
def _rows(table_at, first, last):
    table = integers(table_at, 19)
    x_at, residual_at, weight_at, out_at, total_at, hidden = table[1], table[2], table[3], table[4], table[5], table[6]
    eps = doubles(table_at, 1)[0]
    weight = floats(weight_at, hidden)
    for row in range(first, last):
        at = row * hidden * 4
        x, out = floats(x_at + at, hidden), floats(out_at + at, hidden)
        if residual_at != 0:
            residual, total = floats(residual_at + at, hidden), floats(total_at + at, hidden)
            for i in range(hidden):
                total[i] = x[i] + residual[i]
            x = total
        squares = np.float32(0.0)
        for i in range(hidden):
            squares += x[i] * x[i]
        scale = np.float32(1.0 / np.sqrt(squares / hidden + eps))
        for i in range(hidden):
            out[i] = x[i] * scale * weight[i]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See op.rms_norm."""
    x = x.contiguous()
    out = torch.empty_like(x)
    job(x, weight, out, eps).run()
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See op.add_rms_norm."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    job(x, weight, out, eps, added=(residual, total)).run()
    return out, total


def job(x: Tensor, weight: Tensor, out: Tensor, eps: float, *, added: tuple[Tensor, Tensor] | None = None) -> Job:
    """The norm of x, or of x + added[0], which is written to added[1]. All contiguous."""
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    residual_at, total_at = (0, 0) if added is None else (each.data_ptr() for each in added)
    return Job(
        _rows, rows, (x.data_ptr(), residual_at, weight.data_ptr(), out.data_ptr(), total_at, hidden), eps, rows < 16
    )
