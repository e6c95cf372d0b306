"""Tensor maps, as TMA has them, of the memory of numpy_memory: what a copy of one box brings or writes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kit.numpy_gpu.numpy_memory import Memory, Pointer


class Descriptor:
    """A tensor map of boxes [rows, 64] over the packed stream."""

    layout = "rows"

    def __init__(self, stream: np.ndarray, rows: int = 128):
        self.stream, self.rows = stream, rows

    def box(self, at: Sequence[Any]) -> np.ndarray:
        """The values that a copy of one box brings."""
        return self.stream[int(at[0]) : int(at[0]) + self.rows]


class Matrix:
    """A tensor map of a matrix in device memory, in boxes: zeros come from beyond its edges, and nothing goes there."""

    layout = "rows"

    def __init__(
        self, memory: Memory, pointer: Pointer, shape: tuple[int, int], box: tuple[int, int], stride: int | None = None
    ):
        self.memory, self.pointer, self.shape, self.size = memory, pointer, shape, box
        self.stride = shape[1] if stride is None else stride

    def box(self, at: Sequence[Any]) -> np.ndarray:
        """The values that a copy of one box brings."""
        rows, columns, inside = self._places(at)
        found = self.memory.load(self.pointer + np.where(inside, rows * self.stride + columns, 0))
        return np.where(inside, found, self.pointer.item.type(0))

    def put(self, at: Sequence[Any], values: np.ndarray) -> None:
        """Write one box."""
        rows, columns, inside = self._places(at)
        self.memory.store(self.pointer + rows * self.stride + columns, values, inside)

    def _places(self, at: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = int(at[0]) + np.arange(self.size[0])[:, None]
        columns = int(at[1]) + np.arange(self.size[1])[None, :]
        return rows, columns, (rows < self.shape[0]) & (columns < self.shape[1])


class Boxes:
    """A tensor map of a tensor of any strides in device memory, in boxes; zeros come from beyond its bounds."""

    layout = "swizzled 128"

    def __init__(self, memory: Memory, pointer: Pointer, shape: Sequence[int], strides: Sequence[int], box: list[int]):
        self.memory, self.pointer, self.shape, self.strides, self.block_shape = memory, pointer, shape, strides, box
        self.dtype = pointer.item

    def box(self, at: Sequence[Any]) -> np.ndarray:
        """The values that a copy of one box brings."""
        where, inside = np.zeros(self.block_shape, np.int64), np.ones(self.block_shape, bool)
        for axis, first in enumerate(at):
            turned = [1] * len(self.block_shape)
            turned[axis] = -1
            index = (int(first) + np.arange(self.block_shape[axis], dtype=np.int64)).reshape(turned)
            where, inside = where + index * self.strides[axis], inside & (index >= 0) & (index < self.shape[axis])
        found = self.memory.load(self.pointer + np.where(inside, where, 0))
        return np.where(inside, found, self.dtype.type(0))
