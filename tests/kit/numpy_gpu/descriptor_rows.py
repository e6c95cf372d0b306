"""Addresses of a tensor descriptor, as TMA has them: coordinates times strides modulo 2^64, zeros out of bounds."""

from typing import Any

import torch
from torch import Tensor


def rows_of(descriptor: Any, at: list[int]) -> tuple[Tensor, int]:
    """A box's rows as a view of memory from its first row inside the bounds, and where in the box that row stands."""
    row_axis, (rows, columns) = len(at) - 2, descriptor.block_shape[-2:]
    if any(not 0 <= x < n for axis, (x, n) in enumerate(zip(at, descriptor.shape, strict=True)) if axis != row_axis):
        return torch.empty(0, columns), 0
    first = max(0, -at[row_axis])
    inside = max(0, min(rows, descriptor.shape[row_axis] - at[row_axis]) - first)
    at = [x + first if axis == row_axis else x for axis, x in enumerate(at)]
    offset = 2 * sum(x * step for x, step in zip(at, descriptor.strides, strict=True)) % 2**64 // 2
    width = min(columns, descriptor.shape[-1] - at[-1]) if inside else columns
    base = descriptor.base
    view = base.as_strided(
        (inside, width), (descriptor.strides[row_axis], 1), base.storage_offset() + (offset if inside else 0)
    )
    return view, first


def load(descriptor: Any, at: list[int]) -> Tensor:
    box = torch.zeros(descriptor.block_shape[-2:], dtype=torch.float64)
    view, first = rows_of(descriptor, at)
    box[first : first + len(view), : view.shape[1]] = view
    return box
