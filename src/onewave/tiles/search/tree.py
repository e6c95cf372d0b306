"""Walking a space of states: A*, which proves, and a beam, which only looks at the best few states of each depth."""

import heapq
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from onewave.tiles.search.spaces import Space, Tiles

S = TypeVar("S")

MAX_STATES = 2_000_000
"""States that one search keeps: a few hundred bytes each."""


@dataclass(frozen=True)
class Found:
    """tiles: a path with `loads` loads, None where none below the known one was found. bound: no path has fewer.

    done: the search ended by itself, so that with A* the better of the known path and this one is proven.
    """

    tiles: Tiles | None
    loads: int | None
    bound: int
    done: bool
    expanded: int


@dataclass
class Nodes(Generic[S]):
    """The states that were reached: how, and at which cost."""

    state: list[S]
    loads: list[int]
    parent: list[int]
    tiles: list[Tiles]

    def add(self, state: S, loads: int, parent: int, tiles: Tiles) -> int:
        self.state.append(state)
        self.loads.append(loads)
        self.parent.append(parent)
        self.tiles.append(tiles)
        return len(self.state) - 1

    def path(self, node: int) -> Tiles:
        parts: list[Tiles] = []
        while node >= 0:
            parts.append(self.tiles[node])
            node = self.parent[node]
        return tuple(tile for part in reversed(parts) for tile in part)


def astar(space: Space[S], known: int, deadline: float) -> Found:
    """Best-first search for a path with fewer than `known` loads, until time.monotonic() passes `deadline`.

    Of states with the same floor the one with the fewest undone tiles comes first. Stopped early, the least floor of
    the states that are still open bounds every path.
    """
    nodes: Nodes[S] = Nodes([], [], [], [])
    state, loads = space.first()
    root = nodes.add(state, loads, -1, (0,))
    best: dict[Hashable, int] = {space.key(state): loads}
    open_nodes = [(loads + space.floor(state), space.undone(state), root)]
    expanded = 0
    while open_nodes:
        least, undone, node = heapq.heappop(open_nodes)
        if least >= known:
            break
        if not undone:
            return Found(nodes.path(node), nodes.loads[node], nodes.loads[node], True, expanded)
        if time.monotonic() > deadline or len(best) > MAX_STATES:
            return Found(None, None, least, False, expanded)
        state, loads = nodes.state[node], nodes.loads[node]
        if best[space.key(state)] < loads:
            continue
        expanded += 1
        for after, cost, tiles in space.moves(state, False):
            total = loads + cost
            floor = total + space.floor(after)
            if floor >= known:
                continue
            key = space.key(after)
            if best.get(key, known) <= total:
                continue
            best[key] = total
            heapq.heappush(open_nodes, (floor, space.undone(after), nodes.add(after, total, node, tiles)))
    return Found(None, None, known, True, expanded)


def beam(space: Space[S], width: int, known: int, deadline: float) -> Found:
    """Keep the `width` best states of each number of computed tiles; a path with fewer than `known` loads, or none.

    Nothing is proven: bound is 0, and done says that the deadline did not cut it short.
    """
    nodes: Nodes[S] = Nodes([], [], [], [])
    state, loads = space.first()
    total = space.undone(state)
    levels: list[dict[Hashable, tuple[tuple[int, int, int], int]]] = [{} for _ in range(total + 1)]
    levels[total][space.key(state)] = ((0, 0, 0), nodes.add(state, loads, -1, (0,)))
    expanded = 0
    for undone in range(total, 0, -1):
        for _, node in heapq.nsmallest(width, levels[undone].values()):
            if time.monotonic() > deadline or len(nodes.state) > MAX_STATES:
                return Found(None, None, 0, False, expanded)
            expanded += 1
            state, loads = nodes.state[node], nodes.loads[node]
            for after, cost, tiles in space.moves(state, True):
                spent = loads + cost
                floor = spent + space.floor(after)
                if floor >= known:
                    continue
                level = levels[space.undone(after)]
                key = space.key(after)
                score = (floor, spent, space.live(after))
                if key not in level or score < level[key][0]:
                    level[key] = (score, nodes.add(after, spent, node, tiles))
        levels[undone] = {}
    if not levels[0]:
        return Found(None, None, 0, True, expanded)
    node = min(levels[0].values())[1]
    return Found(nodes.path(node), nodes.loads[node], 0, True, expanded)
