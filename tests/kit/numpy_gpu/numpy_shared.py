"""Shared memory of a block as NumPy arrays, for gluon_in_numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kit.numpy_gpu import happens_before
from kit.numpy_gpu.numpy_memory import Array, wrapped


class Shared:
    """Shared memory: bytes with a shape. Wide rows of the 128-byte swizzled layout lie in blocks of 128 bytes.

    data: from its first byte on, to the end of what was allocated together. own: how many of these bytes are its own.
    """

    def __init__(
        self,
        data: np.ndarray,
        item: Any,
        shape: Sequence[int],
        layout: Any,
        own: int | None = None,
        order: tuple[int, ...] | None = None,
    ):
        self.data, self.item, self.shape = data, np.dtype(item), tuple(int(n) for n in shape)
        self.layout, self.order = layout, order
        size = math.prod(self.shape) * self.item.itemsize
        self.own = size if own is None else own
        # Or several places of those beside one another.
        assert size <= self.own or size % self.own == 0
        assert size <= data.nbytes

    def index(self, at: Any) -> Shared:
        size = math.prod(self.shape[1:]) * self.item.itemsize
        assert 0 <= int(at) < self.shape[0]
        return Shared(self.data[int(at) * size :], self.item, self.shape[1:], self.layout)

    def _reinterpret(self, item: Any, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.data, item, shape, layout, self.own)

    def slice(self, start: int, length: int, dim: int = 0) -> Any:
        if dim > 0:
            return Strided(self, start, length, dim)
        row = self.shape[1] * self.item.itemsize
        assert row == 128  # longer rows of the swizzled layout do not lie side by side
        assert start + length <= self.shape[0]
        return Shared(self.data[start * row :], self.item, (length, self.shape[1]), self.layout)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data, self.item, self.shape, self.layout, order=order)

    def _cells(self) -> np.ndarray:
        flat = self.raw[0].view(self.item)
        if self.layout == "swizzled 128" and self.shape[:-2] in ((), (1, 1)):
            rows, columns = self.shape[-2:]
            across = min(128 // self.item.itemsize, columns)
            return flat.reshape(columns // across, rows, across).transpose(1, 0, 2)
        return flat.reshape(self.shape)

    @property
    def raw(self) -> list[np.ndarray]:
        return [self.data[: math.prod(self.shape) * self.item.itemsize]]

    def peek(self) -> Array:
        """The values that lie there, whoever asks."""
        found = wrapped(self._cells().reshape(self.shape).copy())
        return found if self.order is None else found.transpose(self.order)

    def put(self, values: Any) -> None:
        cells = self._cells()
        cells[...] = np.asarray(values).astype(self.item).reshape(cells.shape)

    def load(self, layout: Any = None) -> Array:
        happens_before.reads(*self.raw)
        return self.peek()

    def store(self, values: Any) -> None:
        happens_before.writes(*self.raw)
        self.put(values)


class Strided:
    """A part of plain shared memory along an axis that is not its first."""

    def __init__(self, whole: Shared, start: int, length: int, dim: int):
        assert start + length <= whole.shape[dim]
        cells = whole.raw[0].view(whole.item).reshape(whole.shape)
        self.cells = cells[(*[slice(None)] * dim, slice(start, start + length))]
        self.raw = [self.cells[at] for at in np.ndindex(*whole.shape[:dim])]

    def store(self, values: Any) -> None:
        happens_before.writes(*self.raw)
        self.cells[...] = np.asarray(values)
