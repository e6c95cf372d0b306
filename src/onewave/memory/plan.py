"""A static plan: offsets into one buffer for values whose lifetimes are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onewave.base.errors import InvalidArgumentError
from onewave.memory.allocator import ALIGNMENT


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
    sizes = np.array([-(-value.num_bytes // ALIGNMENT) * ALIGNMENT for value in values], dtype=np.int64)
    first, last = (np.array([value[part] for value in values], dtype=np.int64) for part in (1, 2))
    offsets = np.zeros(len(values), dtype=np.int64)
    # Placed ones in the order of their offsets, so that gaps are found in one pass.
    placed = np.empty(0, dtype=np.int64)
    for index in np.argsort(-sizes, kind="stable"):
        beside = placed[(first[placed] <= last[index]) & (first[index] <= last[placed])]
        begins = offsets[beside]
        # Where all before each one end; the last entry: where all end.
        free = np.concatenate(([0], np.maximum.accumulate(begins + sizes[beside])))
        gaps = begins - free[:-1]
        fitting = np.flatnonzero(gaps >= sizes[index])
        offsets[index] = free[fitting[np.argmin(gaps[fitting])]] if len(fitting) else free[-1]
        placed = np.insert(placed, np.searchsorted(offsets[placed], offsets[index]), index)
    total = int((offsets + sizes).max(initial=0))
    return Plan(tuple(offsets.tolist()), total, _peak_of(sizes, first, last))


def _peak_of(
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]],
    first: np.ndarray[tuple[int], np.dtype[np.int64]],
    last: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> int:
    # At a step values begin before those of the step before have ended.
    steps = np.concatenate((2 * first, 2 * last + 1))
    changes = np.concatenate((sizes, -sizes))
    return int(np.cumsum(changes[np.argsort(steps, kind="stable")]).max(initial=0))
