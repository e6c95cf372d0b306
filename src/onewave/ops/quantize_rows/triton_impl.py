"""Quantised rows in Triton: one program a row, the row in registers, one pass over memory.

constexpr  meaning [unit] (allowed values)
OWN        whether a row's scale comes from its largest magnitude (False: the given one)
FP8        whether codes are e4m3, else int8
GATED      whether x is gate and up, and SwiGLU of both is quantised
BLOCK      columns of a block [elements] (a power of two)
BLOCKS     blocks of a row; what the last one has beyond it is masked
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
def divided(x, scale, SMALL: tl.constexpr):
    """x / scale, rounded as a division is (scale: one number of 2^-100 or more), without its unit: the quotient of the
    reciprocal, corrected by its remainder. SMALL: it is below 1024, or no number. Source: Markstein 1990, IBM J. Res.
    Dev. 34(1)."""
    inverse = tl.div_rn(1.0, scale)
    rough = x * inverse
    exact = tl.fma(tl.fma(-rough, scale, x), inverse, rough)
    if not SMALL:
        # Beyond all codes a remainder may be no number.
        exact = tl.where(tl.abs(rough) < 1024.0, exact, rough)
    return exact


@triton.jit
def scale_of(largest, bound, empty_scale, smallest):
    """The scale of a row whose largest magnitude is the maximum of `largest`, in which a NaN outdoes all."""
    # As whole numbers NaNs are the largest.
    whole = tl.max(largest.to(tl.int32, bitcast=True), axis=0)
    scale = tl.div_rn(whole.to(tl.float32, bitcast=True), bound)
    return tl.where(scale < smallest, empty_scale, scale)


@triton.jit
def codes_of(x, scale, OWN: tl.constexpr, FP8: tl.constexpr):
    """Codes of x by a scale. OWN: no |x| is above its share of the scale, so that little has to be clipped."""
    values = divided(x, scale, OWN)
    if FP8:
        if not OWN:
            # Compared so that NaN stays.
            values = tl.where(values < -448.0, -448.0, tl.where(values > 448.0, 448.0, values))
        codes = values.to(tl.float8e4nv)
    else:
        values = tl.minimum(tl.where(values != values, 0.0, values), 127.0)
        if not OWN:
            values = tl.maximum(values, -128.0)
        # Added to 1.5 * 2^23, a number's whole part is the sum's last bits, rounded.
        codes = (values + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return codes


@triton.jit
def quantize_kernel(
    x_ptr, given_ptr, codes_ptr, scale_ptr, cols, stride, bound, empty_scale, smallest,
    OWN: tl.constexpr, FP8: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    values = ()
    for block in tl.static_range(BLOCKS):
        inside = block * BLOCK + column < cols
        x_at = x_ptr + row * stride + block * BLOCK + column
        x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(x_at + cols, mask=inside, other=0.0).to(tl.float32)
            x = (x / (1.0 + tl.exp(-x)) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
        if OWN:
            largest = tl.maximum(largest, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
        values = values + (x,)
    if OWN:
        scale = scale_of(largest, bound, empty_scale, smallest)
        tl.store(scale_ptr + row, scale)
    else:
        scale = tl.load(given_ptr)
    for block in tl.static_range(BLOCKS):
        codes_at = codes_ptr + row * cols + block * BLOCK + column
        tl.store(codes_at, codes_of(values[block], scale, OWN, FP8), mask=block * BLOCK + column < cols)


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
        BLOCK=choice.block, BLOCKS=choice.blocks, num_warps=choice.num_warps, **dependent_launch(codes),
    )  # fmt: skip
    return codes, scales
