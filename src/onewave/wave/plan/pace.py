"""Pace of a thread block's weight loads, stage by stage. Pure Python.

Loads in flight lengthen the queues in front of L2, which every hand-off passes, so there are no more than memory needs.
While attention runs the ring fills up and waits for the next product. Tiles that come meanwhile have slack, and are
loaded one after another. All numbers are measured on H200s (docs/log/wave.md, "The pace, with keys in the stream").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.weight_formats import NESTED
from onewave.wave.plan.layout import COMPACT_BYTES, TILE_BYTES, TileShape
from onewave.wave.plan.operations import AnyOperation, Attention, Operation
from onewave.wave.plan.steps import ProductStep, Step

Ints = npt.NDArray[np.int64]

# Tiles of 16 KiB up to which a worker's step is short: it takes about as long as the hand-off before it.
_SHORT = 8
# Tiles of 16 KiB in flight: for one sequence, where the output projection merges attention's splits, by the tiles held
# in registers; for two sequences; for all else. More delay hand-offs, fewer leave memory idle.
_FLIGHT_OF_ONE, _FLIGHT_OF_TWO, _FLIGHT = {0: 4, 2: 4, 4: 5}, 4, 3
# Tiles of 13 KiB of compact weights in flight.
_FLIGHT_OF_COMPACT = 4
# See sooner: where the output projection merges, and for all else, by the tiles held; for one-byte and compact weights.
_SOONER_MERGING, _SOONER, _SOONER_OF_BYTES = {0: 2, 2: 3, 4: 7}, {0: 4, 2: 4, 4: 6}, 2
# The same of int8 weights beside activations in digits, which are multiplied as fast as they come.
_FLIGHT_OF_DIGITS, _SOONER_OF_DIGITS = 3, 4


@dataclass(frozen=True)
class Pace:
    """How a thread block loads its weights. flight: tiles in flight. sooner: tiles before a full ring at which the slow
    pace ends, after attention."""

    flight: int
    sooner: int


def pace_of(shape: TileShape, operations: Mapping[str, AnyOperation]) -> Pace:
    """Choose the pace of a launch of these operations."""
    attends = any(isinstance(operation, Attention) for operation in operations.values())
    merges = any(isinstance(operation, Operation) and operation.merges for operation in operations.values())
    return Pace(in_flight(shape, attends=attends, merges=merges), sooner(shape, merges=merges))


def in_flight(shape: TileShape, *, attends: bool, merges: bool) -> int:
    """Return the weight tiles in flight of a thread block. attends: a decode step. merges: its output projection merges
    attention's splits."""
    if shape.weight_bytes == COMPACT_BYTES:
        return _FLIGHT_OF_COMPACT // shape.images
    if shape.weight_bytes == 1 and shape.digits:
        return _FLIGHT_OF_DIGITS * TILE_BYTES // shape.tile_bytes
    of_two = attends and shape.batch == 2 and shape.weight_bytes == 2
    tiles = _FLIGHT_OF_ONE[shape.held] if merges else _FLIGHT_OF_TWO if of_two else _FLIGHT
    return tiles * TILE_BYTES // shape.tile_bytes


def sooner(shape: TileShape, *, merges: bool) -> int:
    """Return how many weight tiles before a full ring the slow pace ends. merges: as in in_flight."""
    tiles = (_SOONER_MERGING if merges else _SOONER)[shape.held] if shape.weight_bytes == 2 else _SOONER_OF_BYTES
    if shape.weight_bytes == 1 and shape.digits:
        tiles = _SOONER_OF_DIGITS
    return tiles * TILE_BYTES // shape.tile_bytes


def tiles_before_attention(operations: Mapping[str, AnyOperation], shares: Mapping[str, Ints]) -> dict[str, int]:
    """Map each tensor that attention makes to the fewest tiles of any worker of the product that makes its queries.

    shares: tiles of each worker, by phase.
    """
    makers = {operation.target: name for name, operation in operations.items() if isinstance(operation, Operation)}
    attentions = [operation for operation in operations.values() if isinstance(operation, Attention)]
    return {operation.combined: int(shares[makers[operation.source]].min()) for operation in attentions}


def slack_runs(
    lane: Sequence[AnyOperation], steps: Sequence[Step], attended: Mapping[str, int], shape: TileShape, pace: Pace
) -> list[int]:
    """Return the first and the last of each run of a lane's tiles that have slack.

    They are the tiles after attention, with those of the product there if it is short, and some before it, if that is
    short as well (_earlier). None beside one sequence's digits in smaller tiles: one of these at a time is too slow.
    """
    if shape.digits and shape.batch == 1 and shape.weight_bytes < NESTED.weight_bytes and shape.tile_bytes < TILE_BYTES:
        return []
    short = _SHORT * TILE_BYTES // shape.tile_bytes
    found: list[int] = []
    count = 0
    for operation, step in zip(lane, steps, strict=True):
        if not isinstance(operation, Operation) or not isinstance(step, ProductStep):
            continue
        mine = step.weight_tiles
        if operation.source in attended:
            merges = operation.merges is not None
            before = attended[operation.source]
            first = count - (_earlier(before, shape, merges=merges) if before <= short else 0)
            last = count + min(shape.held, mine) + shape.ring - 1 + (mine if mine <= short else 0)
            found += [first, last - pace.sooner]
        count += mine
    return found


def _earlier(before: int, shape: TileShape, *, merges: bool) -> int:
    """Return how many of the `before` tiles that every worker has of the product before attention have slack. Tiles
    beyond `before` have none: attention waits for the workers that have them."""
    if shape.weight_bytes < 2:
        return before
    return min(before, shape.batch // 4) if shape.held == 2 and not merges else 0
