"""SwiGLU on the CPU in float32: rows over threads."""

import numpy as np
import torch
from torch import Tensor

from onewave.ops.cpu.math_impl import exp, floats, integers
from onewave.ops.cpu.team_impl import Job, kernel


@kernel
def _rows(table_at, first, last):
    table = integers(table_at, 19)
    gate_up_at, out_at, width = table[1], table[2], table[3]
    for row in range(first, last):
        at = gate_up_at + row * width * 8
        gate, up, out = floats(at, width), floats(at + width * 4, width), floats(out_at + row * width * 4, width)
        for i in range(width):
            out[i] = gate[i] / (np.float32(1.0) + exp(-gate[i])) * up[i]


def swiglu(gate_up: Tensor) -> Tensor:
    """See op.swiglu."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=torch.float32)
    job(gate_up, out).run()
    return out


def job(gate_up: Tensor, out: Tensor) -> Job:
    """SwiGLU of contiguous rows."""
    width = out.shape[-1]
    rows = out.numel() // max(1, width)
    return Job(_rows, rows, (gate_up.data_ptr(), out.data_ptr(), width), alone=rows < 16)
