"""Local search: change a piece of an order, keep the change unless it costs more (or rarely even then)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator

from onewave.tiles.search.starts import Path


def improve(
    path: Path, loads_of: Callable[[Path], int], bound: int, deadline: float, max_tries: int, seed: int = 0
) -> Iterator[tuple[Path, int]]:
    """Yield ever better orders than `path`, whose first tile stays where it is, until the bound or the deadline.

    Changes: a piece reversed, a piece moved (either way round), two tiles swapped. Simulated annealing: a change that
    costs d more loads is taken with probability exp(-d / t), t falling from 0.5 to 0.05 over the time there is.
    """
    chance = random.Random(seed)
    now, cost = list(path), loads_of(path)
    best = cost
    began = time.monotonic()
    span = max(deadline - began, 1e-9)
    for tried in range(max_tries):
        left = 1 - max(tried / max_tries, (time.monotonic() - began) / span)
        if best <= bound or left <= 0 or len(path) < 3:
            return
        changed = _changed(now, chance)
        loads = loads_of(changed)
        if loads <= cost or chance.random() < math.exp((cost - loads) / (0.05 + 0.45 * left)):
            now, cost = changed, loads
        if loads < best:
            best = loads
            yield list(changed), loads


def _changed(path: Path, chance: random.Random) -> Path:
    size = len(path)
    if chance.random() < 0.2:
        a, b = chance.randrange(1, size), chance.randrange(1, size)
        other = list(path)
        other[a], other[b] = other[b], other[a]
        return other
    # Mostly short pieces: a row or a column's worth.
    first = chance.randrange(1, size)
    last = min(size, first + 1 + int(chance.expovariate(1 / max(2.0, math.sqrt(size)))))
    piece, rest = path[first:last], path[:first] + path[last:]
    if chance.random() < 0.5:
        piece = piece[::-1]
        if chance.random() < 0.5:
            return path[:first] + piece + path[last:]
    at = chance.randint(1, len(rest))
    return rest[:at] + piece + rest[at:]
