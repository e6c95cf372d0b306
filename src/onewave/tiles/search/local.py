"""Local search: change a piece of an order, keep the change unless it costs more (or rarely even then)."""

import math
import random
import time
from collections.abc import Callable, Iterator

from onewave.tiles.search.starts import Path


def improve(
    path: Path,
    loads_of: Callable[[Path], int],
    bound: int,
    max_tries: int,
    *,
    deadline: float = math.inf,
    fixed: int = 1,
) -> Iterator[tuple[Path, int]]:
    """Yield ever better orders than `path`, whose first `fixed` tiles stay, until the bound, the tries or the deadline.

    Changes: a piece reversed, a piece moved (either way round), two tiles swapped. Simulated annealing: a change that
    costs d more loads is taken with probability exp(-d / t), t falling from 0.5 to 0.05 over the time there is. The
    seed is fixed.
    """
    chance = random.Random(0)
    now, cost = list(path), loads_of(path)
    best = cost
    began = time.monotonic()
    span = max(deadline - began, 1e-9)
    for tried in range(max_tries):
        left = 1 - max(tried / max_tries, (time.monotonic() - began) / span)
        if best <= bound or left <= 0 or len(path) - fixed < 2:
            return
        changed = _changed(now, fixed, chance)
        loads = loads_of(changed)
        if loads <= cost or chance.random() < math.exp((cost - loads) / (0.05 + 0.45 * left)):
            now, cost = changed, loads
        if loads < best:
            best = loads
            yield list(changed), loads


def _changed(path: Path, fixed: int, chance: random.Random) -> Path:
    size = len(path)
    if chance.random() < 0.2:
        a, b = chance.randrange(fixed, size), chance.randrange(fixed, size)
        other = list(path)
        other[a], other[b] = other[b], other[a]
        return other
    # Mostly short pieces: a row or a column's worth.
    first = chance.randrange(fixed, size)
    last = min(size, first + 1 + int(chance.expovariate(1 / max(2.0, math.sqrt(size)))))
    piece, rest = path[first:last], path[:first] + path[last:]
    if chance.random() < 0.5:
        piece = piece[::-1]
        if chance.random() < 0.5:
            return path[:first] + piece + path[last:]
    at = chance.randint(fixed, len(rest))
    return rest[:at] + piece + rest[at:]
