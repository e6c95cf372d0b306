"""Weights rounded to one byte: int8 or fp8 (e4m3) values with one float32 scale a row.

A row's scale is its largest magnitude over the format's largest, so each value is off by at most half a step of the
format. The scale multiplies the float32 sum of a row's product, so nothing else is rounded.
"""

import torch
from torch import Tensor

from onewave.base.weight_formats import RowRounding

_SMALLEST_NORMAL = 2.0**-126


def round_rows(rows: Tensor, rounding: RowRounding) -> tuple[Tensor, Tensor]:
    """Round each row: float32 [n, cols] to (uint8 [n, cols], the formats' bits; float32 [n], scales).

    Ties to even. A row that is zero, or would have a subnormal scale, becomes zeros. A row with a NaN or infinite
    value gets such a scale, so its products show it.
    """
    largest = rows.abs().amax(dim=1)
    scales = divided(largest, rounding.largest)
    scales = torch.where(scales < _SMALLEST_NORMAL, 1.0, scales)
    values = torch.nan_to_num(rows / scales[:, None]).clamp(-rounding.largest, rounding.largest)
    made = values.round().to(torch.int8) if rounding.name == "int8" else values.to(torch.float8_e4m3fn)
    return made.view(torch.uint8), scales


def divided(numbers: Tensor, divisor: float) -> Tensor:
    """Divide by one number, on a GPU as on a CPU: of a Python number a GPU would multiply by the inverse."""
    return numbers / numbers.new_full((), divisor)


def restore_rows(made: Tensor, scales: Tensor, rounding: RowRounding, dtype: torch.dtype) -> Tensor:
    """Dequantise rows: uint8 [n, cols] times float32 [n], rounded once to dtype. Returns [n, cols]."""
    values = made.view(torch.int8 if rounding.name == "int8" else torch.float8_e4m3fn).to(torch.float32)
    return (values * scales[:, None]).to(dtype)
