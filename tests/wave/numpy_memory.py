"""Tensors, pointers and device memory as NumPy arrays, for gluon_in_numpy."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import torch

from onewave.wave.byte_formats import ROUNDINGS
from onewave.wave.rounding import unpaired


class Array(np.ndarray):
    """A tensor, or a scalar as an array of no dimension."""

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout="registers")

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, PointerType):
            return Pointer(self, dtype.item)
        return wrapped(self.view(dtype) if bitcast else np.asarray(self).astype(dtype))

    def item(self, *at: Any) -> Any:
        return wrapped(np.asarray(self).reshape(()))

    def __iadd__(self, other: Any) -> Any:
        return self + other  # a tensor never changes: another name for it keeps its value


def wrapped(values: Any) -> Array:
    return np.asarray(values).view(Array)


class PointerType:
    def __init__(self, item: Any):
        self.item = np.dtype(item)


class Pointer:
    """Byte addresses into the one memory, of elements of one dtype."""

    def __init__(self, address: Any, item: Any):
        self.address, self.item = wrapped(np.asarray(address, dtype=np.int64)), np.dtype(item)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.item)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.address + np.asarray(offset).astype(np.int64) * self.item.itemsize, self.item)

    def __sub__(self, offset: Any) -> Pointer:
        return self + -np.asarray(offset)

    def to(self, dtype: Any) -> Any:
        return Pointer(self.address, dtype.item) if isinstance(dtype, PointerType) else wrapped(self.address.copy())


class Memory:
    """Device memory: named arrays in one run of bytes."""

    def __init__(self, size: int = 1 << 24):
        self.bytes = np.zeros(size, dtype=np.uint8)
        self.end = 256
        self.lines: set[int] = set()  # addresses whose lines were brought nearer
        self.prefetched: list[tuple[int, int, int]] = []  # (block, address, bytes), in any order

    def put(self, values: np.ndarray) -> Pointer:
        """Copy an array in; returns the pointer to its first element."""
        values = np.ascontiguousarray(values)
        at = self.end
        self.end += -(-values.nbytes // 256) * 256
        assert self.end <= len(self.bytes)
        self.bytes[at : at + values.nbytes] = values.reshape(-1).view(np.uint8)
        return Pointer(at, values.dtype)

    def get(self, pointer: Pointer, shape: tuple[int, ...]) -> np.ndarray:
        """Read an array back."""
        at, size = int(pointer.address), math.prod(shape) * pointer.item.itemsize
        return self.bytes[at : at + size].view(pointer.item).reshape(shape).copy()

    def set(self, pointer: Pointer, values: np.ndarray) -> None:
        """Write an array over what `put` placed there."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.bytes[int(pointer.address) :][: len(raw)] = raw

    def load(self, pointer: Pointer) -> Array:
        assert (pointer.address % pointer.item.itemsize == 0).all()
        return wrapped(self.bytes.view(pointer.item)[pointer.address // pointer.item.itemsize])

    def store(self, pointer: Pointer, values: Any, mask: Any) -> None:
        shape = pointer.address.shape
        keep = np.broadcast_to(np.asarray(mask).astype(bool), shape)
        values = np.broadcast_to(np.asarray(values), shape)
        at = pointer.address[keep] // pointer.item.itemsize
        assert (at >= 32).all(), "a store through a null pointer"
        self.bytes.view(pointer.item)[at] = values[keep].astype(pointer.item)


def widened(words: Array, DTYPE: Any, FORMAT: int) -> tuple[Array, ...]:
    """What byte_values.widened says in PTX: the bits of float16 numbers, pair by pair, too small by a power of two."""
    pairs = torch.from_numpy(np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4))
    raw = unpaired(pairs, ROUNDINGS["int8" if FORMAT == 1 else "fp8"])
    made = raw.view(torch.int8).half() * 2.0**-24 if FORMAT == 1 else raw.view(torch.float8_e4m3fn).half() * 2.0**-8
    values = made.numpy()
    assert DTYPE is np.float16
    return tuple(wrapped(values[..., byte].view(np.int16)) for byte in range(4))
