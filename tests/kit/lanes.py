"""The two lanes of tests: which cases `make test` and `make gpu-test` run, and which are left to `make test-all` and
`make gpu-test-all`."""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest


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


def going_round(cases: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Choose cases that together hold every value that any case holds, each about as often as the others. As
    `covering`."""
    held = [set(enumerate(case)) for case in cases]
    chosen: list[int] = []
    shown: Counter[tuple[int, Hashable]] = Counter()
    while any(values - set(shown) for values in held):
        best = max(
            range(len(held)), key=lambda at: (len(held[at] - set(shown)), -sum(shown[each] for each in held[at]))
        )
        chosen.append(best)
        shown.update(held[best])
    return sorted(chosen)


def slow(*values: Any) -> Any:
    """Give a case's values the mark slow, in a list of parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)
