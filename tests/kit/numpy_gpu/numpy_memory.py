"""Tensors, pointers and device memory as NumPy arrays, for gluon_in_numpy."""

from __future__ import annotations

import math
import types
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from onewave.base.weight_formats import ROW_ROUNDINGS
from onewave.wave.weights.rounding import unpaired

DTYPES: dict[torch.dtype, Any] = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}


def as_numpy(values: Tensor) -> np.ndarray:
    """16-bit numbers, in NumPy."""
    return values.contiguous().view(torch.int16).numpy().view(DTYPES[values.dtype])


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

    def permute(self, axes: tuple[int, ...]) -> Array:
        return wrapped(np.asarray(self).transpose(axes))

    def __floordiv__(self, other: Any) -> Array:
        assert (np.asarray(self) >= 0).all(), "a negative number is divided, which a GPU rounds otherwise"
        return wrapped(np.asarray(self) // np.asarray(other))

    def __mod__(self, other: Any) -> Array:
        assert (np.asarray(self) >= 0).all(), "a negative number is divided, which a GPU rounds otherwise"
        return wrapped(np.asarray(self) % np.asarray(other))

    def __iadd__(self, other: Any) -> Any:
        return self + other  # a tensor never changes: another name for it keeps its value


def wrapped(values: Any) -> Array:
    if type(values) is Array:
        return values
    return (values if isinstance(values, np.ndarray) else np.asarray(values)).view(Array)


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
    """byte_values.widened without PTX: the bits of float16 numbers, pair by pair, too small by a power of two."""
    pairs = torch.from_numpy(np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4))
    raw = unpaired(pairs, ROW_ROUNDINGS["int8" if FORMAT == 1 else "fp8"])
    made = raw.view(torch.int8).half() * 2.0**-24 if FORMAT == 1 else raw.view(torch.float8_e4m3fn).half() * 2.0**-8
    values = made.numpy()
    assert DTYPE is np.float16
    return tuple(wrapped(values[..., byte].view(np.int16)) for byte in range(4))


def nibbles(words: Array, SIGNED: int, DTYPE: Any) -> tuple[Array, ...]:
    """nibble_values.nibbles without PTX: four numbers of the bytes' lower nibbles, then of the upper."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4).astype(np.int16)
    unit = 2.0**-24 if DTYPE is np.float16 else 2.0**-133
    places = [(raw[..., byte] & mask) - SIGNED * (8 if mask == 15 else 128) for mask in (15, 240) for byte in range(4)]
    return tuple(wrapped((place * unit).astype(DTYPE).view(np.int16)) for place in places)


def nibble_bytes(values: Array) -> tuple[Array, ...]:
    """digits.nibble_bytes without PTX."""
    raw = np.asarray(values).view(np.uint8).astype(np.int16)
    return tuple(wrapped((16 * (nibble - 8)).astype(np.int8)) for nibble in (raw & 15, raw >> 4))


def digit_words(*numbers: Array) -> tuple[Array, ...]:
    """digits.digit_words without PTX."""
    whole = np.stack([np.asarray(number).astype(np.int16) for number in numbers], axis=-1).astype(int)
    high = whole >> 8
    low = whole - 128 - (high << 8)
    return tuple(wrapped(digit.astype(np.int8).view(np.int32)[..., 0]) for digit in (high, low))


def unsigned_bytes(words: Array) -> tuple[Array, ...]:
    """nibble_values.unsigned_bytes without PTX."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4).astype(np.int16)
    return tuple(wrapped(raw[..., byte]) for byte in range(4))


def step_numbers(words: Array, SIXTEENTHS: int) -> tuple[Array, ...]:
    """operands.step_numbers without PTX."""
    raw = np.ascontiguousarray(words).view(np.int8).reshape(*words.shape, 4).astype(np.float32)
    return tuple(wrapped(raw[..., at] / np.float32(16 if SIXTEENTHS and at % 2 == 0 else 1)) for at in range(4))


def unsigned_nibbles(values: Array) -> tuple[Array, ...]:
    """nested_digits.unsigned_nibbles without PTX."""
    raw = np.asarray(values).view(np.uint8)
    return tuple(wrapped(nibble.view(np.int8)) for nibble in (raw & 15, raw >> 4))


def six_bytes(*planes: Array) -> tuple[Array, ...]:
    """nested_digits.six_bytes without PTX."""
    first, second, third = (np.asarray(plane).view(np.uint8) for plane in planes)
    fourth = first << 6 | (second & 3) << 4 | (third & 3) << 2
    return tuple(wrapped((byte & 252).view(np.int8)) for byte in (first, second, third, fourth))


def every_other(digits: Array) -> tuple[Array, ...]:
    """nested_digits.every_other without PTX."""
    first = np.arange(digits.shape[1])[:, None] % 2 == 0
    return tuple(wrapped(np.where(kept, digits, np.int8(0))) for kept in (first, ~first))


def step_integers(words: Array) -> tuple[Array, ...]:
    """nested_digits.step_integers without PTX."""
    raw = np.ascontiguousarray(words).view(np.int8).reshape(*words.shape, 4).astype(np.int32)
    return tuple(wrapped(raw[..., at]) for at in range(4))


def two_integers(pairs: Array) -> tuple[Array, ...]:
    """halves.two_integers without PTX."""
    return tuple(wrapped(byte.astype(np.int8).astype(np.int32)) for byte in (np.asarray(pairs) & 255, pairs >> 8))


def wide_bytes(values: Array) -> Array:
    """halves.wide_bytes without PTX."""
    # 16 columns, 8 of them, column of a pair, half of 16 rows
    cut = (np.asarray(values) ^ np.int8(-128)).reshape(*values.shape[:-1], -1, 2, 2, 2, 2)
    return wrapped(np.moveaxis(cut, (-3, -1, -2, -4), (-4, -3, -2, -1)).reshape(values.shape))


def sixes(first: Array, second: Array, third: Array, DTYPE: Any) -> tuple[Array, ...]:
    """six_bits.sixes without PTX."""
    planes = [np.ascontiguousarray(word).view(np.int8) for word in (first, second, third)]
    quads = [quad.reshape(*first.shape, 2, 2) for quad in six_bytes(*planes)]  # column of a pair, 16 columns
    unit = 2.0**-24 if DTYPE is np.float16 else 2.0**-133
    made = [
        (quad[..., sixteen].astype(int) * unit).astype(DTYPE).view(np.int16) for sixteen in range(2) for quad in quads
    ]
    return tuple(wrapped(pair[..., column]) for pair in made for column in range(2))


def both(words: Array) -> tuple[Array, ...]:
    """nibble_values.both without PTX."""
    raw = np.ascontiguousarray(words).view(np.int16).reshape(*words.shape, 2)
    return wrapped(raw[..., 0]), wrapped(raw[..., 1])


def _halves_of_bytes(words: Array, KV: int) -> np.ndarray:
    """The float16 numbers of each word's four bytes, on a last axis."""
    raw = np.ascontiguousarray(words).view(np.int8).reshape(*words.shape, 4)
    return (raw if KV == 1 else raw.view(ml_dtypes.float8_e4m3fn)).astype(np.float16)


def widened_pairs(words: Array, DTYPE: Any, KV: int, NEIGHBOURS: int) -> tuple[Array, ...]:
    """Widen as decode attention's widen.widened_pairs does in PTX."""
    raw = np.ascontiguousarray(words).view(np.int8).reshape(*words.shape[:-1], -1, 2, 2)  # two words, their bytes
    values = (raw if KV == 1 else raw.view(ml_dtypes.float8_e4m3fn)).astype(DTYPE)
    pairs = (values[..., half, :] if NEIGHBOURS else values[..., half] for half in range(2))
    return tuple(wrapped(pair.reshape(words.shape)) for pair in pairs)


def half_pairs(words: Array, KV: int) -> tuple[Array, ...]:
    """byte_cache.half_pairs without PTX."""
    pairs = _halves_of_bytes(words, KV).view(np.int32)
    return wrapped(pairs[..., 0]), wrapped(pairs[..., 1])


def key_pairs(even: Array, odd: Array, KV: int) -> tuple[Array, ...]:
    """byte_cache.key_pairs without PTX."""
    pairs = np.stack((_halves_of_bytes(even, KV), _halves_of_bytes(odd, KV)), -1).view(np.int32)[..., 0]
    return tuple(wrapped(pairs[..., number]) for number in range(4))


def raised(words: Array, DTYPE: Any, FORMAT: int) -> Array:
    """byte_values.raised without PTX."""
    if FORMAT == 0 or DTYPE is np.float16:
        return words
    values = np.ascontiguousarray(words).view(DTYPE).astype(np.float64) * 2.0**64
    return wrapped(values.astype(DTYPE).view(np.int32))


def halves(word: Array) -> np.ndarray:
    """Halves of each word, which stands there twice: the lower one the first time and the upper one the second."""
    return (np.asarray(word).astype(np.int64) >> np.array([0, 16])) & 0xFFFF


def compact_numbers(words: tuple[Array, ...], last: Array) -> tuple[Array, ...]:
    """compact_values.compact_numbers without PTX: compact.py's layout, undone."""
    planes, beside = np.stack([halves(word) for word in words]).reshape(3, 4, *last.shape), halves(last)
    numbers, gaps = planes & 0x8FFF, (planes >> 12) & 7
    made: list[np.ndarray] = []
    for group in range(4):
        made += list(numbers[:, group])
        if group < 3:
            parts = (gaps[0, group], gaps[1, group], gaps[2, group], gaps[group, 3])
            sign = (beside >> (12 + group)) & 1
            made.append(sign << 15 | parts[0] << 9 | parts[1] << 6 | parts[2] << 3 | parts[3])
    made.append(beside & 0x8FFF)
    return tuple(wrapped(number.astype(np.uint16).view(np.int16)) for number in made)


def listed_numbers(thread: Array, word: Array) -> tuple[Array, ...]:
    """compact_values.listed_numbers without PTX."""
    bits = np.asarray(word).astype(np.int64)
    assert (bits == bits.flat[0]).all()
    mine, number = np.asarray(thread) == (bits >> 5) & 127, ((bits >> 16) & 0xFFFF).astype(np.uint16).view(np.int16)
    places = 2 * np.arange(16)[:, None] + np.arange(2)
    return tuple(wrapped(np.where(mine & (bits & 31 == place), number, np.int16(0))) for place in places)


_WITHOUT_PTX = (
    widened, widened_pairs, raised, nibbles, unsigned_bytes, both, step_numbers, sixes, half_pairs, key_pairs,
    compact_numbers, listed_numbers, nibble_bytes, digit_words, unsigned_nibbles, six_bytes, every_other, step_integers,
    two_integers, wide_bytes,
)  # fmt: skip
WITHOUT_PTX: dict[str, Any] = {function.__name__: function for function in _WITHOUT_PTX}
"""NumPy in place of PTX, by the name of the kernel's function."""


def multiplied(a: Array, b: Array) -> Array:
    """The product of 16-bit operands, exact but for its rounding to float32: products of subnormal numbers as well; of
    bytes, int32."""
    if a.dtype == np.int8:
        return wrapped(np.matmul(np.asarray(a, np.int32), np.asarray(b, np.int32)))
    return wrapped(np.matmul(np.asarray(a, np.float64), np.asarray(b, np.float64)).astype(np.float32))
