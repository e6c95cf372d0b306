"""Calls of one-byte products and of what makes their activations."""

from functools import partial
from typing import Any

import torch

from kit.calls.call import Call, empty
from onewave.ops.quantize_rows.op import quantize_rows
from onewave.ops.rms_norm.quantized import add_rms_norm_quantized
from onewave.ops.scaled_linear.op import linear_fp8, linear_int8

_FP8 = torch.float8_e4m3fn


def product(kind: torch.dtype, rows: int, width: int, cols: int, **given: Any) -> None:
    """A projection with a scale for each row of activations and weights."""
    function = linear_int8 if kind is torch.int8 else linear_fp8
    x, w = empty(rows, cols, dtype=kind), empty(width, cols, dtype=kind)
    function(x, w, empty(rows, dtype=torch.float32), empty(width, dtype=torch.float32), **given)


def sums(rows: int, width: int, cols: int) -> None:
    """A projection whose result is int32."""
    linear_int8(empty(rows, cols, dtype=torch.int8), empty(width, cols, dtype=torch.int8), out_dtype=torch.int32)


def everything(rows: int, width: int, cols: int) -> None:
    """A projection with every step of the epilogue, int8 out."""
    vectors = {name: empty(width) for name in ("bias", "out_shift", "out_smooth")}
    product(torch.int8, rows, width, cols, **vectors, out_scale=0.1, quant_round="half_away")


def quantize(kind: torch.dtype, cols: int, *, gated: bool = False, given: bool = False) -> None:
    """A prompt's activations."""
    scale = empty(1, dtype=torch.float32) if given else None
    quantize_rows(empty(64, cols * (1 + gated)), kind, scale, swiglu=gated)


def norm(kind: torch.dtype) -> None:
    """A norm whose rows leave it quantised."""
    add_rms_norm_quantized(empty(64, 4096), empty(64, 4096, dtype=torch.float32), empty(4096), 1e-5, kind)


SCALED = {
    f"scaled {name}": Call(make, (sm // 10, sm % 10))
    for name, (make, sm) in {
        "int8 2048 rows sm_90": (partial(product, torch.int8, 2048, 28672, 4096), 90),
        "int8 8 rows sm_90": (partial(product, torch.int8, 8, 4096, 4096), 90),
        "int8 64 rows sums sm_90": (partial(sums, 64, 6144, 4096), 90),
        "int8 512 rows everything sm_90": (partial(everything, 512, 4096, 4096), 90),
        "float8 2048 rows sm_90": (partial(product, _FP8, 2048, 28672, 4096), 90),
        "float8 8 rows sm_90": (partial(product, _FP8, 8, 4096, 4096), 90),
        "int8 512 rows sm_80": (partial(product, torch.int8, 512, 4096, 4096), 80),
        "int8 8 rows everything sm_80": (partial(everything, 8, 4096, 4096), 80),
        "float8 512 rows sm_80": (partial(product, _FP8, 512, 4096, 4096), 80),
        "float8 8 rows sm_89": (partial(product, _FP8, 8, 4096, 4096), 89),
        "norm int8 sm_80": (partial(norm, torch.int8), 80),
        "norm float8 sm_90": (partial(norm, _FP8), 90),
        "quantize int8 sm_80": (partial(quantize, torch.int8, 4096), 80),
        "quantize int8 sm_90": (partial(quantize, torch.int8, 4096), 90),
        "quantize int8 swiglu sm_90": (partial(quantize, torch.int8, 14336, gated=True), 90),
        "quantize float8 sm_90": (partial(quantize, _FP8, 4096, given=True), 90),
        "quantize float8 swiglu sm_90": (partial(quantize, _FP8, 14336, gated=True), 90),
    }.items()
}
