"""The spaces of tiles/search/spaces.py, begun in the middle of a game: some tiles done, the cache as they left it.

LRU and FIFO leave one cache behind. Belady leaves a choice: which panels it kept depends on what comes later, so the
first move of its space goes to every cache that the done tiles allow, each at its least cost.
"""

from collections.abc import Hashable, Iterator, Sequence

from onewave.tiles.search.spaces import BeladySpace, BeladyState, LruSpace, LruState, Tiles

MAX_CACHES = 20_000

Done = Sequence[tuple[int, int]]


class TooManyCaches(Exception):
    """Belady could have kept more sets of panels than this search is made for."""


class LruFrom(LruSpace):
    """done: (row, column) pairs, at least one."""

    def __init__(self, rows: int, cols: int, capacity: int, done: Done):
        super().__init__(rows, cols, capacity)
        self.done = done

    def first(self) -> tuple[LruState, int]:
        """The state behind the done tiles, and what they loaded."""
        resident: Tiles = ()
        loads = 0
        undone = (1 << (self.rows * self.cols)) - 1
        for row, col in self.done:
            undone &= ~(1 << (row * self.cols + col))
            for panel in (row, self.rows + col):
                resident, cost = self.touch(resident, panel)
                loads += cost
        return (undone, self.trimmed(undone, resident)), loads


class FifoFrom(LruFrom):
    """Panels leave in the order of their coming, but for the row panel that the running tile needs."""

    row = -1

    def touch(self, resident: Tiles, panel: int) -> tuple[Tiles, int]:
        """Touch a tile's row panel, or the column panel of the tile whose row panel was touched last."""
        pinned = -1 if panel < self.rows else self.row
        self.row = panel if panel < self.rows else -1
        if panel in resident:
            return resident, 0
        if len(resident) >= self.capacity:
            # No panel has a negative number, and those that no tile needs any more are all alike.
            place = next(i for i, other in enumerate(resident) if other != pinned or pinned < 0)
            resident = (*resident[:place], *resident[place + 1 :])
        return (*resident, panel), 1


Start = tuple[int, int, int]
ROOT: Start = (-1, 0, 0)


class BeladyFrom(BeladySpace):
    """done: (row, column) pairs, at least one. Raises TooManyCaches from moves."""

    def __init__(self, rows: int, cols: int, capacity: int, done: Done):
        super().__init__(rows, cols, capacity)
        self.done = done
        self.rest = (1 << (rows * cols)) - 1
        for row, col in done:
            self.rest &= ~(1 << (row * cols + col))

    def first(self) -> tuple[BeladyState, int]:
        """A state before all choices."""
        return ROOT, 0

    def undone(self, state: BeladyState) -> int:
        """Tiles still to compute; one more before the choice of a cache."""
        return self.rest.bit_count() + 1 if state == ROOT else super().undone(state)

    def floor(self, state: BeladyState) -> int:
        """At least so many loads are still to come."""
        return 0 if state == ROOT else super().floor(state)

    def key(self, state: BeladyState) -> Hashable:
        """The state up to renaming."""
        return ROOT if state == ROOT else super().key(state)

    def moves(self, state: BeladyState, narrow: bool) -> Iterator[tuple[BeladyState, int, Tiles]]:
        """Next states; from the first one, every cache that the done tiles may have left."""
        if state != ROOT:
            yield from super().moves(state, narrow)
            return
        for (rows, cols), loads in self.caches().items():
            after, free = self.rest, list[int]()
            for tile in range(self.rows * self.cols):
                row, col = divmod(tile, self.cols)
                if after >> tile & 1 and rows >> row & 1 and cols >> col & 1:
                    free.append(tile)
            for tile in free:
                after &= ~(1 << tile)
            yield self.trimmed(after, rows, cols), loads, tuple(free)

    def caches(self) -> dict[tuple[int, int], int]:
        """Sets of resident rows and columns behind the done tiles, with the fewest loads that lead to each."""
        now: dict[tuple[int, int], int] = {(0, 0): 0}
        for row, col in self.done:
            found: dict[tuple[int, int], int] = {}
            for (rows, cols), loads in now.items():
                wanted = (rows | 1 << row, cols | 1 << col)
                cost = loads + (wanted[0] != rows) + (wanted[1] != cols)
                for kept in self.fitting(wanted, (1 << row, 1 << col)):
                    if cost < found.get(kept, cost + 1):
                        found[kept] = cost
            if len(found) > MAX_CACHES:
                raise TooManyCaches
            now = found
        return now

    def fitting(self, wanted: tuple[int, int], pinned: tuple[int, int]) -> set[tuple[int, int]]:
        """The ways to bring a cache down to its capacity without losing what the running tile needs."""
        found = {wanted}
        while True:
            rows, cols = next(iter(found))
            if rows.bit_count() + cols.bit_count() <= self.capacity:
                return found
            smaller: set[tuple[int, int]] = set()
            for rows, cols in found:
                smaller |= {(rows ^ bit, cols) for bit in ones(rows & ~pinned[0])}
                smaller |= {(rows, cols ^ bit) for bit in ones(cols & ~pinned[1])}
            found = smaller


def ones(mask: int) -> Iterator[int]:
    """Each one of a mask as a mask of its own."""
    while mask:
        yield mask & -mask
        mask &= mask - 1
