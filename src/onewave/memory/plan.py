"""A static plan: offsets into one buffer for values whose lifetimes are known beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from onewave.base.errors import InvalidArgumentError
from onewave.memory.allocator import ALIGNMENT

_STRETCHES = 1024


class Lifetime(NamedTuple):
    """A value of num_bytes that is written at step `first` and read at step `last` for the last time."""

    num_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Plan:
    """offsets: of each value, in bytes, multiples of ALIGNMENT. total_bytes: of the buffer. live_bytes: the most that
    live at one step, which no plan is below."""

    offsets: tuple[int, ...]
    total_bytes: int
    live_bytes: int


def plan_offsets(values: Sequence[Lifetime]) -> Plan:
    """Place values that live at the same step side by side, largest first, each in the narrowest gap that holds it.

    Raises InvalidArgumentError for a size or a lifetime below zero. Source: Pisarchyk & Lee 2020, arXiv:2001.03288.
    """
    for value in values:
        if value.num_bytes < 0 or value.last < value.first:
            raise InvalidArgumentError("lifetime", got=str(value), allowed="num_bytes >= 0, first <= last")
    sizes = [-(-value.num_bytes // ALIGNMENT) * ALIGNMENT for value in values]
    offsets = [0] * len(values)
    begin, end = min((v.first for v in values), default=0), max((v.last for v in values), default=0)
    # Placed values by the stretches of time that they live in: most live in one or two.
    stretch = max(1, (end - begin) // _STRETCHES)
    placed: list[list[int]] = [[] for _ in range((end - begin) // stretch + 1)]
    for index in sorted(range(len(values)), key=lambda index: -sizes[index]):
        value = values[index]
        stretches = placed[(value.first - begin) // stretch : (value.last - begin) // stretch + 1]
        beside = {
            (offsets[other], sizes[other])
            for stretch_of in stretches
            for other in stretch_of
            if values[other].first <= value.last and value.first <= values[other].last
        }
        offsets[index] = _narrowest_gap(sorted(beside), sizes[index])
        for stretch_of in stretches:
            stretch_of.append(index)
    total = max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
    return Plan(tuple(offsets), total, _peak_of(values, sizes))


def _narrowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    """The offset of the narrowest gap between (offset, size) pairs that holds `size`, or of what lies behind all."""
    best, best_gap, free = None, 0, 0
    for offset, length in taken:
        gap = offset - free
        if gap >= size and (best is None or gap < best_gap):
            best, best_gap = free, gap
        free = max(free, offset + length)
    return free if best is None else best


def _peak_of(values: Sequence[Lifetime], sizes: Sequence[int]) -> int:
    """The most bytes that live at one step."""
    # At a step values begin before those of the step before have ended.
    changes = [(2 * value.first, size) for value, size in zip(values, sizes, strict=True)]
    changes += [(2 * value.last + 1, -size) for value, size in zip(values, sizes, strict=True)]
    return max(accumulate(size for _, size in sorted(changes)), default=0)
