"""Quantised rows in Triton: one program a row, the row in registers, one pass over memory.

constexpr  meaning [unit] (allowed values)
OWN        whether a row's scale comes from its largest magnitude (False: the given one)
FP8        whether codes are e4m3, else int8
GATED      whether x is gate and up, and SwiGLU of both is quantised
BLOCK      columns, padded to a power of two
PDL        whether launches overlap (programmatic dependent launch; False, True)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.dependent_launch import after_last, dependent_launch
from onewave.gpu.launch import launch_kernel
from onewave.ops.quantize_rows.choose import QuantizeCall, RowChoice
from onewave.ops.quantize_rows.reference import EMPTY_SCALE, LARGEST, SMALLEST_SCALE


@triton.jit
def divided(x, scale):
    """x / scale, rounded as a division is (scale: one number of 2^-100 or more), without its unit: the quotient of the
    reciprocal, corrected by its remainder. Source: Markstein 1990, IBM J. Res. Dev. 34(1)."""
    inverse = tl.div_rn(1.0, scale)
    rough = x * inverse
    exact = tl.fma(tl.fma(-rough, scale, x), inverse, rough)
    # Beyond all codes a remainder may be no number.
    return tl.where(tl.abs(rough) < 1024.0, exact, rough)


@triton.jit
def quantize_kernel(
    x_ptr, given_ptr, codes_ptr, scale_ptr, cols, stride, largest, empty_scale, smallest,
    OWN: tl.constexpr, FP8: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < cols
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * stride + cols + column, mask=inside, other=0.0).to(tl.float32)
        x = (x / (1.0 + tl.exp(-x)) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    if OWN:
        # A largest number of NaNs would be the other one.
        wrong = tl.max((x != x).to(tl.int32), axis=0)
        scale = tl.div_rn(tl.max(tl.abs(x), axis=0), largest)
        scale = tl.where(wrong > 0, float("nan"), tl.where(scale < smallest, empty_scale, scale))
        tl.store(scale_ptr + row, scale)
    else:
        scale = tl.load(given_ptr)
    values = divided(x, scale)
    codes_at = codes_ptr + row * cols + column
    if FP8:
        # Compared so that NaN stays.
        values = tl.where(values < -448.0, -448.0, tl.where(values > 448.0, 448.0, values))
        tl.store(codes_at, values.to(tl.float8e4nv), mask=inside)
    else:
        values = tl.minimum(tl.maximum(tl.where(values != values, 0.0, values), -128.0), 127.0)
        # Added to 1.5 * 2^23, a number's whole part is the sum's last bits, rounded.
        tl.store(codes_at, (values + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8), mask=inside)


def run(call: QuantizeCall, choice: RowChoice) -> tuple[Tensor, Tensor]:
    """Launch the kernel; return (codes, scale)."""
    x, scale = call.x, call.scale
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty((len(x), call.cols), dtype=call.dtype, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device) if scale is None else scale
    if len(x) == 0:
        return codes, scales
    launch_kernel(
        quantize_kernel, (choice.num_programs,), x, scale, codes, scales, call.cols, x.stride(0), LARGEST[call.dtype],
        EMPTY_SCALE, SMALLEST_SCALE, OWN=scale is None, FP8=call.dtype is not torch.int8, GATED=call.swiglu,
        BLOCK=choice.block, num_warps=choice.num_warps, **dependent_launch(codes),
    )  # fmt: skip
    return codes, scales
