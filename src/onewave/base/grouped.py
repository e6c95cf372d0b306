"""Quantised matrices in groups: one code a weight, and a scale, perhaps an offset too, for every group of columns.

Readers of checkpoints make these, and what lays weights out for a device's kernels takes them: neither knows the other.

    value = scale * code                  symmetric
    value = scale * (code - zero_point)   zero points
    value = scale * code - minimum        minima

Products are exact in float32 for all formats that files have, so a value is rounded once at most: where a minimum is
taken away.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Array = Any
"""A NumPy array; or, of a matrix that is opened on a GPU, a tensor. Both have the operators that opening takes."""
Rows = slice | Sequence[int] | Array


class Code(Enum):
    """The meaning of a code's bits."""

    SIGNED = "signed"
    UNSIGNED = "unsigned"
    E4M3 = "e4m3"


class Offset(Enum):
    """A group's parameter beside its scale."""

    NONE = "none"
    ZERO_POINT = "zero point"
    MINIMUM = "minimum"


@dataclass(frozen=True)
class GroupFormat:
    """A number format in groups.

    bits: of a code. group: consecutive columns that share a scale; None: the whole row. offset: what a group has beside
    its scale. number: of scales and minima as files hold them, "F16", "BF16" or "F32". nested: columns that share such
    a number where a group's own scale is an integer times it (K-quants), else None.
    """

    code: Code
    bits: int
    group: int | None
    offset: Offset = Offset.NONE
    number: str = "F16"
    nested: int | None = None

    def groups(self, cols: int) -> int:
        """Groups of a row."""
        return 1 if self.group is None else -(-cols // self.group)


@dataclass(frozen=True, eq=False)
class GroupNumbers:
    """One number for each group of each row: base, or base times steps.

    base: float32 [rows, n], every number exactly one of the format's `number`. steps: int8|uint8 [rows, groups], n
    divides groups, or None where n is groups.
    """

    base: Array
    steps: Array | None = None

    def expand(self) -> Array:
        """Return float32 [rows, groups]; a product of 11 and 8 bits is exact."""
        if self.steps is None:
            return self.base
        (rows, shared), groups = self.base.shape, self.steps.shape[1]
        return (self.base[..., None] * self.steps.reshape(rows, shared, groups // shared)).reshape(rows, groups)

    def select(self, rows: Rows) -> "GroupNumbers":
        """Return the chosen rows' numbers."""
        return GroupNumbers(self.base[rows], None if self.steps is None else self.steps[rows])

    def on(self, device: torch.device) -> "GroupNumbers":
        """Return the same numbers as tensors there."""
        return GroupNumbers(_on(self.base, device), _on(self.steps, device))


@dataclass(frozen=True)
class InputScale:
    """The scale of the 8-bit activations that a matrix is multiplied by. static: None: each token has its own."""

    static: float | None


@dataclass(frozen=True, eq=False)
class GroupedMatrix:
    """A quantised [rows, cols] matrix.

    codes: [rows, cols], one a byte: int8 of signed ones (never with the file's bias: 4 bits are -8..7), uint8 of
    unsigned ones and of the bits of e4m3. zero_points: uint8|int8 [rows, groups], minima: numbers to take away, each
    where the format has them. columns: int64 [cols], the matrix's column that column i of the codes is (activation
    order); None: the same. inputs: None: activations stay as they are.
    """

    format: GroupFormat
    shape: tuple[int, int]
    codes: Array
    scales: GroupNumbers
    zero_points: Array | None = None
    minima: GroupNumbers | None = None
    columns: npt.NDArray[np.int64] | None = None
    inputs: InputScale | None = None

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minima are finite numbers."""
        bases = [numbers.base for numbers in (self.scales, self.minima) if numbers is not None]
        return all(bool((abs(base) < math.inf).all()) for base in bases)

    def select(self, rows: Rows) -> "GroupedMatrix":
        """Return the chosen rows, in the order given."""
        codes = self.codes[rows]
        return GroupedMatrix(
            self.format,
            (codes.shape[0], self.shape[1]),
            codes,
            self.scales.select(rows),
            None if self.zero_points is None else self.zero_points[rows],
            None if self.minima is None else self.minima.select(rows),
            self.columns,
            self.inputs,
        )

    def on(self, device: torch.device) -> "GroupedMatrix":
        """Return the same matrix as tensors there; `columns` stay an array."""
        codes, zeros = _on(self.codes, device), _on(self.zero_points, device)
        minima = None if self.minima is None else self.minima.on(device)
        return replace(self, codes=codes, scales=self.scales.on(device), zero_points=zeros, minima=minima)

    def dequantize(self) -> Floats:
        """Return float32 [rows, cols] of arrays, in the matrix's own order of columns."""
        cols = self.shape[1]
        group = self.format.group or cols

        def spread(numbers: Array) -> Floats:
            return np.repeat(numbers.astype(np.float32), group, axis=1)[:, :cols]

        values = e4m3_values()[self.codes] if self.format.code is Code.E4M3 else self.codes.astype(np.float32)
        if self.zero_points is not None:
            values -= spread(self.zero_points)
        values *= spread(self.scales.expand())
        if self.minima is not None:
            values -= spread(self.minima.expand())
        return in_order(values, self.columns)


def _on(array: Array, device: torch.device) -> Array:
    return None if array is None else torch.as_tensor(array).to(device)


def in_order(values: Floats, columns: npt.NDArray[np.int64] | None) -> Floats:
    """Put each column where `columns` says that it belongs; None: where it is."""
    if columns is None:
        return values
    out = np.empty_like(values)
    out[:, columns] = values
    return out


def e4m3_values() -> Floats:
    """Return float32 [256]: what each byte is in e4m3 (finite, NaN at 0x7F and 0xFF). Source: OCP OFP8, 2023."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[byte & 127 == 127] = np.nan
    return np.where(byte > 127, -size, size).astype(np.float32)
