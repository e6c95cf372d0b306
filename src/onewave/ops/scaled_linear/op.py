"""Matrix products of one-byte operands with scales: activations and weights in int8 or in float8 (e4m3)."""

from typing import Any

import torch
from torch import Tensor

from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.library import is_watched, register
from onewave.ops.prepared import prepared
from onewave.ops.scaled_linear.call import SCHEMA, Epilogue, ScaledCall, check, check_operands, scaled_call
from onewave.ops.scaled_linear.choose import choose

_ROUNDINGS = {"half_even": False, "half_away": True}


@prepared
def linear_int8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_shift: Tensor | None = None,
    out_smooth: Tensor | None = None,
    out_scale: float | None = None,
    quant_round: str = "half_even",
    quant_max_bound: float = 127.0,
    quant_min_bound: float = -127.0,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multiply int8 activations by int8 weights, with scales: x W^T * weight_scale * x_scale + bias.

    x: [tokens, cols], weight: [rows, cols], int8, cols up to 131,071. x_scale: float32 [tokens] (or [tokens, 1]) or one
    number; weight_scale: float32 [rows] or one number; None: 1. bias, out_shift, out_smooth: [rows].
    Returns [tokens, rows] in out_dtype, bfloat16 by default, float16, float32, or
        int32   the sums themselves: no scales and nothing else may be given
        int8    with out_scale, which makes it the default: clip(round(quant_max_bound * out_scale * y),
                quant_min_bound, quant_max_bound), rounded "half_even" or "half_away" (from zero)
    In this order: the exact sum in int32, to float32; times weight_scale; times x_scale; plus bias; (y + out_shift) *
    out_smooth; rounding. Each step rounds to float32, none is fused, so the result has the same bits on every device
    and whatever the tokens beside. backend: auto, gluon (Hopper), triton, reference. ONEWAVE_DEBUG=1 refuses a
    weight_scale that is not finite. Raises ShapeError, UnsupportedError, InvalidArgumentError.
    """
    numbers = (out_scale, quant_round, quant_max_bound, quant_min_bound)
    epilogue = _epilogue("linear_int8", (x_scale, weight_scale, bias, out_shift, out_smooth), numbers)
    return _linear(torch.int8, x, weight, epilogue, out_dtype, backend)


@prepared
def linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_shift: Tensor | None = None,
    out_smooth: Tensor | None = None,
    out_scale: float | None = None,
    quant_round: str = "half_even",
    quant_max_bound: float = 127.0,
    quant_min_bound: float = -127.0,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multiply float8 (e4m3) activations by float8 weights, with scales; everything else as in linear_int8.

    Sums are float32; there are none in int32. A CPU's, and the reference's, are exact and rounded once. Hopper's tensor
    cores add fp8 products with some 14 bits, so sums of 128 columns of K are promoted: added to float32 registers one
    after another. Other GPUs multiply the same numbers as float16, which is exact, and sum in float32. A token's bits
    do not depend on the tokens beside it. Sources: DeepSeek-V3 2024, arXiv:2412.19437, section 3.3.2; CUTLASS.
    """
    numbers = (out_scale, quant_round, quant_max_bound, quant_min_bound)
    epilogue = _epilogue("linear_fp8", (x_scale, weight_scale, bias, out_shift, out_smooth), numbers)
    return _linear(torch.float8_e4m3fn, x, weight, epilogue, out_dtype, backend)


def _epilogue(
    name: str, tensors: tuple[Tensor | None, ...], numbers: tuple[float | None, str, float, float]
) -> Epilogue:
    out_scale, rounding, high, low = numbers
    checks.one_of(name, "quant_round", rounding, _ROUNDINGS)
    return Epilogue(*tensors, out_scale, _ROUNDINGS[rounding], high, low)


def _linear(
    kind: torch.dtype, x: Tensor, weight: Tensor, epilogue: Epilogue, out_dtype: torch.dtype | None, backend: str
) -> Tensor:
    name = "linear_int8" if kind is torch.int8 else "linear_fp8"
    check_operands(name, kind, x, weight, epilogue)
    wanted = out_dtype or (torch.bfloat16 if epilogue.out_scale is None else torch.int8)
    call = ScaledCall(x, weight, wanted, epilogue, backend)
    check(call)
    if is_watched(x, weight, *epilogue.tensors):
        return torch.ops.onewave.scaled_linear(*call.flat)
    return _run(call)


def _run(call: ScaledCall) -> Tensor:
    choice = choose(call)
    return load("scaled_linear", choice.module).run(call, choice)


def _library(*flat: Any) -> Tensor:
    return _run(scaled_call(*flat))


def _fake(*flat: Any) -> Tensor:
    return scaled_call(*flat).output()


register("scaled_linear", _library, _fake, schema=f"({SCHEMA}) -> Tensor")
