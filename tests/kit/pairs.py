"""Which cases of a test show every pair of its parameters' values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations


def covering(cases: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Choose cases that together hold every pair of values that any case holds, greedily; the first of equals is taken.

    cases: the values of the parameters, in the same order in each. Returns indices into cases, ascending. A case with
    one parameter counts by its value.
    """
    left = [set(combinations(enumerate(case), 2)) or {*enumerate(case)} for case in cases]
    chosen: list[int] = []
    while any(left):
        best = max(range(len(left)), key=lambda at: len(left[at]))
        chosen.append(best)
        shown = set(left[best])
        left = [pairs - shown for pairs in left]
    return sorted(chosen)
