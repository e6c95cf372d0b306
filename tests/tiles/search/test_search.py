"""Searches for the order with the least panel traffic, against brute force and against their own replay."""

import itertools
import math
import random
import time

import numpy as np
import pytest

from kit.processes import count_looks
from kit.refusals import refused
from onewave.base.errors import InvalidArgumentError
from onewave.tiles.search import local, search, tree
from onewave.tiles.search.bounds import panel_bound
from onewave.tiles.search.panel_bound import pair_bound
from onewave.tiles.search.panels import panel_loads, strip_snake_loads
from onewave.tiles.search.search import search_panels
from onewave.tiles.search.spaces import BeladySpace, LruSpace
from onewave.tiles.search.starts import block_snake, block_snake_loads, renamed, starting_orders
from onewave.tiles.search.tree import astar, beam

SPACES = {"belady": BeladySpace, "lru": LruSpace}
# Results that the exact search proves, as found once and held here; brute force below checks the 3x3 ones by itself.
LEAST = {
    ("belady", 3): (10, 8, 6, 6, 6, 6, 6),
    ("lru", 3): (10, 10, 7, 6, 6, 6, 6),
    ("belady", 4): (17, 11, 10, 8, 8, 8, 8),
    ("lru", 4): (17, 17, 10, 9, 8, 8, 8),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time limits are numbers of looks at the clock, 1000 a second."""
    count_looks(monkeypatch, 1e-3, search, tree, local)


def every_order(rows, cols):
    """All orders of a grid that begin at (0, 0), as the panels they touch: int8 [orders, 2 * tiles]."""
    rest = np.array(list(itertools.permutations(range(1, rows * cols))), dtype=np.int8)
    tiles = np.concatenate((np.zeros((len(rest), 1), dtype=np.int8), rest), axis=1)
    touched = np.empty((len(tiles), 2 * rows * cols), dtype=np.int8)
    touched[:, 0::2], touched[:, 1::2] = tiles // cols, rows + tiles % cols
    return touched


def least_of_all(touched, panels, capacity, policy):
    """Replay every order at once, written down from the definition; returns the fewest loads."""
    orders, length = touched.shape
    lines = np.arange(orders)
    next_use = np.full((length + 1, orders, panels), length + 1, dtype=np.int8)
    for at in range(length - 1, -1, -1):
        next_use[at] = next_use[at + 1]
        next_use[at, lines, touched[:, at]] = at
    resident = np.zeros((orders, panels), dtype=np.bool_)
    last_use = np.full((orders, panels), -1, dtype=np.int8)
    loads = np.zeros(orders, dtype=np.int64)
    for at in range(length):
        panel = touched[:, at]
        miss = ~resident[lines, panel]
        loads += miss
        full = miss & (resident.sum(axis=1) == capacity)
        if policy == "lru":
            worth = np.where(resident, -last_use.astype(np.int64), -1000)
        else:
            worth = np.where(resident, next_use[at + 1].astype(np.int64), -1000)
            # The tile's other panel stays: both are needed at once.
            worth[lines, touched[:, at ^ 1]] = -1000
        victim = worth.argmax(axis=1)
        resident[lines[full], victim[full]] = False
        resident[lines, panel] = True
        last_use[lines, panel] = at
    return int(loads.min())


@pytest.fixture(scope="module")
def orders_of_3x3():
    return every_order(3, 3)


@pytest.mark.parametrize("policy", SPACES)
@pytest.mark.parametrize("capacity", range(2, 9))
def test_3x3_is_proven_and_equals_all_orders_tried_out(orders_of_3x3, policy, capacity):
    result = search_panels(3, 3, capacity, policy)
    assert result.proven
    assert result.loads == least_of_all(orders_of_3x3, 6, capacity, policy) == LEAST[policy, 3][capacity - 2]


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("policy", SPACES)
def test_rectangles_equal_all_orders_tried_out(shape, policy):
    orders = every_order(*shape)
    for capacity in (2, 3, 4, 5):
        assert search_panels(*shape, capacity, policy).loads == least_of_all(orders, 6, capacity, policy)


@pytest.mark.parametrize("policy", SPACES)
@pytest.mark.parametrize("capacity", range(2, 9))
def test_4x4_is_proven_in_under_five_seconds(policy, capacity):
    began = time.process_time()
    result = search_panels(4, 4, capacity, policy, method="exact")
    assert time.process_time() - began < 5
    assert result.proven
    assert result.bound == result.loads == LEAST[policy, 4][capacity - 2]
    assert sorted(result.order) == [(row, col) for row in range(4) for col in range(4)]
    assert result.order[0] == (0, 0)
    assert panel_loads(4, 4, result.order, capacity, policy) == result.loads


@pytest.mark.parametrize(("rows", "cols"), [(3, 3), (4, 4), (4, 6), (5, 5)])
def test_the_strip_snake_is_met_or_beaten_under_belady(rows, cols):
    for capacity in range(2, 9):
        found = search_panels(rows, cols, capacity)
        assert found.proven
        assert found.loads <= strip_snake_loads(rows, cols, capacity)


def test_lru_with_three_panels_loads_one_for_every_tile_after_the_first():
    for rows, cols in ((3, 3), (4, 6), (5, 5), (7, 9)):
        found = search_panels(rows, cols, 3, "lru", time_limit=1)
        assert (found.loads, found.proven) == (rows * cols + 1, True)


def test_where_the_strip_snake_is_beaten_a_block_snake_says_why():
    # Two rows and two columns stay: at the turn two columns are shared instead of one.
    assert strip_snake_loads(4, 4, 4) == 11
    assert block_snake_loads(4, 4, 2, 2) == 10 == search_panels(4, 4, 4).loads
    assert strip_snake_loads(5, 5, 5) == 14
    assert block_snake_loads(5, 5, 3, 2) == 13 == search_panels(5, 5, 5).loads
    # Here no block snake does it; only the search.
    assert strip_snake_loads(5, 5, 3) == block_snake_loads(5, 5, 2, 1) == 18
    assert search_panels(5, 5, 3).loads == 17


@pytest.mark.parametrize(
    ("rows", "cols", "height", "width"), [(4, 4, 2, 2), (6, 8, 3, 2), (5, 7, 2, 3), (7, 7, 3, 1), (8, 5, 4, 2)]
)
def test_a_block_snake_costs_what_its_formula_says(rows, cols, height, width):
    path = block_snake(rows, cols, height, width)
    assert sorted(path) == [(row, col) for row in range(rows) for col in range(cols)]
    # Belady may do better than the plan that the formula counts.
    assert panel_loads(rows, cols, path, height + width, "belady") <= block_snake_loads(rows, cols, height, width)
    assert block_snake_loads(rows, cols, height, 1) == strip_snake_loads(rows, cols, height + 1)


@pytest.mark.parametrize("policy", SPACES)
def test_any_start_has_the_same_least_loads_and_comes_first(policy):
    least = search_panels(3, 4, 3, policy).loads
    for start in ((0, 0), (2, 3), (0, 3), (1, 1), (1, 2)):
        result = search_panels(3, 4, 3, policy, start=start)
        assert result.proven
        assert result.loads == least
        assert result.order[0] == start
        assert panel_loads(3, 4, result.order, 3, policy) == result.loads


@pytest.mark.parametrize("method", ["auto", "beam", "local"])
@pytest.mark.parametrize("policy", SPACES)
def test_every_method_gives_a_valid_order_within_its_time_and_a_bound_below(method, policy):
    result = search_panels(7, 9, 4, policy, start=(6, 0), method=method, time_limit=0.4)
    assert result.seconds < 0.41
    assert sorted(result.order) == [(row, col) for row in range(7) for col in range(9)]
    assert result.order[0] == (6, 0)
    assert panel_loads(7, 9, result.order, 4, policy) == result.loads
    assert panel_bound(7, 9, 4) <= result.bound <= result.loads
    assert result.proven == (result.bound == result.loads)
    known = [(step.loads, step.bound) for step in result.history]
    assert known == sorted(known, key=lambda pair: (-pair[0], pair[1]))
    assert known[-1] == (result.loads, result.bound)


def test_an_exact_search_that_runs_out_of_time_still_raises_the_bound():
    result = search_panels(8, 8, 4, "belady", method="exact", time_limit=0.5)
    assert not result.proven
    assert panel_bound(8, 8, 4) < result.bound < result.loads
    assert result.gap == result.loads / result.bound - 1


def test_bounds_of_a_stopped_search_never_pass_what_a_finished_one_proves():
    least = search_panels(5, 5, 3).loads
    for time_limit in (0.01, 0.05, 0.1):
        assert search_panels(5, 5, 3, method="exact", time_limit=time_limit).bound <= least


@pytest.mark.parametrize("policy", SPACES)
def test_a_beam_wide_enough_finds_the_least_of_a_small_grid(policy):
    for capacity in (3, 4, 5):
        found = beam(SPACES[policy](4, 4, capacity), 150, 1000, math.inf)
        assert found.loads == LEAST[policy, 4][capacity - 2]


@pytest.mark.parametrize("policy", SPACES)
def test_astar_without_a_known_order_finds_one_with_the_loads_it_says(policy):
    for rows, cols, capacity in ((3, 5, 4), (5, 3, 3), (2, 6, 3), (1, 5, 2), (5, 1, 3)):
        found = astar(SPACES[policy](rows, cols, capacity), 1000, math.inf)
        order = [divmod(tile, cols) for tile in found.tiles]
        assert panel_loads(rows, cols, order, capacity, policy) == found.loads == found.bound


@pytest.mark.parametrize(
    ("policy", "rows", "cols", "capacity"),
    [
        ("belady", 3, 3, 2),
        ("belady", 3, 4, 3),
        ("belady", 4, 3, 4),
        ("belady", 3, 4, 5),
        ("lru", 3, 3, 3),
        ("lru", 3, 3, 4),
    ],
)
def test_states_with_one_key_have_one_future_and_no_floor_above_it(policy, rows, cols, capacity):
    """Solve random states by plain recursion, which also holds every floor against the truth."""
    space = SPACES[policy](rows, cols, capacity)
    chance = random.Random(1)
    futures: dict[object, set[int]] = {}
    known: dict[object, int] = {}
    for _ in range(60):
        state, _ = space.first()
        for _ in range(chance.randrange(1, 5)):
            moves = list(space.moves(state, False))
            if moves:
                state = chance.choice(moves)[0]
        futures.setdefault(space.key(state), set()).add(least_from(space, state, known))
    assert all(len(costs) == 1 for costs in futures.values())
    assert len(futures) > 5


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("cols", [1, 2, 4, 5])
def test_the_pair_bound_is_below_every_proven_least(rows, cols):
    for capacity in range(2, 8):
        assert pair_bound(rows, cols, capacity) <= search_panels(rows, cols, capacity, method="exact").loads


def test_the_pair_bound_is_above_page_fetch_on_large_grids():
    for size, capacity in ((16, 6), (32, 10), (64, 17)):
        assert pair_bound(size, size, capacity) > 1.05 * panel_bound(size, size, capacity)


def least_from(space, state, known):
    """Exhaustive recursion with memory, on states as they are; every move computes a tile, so it ends."""
    if not space.undone(state):
        return 0
    if state not in known:
        known[state] = min(cost + least_from(space, after, known) for after, cost, _ in space.moves(state, False))
        assert space.floor(state) <= known[state]
    return known[state]


def test_all_starting_orders_begin_at_the_origin_and_cover_the_grid():
    for rows, cols, capacity in ((5, 7, 4), (1, 6, 2), (6, 1, 9), (3, 3, 100)):
        for make in starting_orders(rows, cols, capacity):
            path = make()
            assert path[0] == (0, 0)
            assert sorted(path) == [(row, col) for row in range(rows) for col in range(cols)]


def test_renaming_moves_the_start_and_keeps_the_loads():
    path = block_snake(4, 5, 2, 2)
    for start in ((0, 0), (3, 4), (0, 4), (2, 1)):
        other = renamed(path, 4, 5, start)
        assert other[0] == start
        assert panel_loads(4, 5, other, 4, "lru") == panel_loads(4, 5, path, 4, "lru")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rows": 0}, "grid"),
        ({"rows": 10**5, "cols": 10**5}, "1,000,000"),
        ({"capacity": 1}, "2 or more"),
        ({"policy": "fifo"}, "belady, lru"),
        ({"method": "guess"}, "auto, exact, beam, local"),
        ({"start": (3, 0)}, "inside the 3 x 3 grid"),
        ({"start": (-1, 0)}, "inside the 3 x 3 grid"),
        ({"time_limit": 0}, "above 0"),
        ({"time_limit": float("nan")}, "above 0"),
        ({"rows": 100, "cols": 100, "method": "exact"}, "up to 4,096"),
    ],
    ids=str,
)
def test_what_cannot_be_searched_is_refused_in_one_line(changed, words):
    with refused(InvalidArgumentError, words):
        search_panels(**({"rows": 3, "cols": 3, "capacity": 3} | changed))
