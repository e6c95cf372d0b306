"""A lower bound on the panel loads still to come that counts panels of one kind against each other.

Take the times that each panel stays resident as intervals. A load starts one beside at most c - 1 others, so l loads
make at most (c - 1) l pairs of intervals that overlap; D fewer while the cache fills up. The pairs of a row with a
column must cover every undone tile: U. The others are lost: R pairs of rows and C pairs of columns. They can't be few.
If column load t completes a_t tiles, a_t (a_t - 1) / 2 pairs of rows were there, and one pair of row intervals meets
each of n columns at most once: R >= sum of a_t (a_t - 1) / 2n, less the r pairs of rows that are resident already; and
so for columns. Now a (a - 1) >= 2 k a - k (k + 1) for all whole a and k, and all a_t together make U, so with N the
larger of the two sides,

    (c - 1) l - D >= U + (2 k U - k (k + 1) l) / 2N - r        for every k,
    l >= (2N (U + D - r) + 2 k U) / (2N (c - 1) + k (k + 1)).

k = 0 is the page-fetch bound. The bound holds for any cache, so for LRU too.
"""

from functools import lru_cache


def pair_bound(rows: int, cols: int, capacity: int) -> int:
    """Fewest loads of any order of a rows x cols grid: two for the first tile, and what is to come after it."""
    held_rows, held_cols = int(cols > 1), int(rows > 1)
    return 2 + loads_to_come(rows * cols - 1, held_rows, held_cols, max(rows, cols), capacity)


@lru_cache(maxsize=1 << 16)
def loads_to_come(undone: int, rows: int, cols: int, side: int, capacity: int) -> int:
    """At least so many loads for `undone` tiles that need one.

    rows, cols: resident panels that some undone tile needs. side: the larger number of rows or columns that have undone
    tiles. capacity: panels, at least 2.
    """
    if not undone:
        return 0
    held = rows + cols
    filling = capacity - 1 - held  # loads before each finds capacity - 1 others
    pairs = loads = 0
    while loads < filling:
        if pairs >= undone:
            return loads
        pairs += held + loads
        loads += 1
    lost = max(filling, 0) * (filling + 1) // 2  # D
    beside = rows * (rows - 1) // 2 + cols * (cols - 1) // 2
    best = 0
    for k in range(min(capacity - 1, side + 1)):
        top = 2 * side * (undone + lost - beside) + 2 * k * undone
        bound = -(-top // (2 * side * (capacity - 1) + k * (k + 1)))
        if 0 < bound < best:
            break  # where it is above 0 it rises with k up to its best, and falls from there
        best = max(best, bound)
    return max(best, filling)
