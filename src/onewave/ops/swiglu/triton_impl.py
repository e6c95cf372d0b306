"""SwiGLU in Triton: elementwise, one program a piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.dependent_launch import after_last, dependent_launch
from onewave.gpu.grid import grid_of
from onewave.gpu.launch import launch_kernel
from onewave.ops.swiglu.choose import BLOCK, NUM_WARPS


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr, AXIS: tl.constexpr):
    after_last(PDL)
    row = tl.program_id(AXIS).to(tl.int64)
    column = tl.program_id(1 - AXIS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + column, value.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """See op.swiglu."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    rows = out.numel() // max(1, width)
    if rows:
        grid, axis = grid_of(rows, triton.cdiv(width, BLOCK))
        launch_kernel(
            swiglu_kernel, grid, gate_up, out, width, BLOCK=BLOCK, AXIS=axis, num_warps=NUM_WARPS,
            **dependent_launch(out),
        )  # fmt: skip
    return out
