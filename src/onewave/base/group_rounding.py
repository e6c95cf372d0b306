"""Weights rounded to four bits: numbers from 0 to 15 with a float16 scale for each group of a row's columns.

A weight is its row's scale times s * (n - 8), or s * n + m with a minimum m. The row's scale is a power of two, so that
float16 holds the others. Products of a group's numbers are summed in float32, then multiplied by s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onewave.base.rounding import divided, restore_rows, round_rows
from onewave.base.weight_formats import GroupRounding, Rounding, RowRounding

CANDIDATES = tuple(float(np.float32(1) / np.float32(1 + 0.025 * step)) for step in range(-10, 4))
"""Candidates for a group's scale: its largest magnitude over 8, and steps of 2.5 % below and above. By one over each,
in float32, weights are multiplied, so that a CPU and a GPU have the same bits."""
EXPONENT = 14
"""Binary exponent of a row's largest scale: half of float16's largest."""


@dataclass(frozen=True)
class GroupedRows:
    """Rows of n columns in groups. codes: uint8 [rows, n]. scales, minima: float16 [rows, groups], or float32 of 8-bit
    codes. row_scales: float32 [rows], powers of two. steps: int8 [rows, columns in 32, 2], of nested formats
    (nested.py)."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    row_scales: Tensor
    steps: Tensor | None = None

    def block(self, first: int, last: int) -> "GroupedRows":
        """Take rows first to last; beyond the end rows of zeros."""
        missing = max(0, last - len(self.codes))

        def cut(part: Tensor) -> Tensor:
            own = part[first:last]
            return torch.cat((own, own.new_zeros(missing, *own.shape[1:]))) if missing else own

        minima, steps = (None if part is None else cut(part) for part in (self.minima, self.steps))
        return GroupedRows(cut(self.codes), cut(self.scales), minima, cut(self.row_scales), steps)


def round_groups(rows: Tensor, rounding: GroupRounding) -> GroupedRows:
    """Round rows: float32 [n, cols]. A last group may have fewer columns.

    Without minima each group takes the scale, of a few near its largest magnitude over 8, that leaves the least sum of
    squares; with minima its smallest value and a fifteenth of its range. Ties to even. A group with a NaN or infinite
    value gets a NaN scale, so its products show it.
    """
    count, cols = rows.shape
    missing = -cols % rounding.group
    groups = torch.nn.functional.pad(rows, (0, missing)).view(count, -1, rounding.group)
    if rounding.minima:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales, minima = divided(high - low, 15), low
    else:
        scales, minima = _searched(groups), None
    row_scales = _powers_of_two(scales if minima is None else scales.abs().maximum(minima.abs()))
    narrow = (scales / row_scales[:, None]).half()
    step = (narrow.float() * row_scales[:, None])[..., None]
    if minima is None:
        origin, least = groups, None
    else:
        least = (minima / row_scales[:, None]).half()
        origin = groups - (least.float() * row_scales[:, None])[..., None]
    zero = 8.0 if least is None else 0.0
    codes = torch.where(step != 0, origin / step, 0.0).nan_to_num_(0.0).round_().add_(zero).clamp_(0, 15)
    made = codes.to(torch.uint8).view(count, -1)[:, :cols].contiguous()
    return GroupedRows(made, narrow, least, row_scales)


def _searched(groups: Tensor) -> Tensor:
    """Find the scale of each group, [n, groups, columns] -> [n, groups]."""
    high, low = groups.amax(dim=2, keepdim=True), groups.amin(dim=2, keepdim=True)
    largest = torch.where(high > -low, high, low) / -8
    best, found, ratios = torch.zeros_like(largest), largest, groups / largest
    for factor in CANDIDATES:
        codes = (ratios * factor).round_().clamp_(-8, 7)
        # The best scale for these codes takes sum(w n)^2 / sum(n^2) off the sum of squares.
        product, square = _sum(ratios * codes), _sum(codes.square())
        better = product * product / square
        chosen = better > best  # never where it is NaN
        best, found = torch.where(chosen, better, best), torch.where(chosen, largest * (product / square), found)
    wrong = ~groups.isfinite().all(dim=2, keepdim=True)
    return torch.where(wrong, torch.nan, found).squeeze(2)


def held_rows(codes: Tensor, scales: Tensor, minima: Tensor | None, number: torch.dtype) -> tuple[GroupedRows, Tensor]:
    """Hold rows that are quantised already; also a flag, whether they are held exactly.

    codes: uint8 [rows, cols]. scales, minima: float32 [rows, groups]. number: their dtype to be, float16|float32.
    """
    row_scales = _powers_of_two(scales if minima is None else scales.abs().maximum(minima.abs()))
    narrow = (scales / row_scales[:, None]).to(number)
    least = None if minima is None else (minima / row_scales[:, None]).to(number)
    exact = (narrow.float() * row_scales[:, None] == scales).all()
    if least is not None:
        exact &= (least.float() * row_scales[:, None] == minima).all()
    return GroupedRows(codes, narrow, least, row_scales), exact


def stacked_rows(pieces: Sequence[GroupedRows], *, alternate: bool) -> GroupedRows:
    """Put rows below one another, or row by row in turn."""

    def put(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, dim=1).flatten(0, 1) if alternate else torch.cat(parts)

    minima = [piece.minima for piece in pieces if piece.minima is not None]
    steps = [piece.steps for piece in pieces if piece.steps is not None]
    return GroupedRows(
        put([piece.codes for piece in pieces]),
        put([piece.scales for piece in pieces]),
        put(minima) if minima else None,
        put([piece.row_scales for piece in pieces]),
        put(steps) if steps else None,
    )


def _sum(values: Tensor) -> Tensor:
    """Sum along the last axis, a power of two long, keeping it. The order is the same for any number of rows, on any
    device: the same row is always rounded the same way."""
    while values.shape[-1] > 1:
        first, second = values.chunk(2, dim=-1)
        values = first + second
    return values


def round_bytes(rows: Tensor, group: int, number: torch.dtype) -> GroupedRows:
    """Round rows to 8 bits, 128 for zero: float32 [n, cols], a scale of dtype `number` for `group` columns.

    A group's scale is its largest magnitude over 127. Ties to even; NaN and infinity as round_groups has them.
    """
    count, cols = rows.shape
    groups = torch.nn.functional.pad(rows, (0, -cols % group)).view(count, -1, group)
    scales = divided(groups.abs().amax(dim=2), 127)
    row_scales = _powers_of_two(scales)
    narrow = (scales / row_scales[:, None]).to(number)
    step = (narrow.float() * row_scales[:, None])[..., None]
    codes = torch.where(step != 0, groups / step, 0.0).nan_to_num_(0.0).round_().add_(128).clamp_(1, 255)
    return GroupedRows(codes.to(torch.uint8).view(count, -1)[:, :cols].contiguous(), narrow, None, row_scales)


def _powers_of_two(numbers: Tensor) -> Tensor:
    """Find each row's scale: float32 [rows] of [rows, groups]."""
    largest = numbers.abs().nan_to_num().amax(dim=1)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - EXPONENT, 0).clamp(-126, 126)
    return torch.ldexp(torch.ones_like(largest), exponent)


def restore_groups(rows: GroupedRows, group: int, dtype: torch.dtype, *, zero: int = 8) -> Tensor:
    """Dequantise rows, in float32 and rounded once to dtype: [n, cols]. zero: the code of 0, without minima."""
    cols = rows.codes.shape[1]

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.float().repeat_interleave(group, dim=1)[:, :cols]

    if rows.minima is None:
        values = (rows.codes.float() - zero) * spread(rows.scales)
    else:
        values = rows.codes.float() * spread(rows.scales) + spread(rows.minima)
    return (values * rows.row_scales[:, None]).to(dtype)


def rounded(rows: Tensor, rounding: Rounding, dtype: torch.dtype) -> Tensor:
    """Round float32 rows to a format and dequantise them, rounded once to dtype."""
    if isinstance(rounding, RowRounding):
        return restore_rows(*round_rows(rows, rounding), rounding, dtype)
    assert isinstance(rounding, GroupRounding)
    return restore_groups(round_groups(rows, rounding), rounding.group, dtype)
