"""A test marked `pairs` runs every pair of its parameters' values, one marked `values` every value; the other cases are
marked slow."""

from collections import Counter
from itertools import combinations, product

import pytest

from kit.lanes import covering, going_round

LISTS = [(1, 2, 8, 16), ("causal", "full", "window"), (True, False), (64, 80, 128), ("bf16", "fp16")]
CASES = list(product(*LISTS))


def pairs(case: tuple[object, ...]) -> set[object]:
    return set(combinations(enumerate(case), 2))


def test_every_pair_of_values_is_shown_by_a_small_part_of_the_product() -> None:
    kept = covering(CASES)
    assert set().union(*(pairs(CASES[at]) for at in kept)) == set().union(*map(pairs, CASES))
    assert len(CASES) == 144
    assert len(kept) <= 16
    assert kept == covering(CASES)


def test_without_one_of_its_cases_a_pair_is_missing() -> None:
    kept = covering(CASES)
    everything = set().union(*map(pairs, CASES))
    missing = [set().union(*(pairs(CASES[at]) for at in kept if at != left)) != everything for left in kept]
    assert sum(missing) >= len(kept) - 2  # a greedy choice may hold a case too many


def test_one_parameter_keeps_all_its_values_and_a_repeated_case_is_kept_once() -> None:
    assert covering([("a",), ("b",), ("a",)]) == [0, 1]
    assert covering([(1, "a"), (1, "a"), (2, "a")]) == [0, 2]
    assert covering([]) == []


def test_every_value_is_shown_about_as_often_as_the_others_of_its_parameter() -> None:
    cases = list(product(range(5), "ab", range(3)))
    columns = zip(*(cases[at] for at in going_round(cases)), strict=True)
    assert [sorted(Counter(column).values()) for column in columns] == [[1] * 5, [2, 3], [1, 2, 2]]
    assert going_round([("a",), ("b",), ("a",)]) == [0, 1]
    assert going_round([]) == []


@pytest.mark.pairs
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("third", range(3))
def test_the_mark_moves_the_rest_to_the_slow_lane(first: int, second: int, third: int, request: pytest.FixtureRequest):
    cases = [item for item in request.session.items if getattr(item, "originalname", "") == request.node.originalname]
    assert len([item for item in cases if not item.get_closest_marker("slow")]) <= 10
