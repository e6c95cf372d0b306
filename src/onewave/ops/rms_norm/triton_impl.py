"""RMSNorm in Triton, also of rows that are quantised then: one program a row, the row in registers, one pass over
memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.dependent_launch import after_last, dependent_launch
from onewave.gpu.launch import launch_kernel
from onewave.ops.quantize_rows.reference import EMPTY_SCALE, LARGEST, SMALLEST_SCALE
from onewave.ops.quantize_rows.triton_impl import codes_of, scale_of
from onewave.ops.rms_norm.choose import tile_of


@triton.jit
def unit_row(x_ptr, residual_ptr, weight_ptr, total_ptr, start, column, inside, hidden, eps, ADD: tl.constexpr):
    """The row that begins at `start`, scaled to unit RMS, and its weight, in the weight's dtype. ADD: of the sum, which
    is stored."""
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
    return unit, weight


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, hidden, eps, ADD: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_last(PDL)
    start = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    unit, weight = unit_row(x_ptr, residual_ptr, weight_ptr, total_ptr, start, column, inside, hidden, eps, ADD)
    tl.store(out_ptr + start + column, (unit.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype), mask=inside)


@triton.jit
def quantized_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, codes_ptr, scale_ptr, total_ptr, hidden, eps, bound, empty_scale, smallest,
    FP8: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    at = row * hidden
    unit, weight = unit_row(x_ptr, residual_ptr, weight_ptr, total_ptr, at, column, inside, hidden, eps, True)
    values = (unit.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)
    scale = scale_of(tl.abs(values), bound, empty_scale, smallest)
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + at + column, codes_of(values, scale, True, FP8), mask=inside)


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


def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scale, sum); see quantized.py."""
    x, residual = x.contiguous(), residual.contiguous()
    rows, hidden = x.shape
    codes, total = torch.empty_like(x, dtype=dtype), torch.empty_like(residual)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block, num_warps = tile_of(hidden)
        launch_kernel(
            quantized_norm_kernel, (rows,), x, residual, weight, codes, scale, total, hidden, eps, LARGEST[dtype],
            EMPTY_SCALE, SMALLEST_SCALE, FP8=dtype is not torch.int8, BLOCK=block, num_warps=num_warps,
            **dependent_launch(codes),
        )  # fmt: skip
    return codes, scale, total


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
