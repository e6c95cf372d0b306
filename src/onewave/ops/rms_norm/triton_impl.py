"""RMSNorm in Triton: one program a row, the row in registers, one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.dependent_launch import after_last, dependent_launch
from onewave.gpu.launch import launch_kernel
from onewave.ops.rms_norm.choose import tile_of


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, hidden, eps, ADD: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_last(PDL)
    start = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + start + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(total_ptr + start + column, x, mask=inside)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / hidden + eps)
    # Llama rounds the unit row before the weight multiply.
    unit = (x32 * scale).to(weight.dtype)
    tl.store(out_ptr + start + column, (unit.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See op.rms_norm."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=weight.dtype)
    _launch(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See op.add_rms_norm."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x, dtype=weight.dtype), torch.empty_like(residual)
    _launch(x, residual, weight, out, total, eps, add=True)
    return out, total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, add: bool) -> None:
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    if rows == 0:
        return
    block, num_warps = tile_of(hidden)
    launch_kernel(
        rms_norm_kernel, (rows,),
        x, residual, weight, out, total, hidden, eps, ADD=add, BLOCK=block, num_warps=num_warps,
        **dependent_launch(out),
    )  # fmt: skip
