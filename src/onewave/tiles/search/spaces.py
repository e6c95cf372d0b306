"""State spaces of a search for the least panel traffic: states (undone tiles, resident panels), and their moves.

Tiles are bits of one integer, row-major; panels are numbered as in tiles/search/panels.py, rows first. Both spaces
start with tile (0, 0) done. Loads do not depend on how rows or columns are numbered, so any other start is a matter of
renaming. A panel that no undone tile needs any more is dropped from the state wherever that changes nothing to come.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Protocol, TypeVar

from onewave.tiles.search.panel_bound import loads_to_come

Tiles = tuple[int, ...]
"""Tiles as row * cols + column, in the order of computing them."""

BeladyState = tuple[int, int, int]
"""(undone tiles, resident rows, resident columns), each a set of bits."""

LruState = tuple[int, Tiles]
"""(undone tiles, resident panels from the least to the most recently used, -1 for one that no tile needs any more)."""

S = TypeVar("S")
DEAD = -1


class Space(Protocol[S]):
    """States and moves. Two states with equal keys have the same future; a key may also fail to see that they do."""

    def first(self) -> tuple[S, int]:
        """The state after the first tile, and its loads."""
        ...

    def moves(self, state: S, narrow: bool) -> Iterator[tuple[S, int, Tiles]]:
        """Next states, the loads of getting there and the tiles computed. narrow: only the promising ones."""
        ...

    def floor(self, state: S) -> int:
        """At least so many loads are still to come."""
        ...

    def key(self, state: S) -> Hashable:
        """The state with its rows and columns renamed to a common form."""
        ...

    def undone(self, state: S) -> int:
        """Tiles still to compute."""
        ...

    def live(self, state: S) -> int:
        """Absent panels that some undone tile needs."""
        ...


class Grid:
    """Masks of a rows x cols grid of bits."""

    def __init__(self, rows: int, cols: int, capacity: int):
        self.rows, self.cols, self.capacity = rows, cols, capacity
        self.row_bits = (1 << cols) - 1
        one_column = sum(1 << (row * cols) for row in range(rows))
        self.row_masks = [self.row_bits << (row * cols) for row in range(rows)]
        self.column_masks = [one_column << col for col in range(cols)]
        self.masks = self.row_masks + self.column_masks

    def row_of(self, undone: int, row: int) -> int:
        return (undone >> (row * self.cols)) & self.row_bits

    def column_of(self, undone: int, col: int) -> int:
        """A column's undone tiles; not packed, but equal exactly where the columns are."""
        return (undone & self.column_masks[col]) >> col

    def needed(self, undone: int, rows: int, cols: int) -> tuple[int, int]:
        """How many absent panels some undone tile needs, and the larger number of rows or columns with undone tiles.

        rows, cols: the resident ones, as bits.
        """
        absent = tall = wide = 0
        for row, mask in enumerate(self.row_masks):
            if undone & mask:
                tall += 1
                absent += not rows >> row & 1
        for col, mask in enumerate(self.column_masks):
            if undone & mask:
                wide += 1
                absent += not cols >> col & 1
        return absent, max(tall, wide)

    def different(self, undone: int, rows: Iterable[int], cols: Iterable[int]) -> tuple[list[int], list[int]]:
        """One row of each set with the same undone tiles, and one column; those with none are left out."""
        masks = {self.row_of(undone, row): row for row in rows}
        columns = {self.column_of(undone, col): col for col in cols}
        return [r for mask, r in masks.items() if mask], [c for mask, c in columns.items() if mask]

    def canonical(self, undone: int, rows: list[int], cols: list[int]) -> tuple[Tiles, Tiles]:
        """The undone tiles with absent rows and columns sorted behind the resident ones, which keep their order.

        rows, cols: the resident ones. Interchangeable columns get the same place wherever the resident rows or their
        counts tell them apart; what is left open costs time, never correctness.
        """
        taken = set(cols)
        packed = [self.row_of(undone, row) for row in rows]

        def column_key(col: int) -> tuple[int, int]:
            seen = 0
            for mask in packed:
                seen = 2 * seen + (mask >> col & 1)
            return seen, (undone & self.column_masks[col]).bit_count()

        order = [*cols, *sorted((col for col in range(self.cols) if col not in taken), key=column_key)]

        def renamed(mask: int) -> int:
            return sum((mask >> col & 1) << place for place, col in enumerate(order)) if mask else 0

        taken = set(rows)
        rest = sorted(renamed(self.row_of(undone, row)) for row in range(self.rows) if row not in taken)
        return tuple(renamed(mask) for mask in packed), tuple(rest)


def bits(mask: int) -> Iterator[int]:
    """The places of a mask's ones."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class BeladySpace(Grid):
    """The best cache for an order chosen with it: each load of a panel also chooses which one goes.

    Every undone tile whose two panels are resident is computed at once, for that costs nothing and rules nothing out.
    So a move loads one panel that makes tiles possible, or two where either alone would make none. Loading a panel
    earlier than its first use never helps.
    """

    def __init__(self, rows: int, cols: int, capacity: int):
        super().__init__(rows, cols, capacity)
        self.spread_of: dict[int, int] = {}

    def first(self) -> tuple[BeladyState, int]:
        undone = ((1 << (self.rows * self.cols)) - 1) & ~1
        return self.trimmed(undone, 1, 1), 2

    def trimmed(self, undone: int, rows: int, cols: int) -> BeladyState:
        for row in bits(rows):
            if not undone & self.row_masks[row]:
                rows ^= 1 << row
        for col in bits(cols):
            if not undone & self.column_masks[col]:
                cols ^= 1 << col
        return undone, rows, cols

    def undone(self, state: BeladyState) -> int:
        return state[0].bit_count()

    def live(self, state: BeladyState) -> int:
        return self.needed(*state)[0]

    def floor(self, state: BeladyState) -> int:
        undone, rows, cols = state
        absent, side = self.needed(undone, rows, cols)
        return max(absent, loads_to_come(undone.bit_count(), rows.bit_count(), cols.bit_count(), side, self.capacity))

    def key(self, state: BeladyState) -> Hashable:
        undone, rows, cols = state
        # Resident panels stand by what they still need: their slots are all alike.
        near = sorted(bits(rows), key=lambda row: (self.row_of(undone, row).bit_count(), self.row_of(undone, row)))
        beside = sorted(bits(cols), key=lambda col: (self.column_of(undone, col).bit_count(), col))
        forms = self.canonical(undone, near, beside)
        return len(near), len(beside), tuple(sorted(forms[0])), forms[1]

    def moves(self, state: BeladyState, narrow: bool) -> Iterator[tuple[BeladyState, int, Tiles]]:
        undone, rows, cols = state
        new_rows, new_cols = self.different(
            undone,
            (row for row in range(self.rows) if not rows >> row & 1),
            (col for col in range(self.cols) if not cols >> col & 1),
        )
        room = self.capacity - rows.bit_count() - cols.bit_count()
        for kept_rows, kept_cols in self.kept(state, 1 - room, narrow):
            idle_rows: list[int] = []
            idle_cols: list[int] = []
            for row in new_rows:
                after = undone & ~(kept_cols << (row * self.cols))
                if after == undone:
                    idle_rows.append(row)
                else:
                    yield self.arrive(undone, after, kept_rows | 1 << row, kept_cols, 1)
            for col in new_cols:
                after = undone & ~(self.spread(kept_rows) << col)
                if after == undone:
                    idle_cols.append(col)
                else:
                    yield self.arrive(undone, after, kept_rows, kept_cols | 1 << col, 1)
            if (idle_rows and idle_cols) and (
                not narrow or len(idle_rows) + len(idle_cols) == len(new_rows + new_cols)
            ):
                yield from self.pairs((undone, kept_rows, kept_cols), idle_rows, idle_cols, min(1, room - 1))

    def pairs(
        self, state: BeladyState, idle_rows: list[int], idle_cols: list[int], room: int
    ) -> Iterator[tuple[BeladyState, int, Tiles]]:
        """Load a row and a column that make no tile possible alone. room: slots beside the first of the two."""
        undone = state[0]
        for rows, cols in self.kept(state, 1 - room, False):
            for row in idle_rows:
                for col in idle_cols:
                    if undone >> (row * self.cols + col) & 1:
                        after = undone & ~((cols | 1 << col) << (row * self.cols)) & ~(self.spread(rows) << col)
                        yield self.arrive(undone, after, rows | 1 << row, cols | 1 << col, 2)

    def kept(self, state: BeladyState, victims: int, narrow: bool) -> Iterator[tuple[int, int]]:
        """Yield the panels that stay resident after making room: everything, or all but one of each kind of panel."""
        undone, rows, cols = state
        if victims <= 0:
            yield rows, cols
            return
        out_rows, out_cols = self.different(undone, bits(rows), bits(cols))
        choice = [(self.row_of(undone, row).bit_count(), 0, row) for row in out_rows]
        choice += [(self.column_of(undone, col).bit_count(), 1, col) for col in out_cols]
        for _, side, panel in sorted(choice)[: 3 if narrow else len(choice)]:
            yield (rows, cols & ~(1 << panel)) if side else (rows & ~(1 << panel), cols)

    def spread(self, rows: int) -> int:
        """The tiles of column 0 in these rows."""
        found = self.spread_of.get(rows)
        if found is None:
            if len(self.spread_of) > 100_000:
                self.spread_of.clear()
            found = self.spread_of[rows] = sum(1 << (row * self.cols) for row in bits(rows))
        return found

    def arrive(self, before: int, after: int, rows: int, cols: int, loads: int) -> tuple[BeladyState, int, Tiles]:
        return self.trimmed(after, rows, cols), loads, tuple(bits(before & ~after))


class LruSpace(Grid):
    """A cache that evicts the least recently used panel; a tile touches its row panel, then its column panel.

    A move computes one tile. The oldest panels of a state are dropped when no tile needs them: they go first anyway.
    """

    def first(self) -> tuple[LruState, int]:
        undone = ((1 << (self.rows * self.cols)) - 1) & ~1
        return (undone, self.trimmed(undone, (0, self.rows))), 2

    def trimmed(self, undone: int, resident: Tiles) -> Tiles:
        marked = [panel if panel >= 0 and undone & self.masks[panel] else DEAD for panel in resident]
        first = next((place for place, panel in enumerate(marked) if panel >= 0), len(marked))
        return tuple(marked[first:])

    def undone(self, state: LruState) -> int:
        return state[0].bit_count()

    def resident_bits(self, resident: Tiles) -> tuple[int, int]:
        rows = sum(1 << panel for panel in resident if 0 <= panel < self.rows)
        return rows, sum(1 << (panel - self.rows) for panel in resident if panel >= self.rows)

    def live(self, state: LruState) -> int:
        return self.needed(state[0], *self.resident_bits(state[1]))[0]

    def floor(self, state: LruState) -> int:
        undone, resident = state
        rows, cols = self.resident_bits(resident)
        absent, side = self.needed(undone, rows, cols)
        # Tiles whose panels are both resident may come free.
        left = undone.bit_count() - sum((self.row_of(undone, row) & cols).bit_count() for row in bits(rows))
        if self.capacity == 3:
            # Beside a tile's own panels only one more stays, and it comes from the tile before: with the kept one of
            # the two it has been computed. Only where both were new may it make a free tile; so two loads, two tiles.
            return max(absent, left)
        return max(absent, loads_to_come(left, rows.bit_count(), cols.bit_count(), side, self.capacity))

    def key(self, state: LruState) -> Hashable:
        undone, resident = state
        rows = [panel for panel in resident if 0 <= panel < self.rows]
        cols = [panel - self.rows for panel in resident if panel >= self.rows]
        kinds = tuple(panel if panel < 0 else int(panel >= self.rows) for panel in resident)
        return kinds, self.canonical(undone, rows, cols)

    def moves(self, state: LruState, narrow: bool) -> Iterator[tuple[LruState, int, Tiles]]:
        undone, resident = state
        held = set(resident)
        here = [row for row in range(self.rows) if row in held]
        beside = [col for col in range(self.cols) if col + self.rows in held]
        new_rows, new_cols = self.different(
            undone,
            (row for row in range(self.rows) if row not in held),
            (col for col in range(self.cols) if col + self.rows not in held),
        )
        pairs = [(row, col) for row in here for col in (*beside, *new_cols)]
        pairs += [(row, col) for row in new_rows for col in beside]
        both = [(row, col) for row in new_rows for col in new_cols]
        wanted = [pair for pair in pairs if undone >> (pair[0] * self.cols + pair[1]) & 1]
        if not narrow or not wanted:
            wanted += [pair for pair in both if undone >> (pair[0] * self.cols + pair[1]) & 1]
        for row, col in wanted:
            tile = row * self.cols + col
            after = undone ^ (1 << tile)
            stack, first = self.touch(resident, row)
            stack, second = self.touch(stack, self.rows + col)
            yield (after, self.trimmed(after, stack)), first + second, (tile,)

    def touch(self, resident: Tiles, panel: int) -> tuple[Tiles, int]:
        if panel in resident:
            place = resident.index(panel)
            return (*resident[:place], *resident[place + 1 :], panel), 0
        grown = (*resident, panel)
        return grown[len(grown) > self.capacity :], 1
