"""Best from here: against every way there is to finish a game, where they can all be tried."""

import random
from itertools import permutations

import pytest

from kit.processes import count_looks
from onewave.lab import best_path
from onewave.lab.best_path import best_from
from onewave.tiles.search import local, search, tree
from onewave.tiles.search.panels import panel_loads
from onewave.tiles.search.search import search_panels

ALL = [(row, col) for row in range(3) for col in range(3)]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time limits are numbers of looks at the clock, 1000 a second."""
    count_looks(monkeypatch, 1e-3, best_path, local, search, tree)


@pytest.mark.parametrize("policy", ["lru", "fifo", "belady"])
@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_way_to_finish_a_3x3_game_is_cheaper(policy, slots, seed):
    done = random.Random(seed).sample(ALL, 3 + seed % 2)
    rest = [tile for tile in ALL if tile not in done]
    least = min(panel_loads(3, 3, [*done, *more], slots, policy) for more in permutations(rest))
    found = best_from({"m": 3, "n": 3, "slots": slots, "policy": policy, "order": [list(tile) for tile in done]})
    assert (found["loads"], found["proven"]) == (least, True)
    assert found["order"][: len(done)] == done
    assert sorted(found["order"]) == ALL
    assert panel_loads(3, 3, found["order"], slots, policy) == least


@pytest.mark.parametrize("policy", ["lru", "belady"])
@pytest.mark.parametrize("slots", range(2, 9))
def test_a_fresh_4x4_game_is_solved_as_the_library_solves_it(policy, slots):
    found = best_from({"m": 4, "n": 4, "slots": slots, "policy": policy})
    assert found["proven"]
    assert found["loads"] == search_panels(4, 4, slots, policy, method="exact").loads


def test_a_finished_game_is_what_it_is():
    order = [list(tile) for tile in ALL]
    found = best_from({"m": 3, "n": 3, "slots": 3, "order": order})
    assert found["loads"] == panel_loads(3, 3, ALL, 3) == found["bound"]


@pytest.mark.parametrize(
    "setting", [{"unit": "tiles", "k": 3, "slots": 7}, {"m": 7, "slots": 5}, {"policy": "fifo", "m": 9, "n": 9}]
)
def test_a_game_that_is_too_large_to_prove_gets_the_best_of_many_tries(setting):
    given = {"m": 4, "n": 4, **setting}
    found = best_from(given | {"order": [[1, 1]]})
    assert found["order"][0] == (1, 1)
    assert sorted(found["order"]) == [(row, col) for row in range(given["m"]) for col in range(given["n"])]
    assert found["bound"] <= found["loads"]
    assert found["tried"] > 10


@pytest.mark.parametrize(("side", "k", "slots"), [(20, 7, 35), (12, 6, 30), (12, 4, 15)])
def test_no_way_that_is_found_costs_less_than_the_bound_where_strips_of_full_depth_fit(side, k, slots):
    found = best_from({"m": side, "n": side, "k": k, "slots": slots, "unit": "tiles", "policy": "belady"})
    assert found["bound"] <= found["loads"]


def test_a_large_game_is_refused():
    with pytest.raises(ValueError, match="up to 1024 tiles"):
        best_from({"m": 64, "n": 64})
