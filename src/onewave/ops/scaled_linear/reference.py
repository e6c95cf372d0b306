"""The reference of `linear_int8` and `linear_fp8`, in plain PyTorch."""

import torch
from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.masked_multihead_attention.reference import quantise
from onewave.ops.scaled_linear.call import Epilogue, ScaledCall


def run(call: ScaledCall, choice: Choice) -> Tensor:
    """Return the result; float64 holds all sums exactly."""
    sums = call.x.double() @ call.weight.double().t()
    return finish(sums.to(torch.int32 if call.x.dtype is torch.int8 else torch.float32), call.epilogue, call.out_dtype)


def finish(sums: Tensor, epilogue: Epilogue, out_dtype: torch.dtype) -> Tensor:
    """Apply the epilogue to sums [tokens, rows], int32 or float32: each step rounds to float32."""
    if out_dtype is torch.int32:
        return sums
    x_scale, weight_scale, bias, shift, smooth = epilogue.tensors
    y = sums.to(torch.float32)
    if weight_scale is not None:
        y = y * weight_scale.reshape(1, -1)
    if x_scale is not None:
        y = y * x_scale.reshape(-1, 1)
    for offset in (bias, shift):
        if offset is not None:
            y = y + offset.float()
    if smooth is not None:
        y = y * smooth.float()
    if epilogue.out_scale is not None:
        bounds = epilogue.max_bound, epilogue.min_bound
        y = quantise(y, epilogue.out_scale, *bounds, half_away=epilogue.half_away)
    return y.to(out_dtype)
