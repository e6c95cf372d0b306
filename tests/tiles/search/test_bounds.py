"""Bounds: figures worked out by hand, and no order ever below one."""

import itertools
import json
import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import gemm, gemm_chain
from onewave.tiles.order.orders import GRID_ORDERS, grid_order
from onewave.tiles.search.bounds import best_bound, gemm_bounds, graph_bound, panel_bound, panel_bounds
from onewave.tiles.search.panels import panel_loads
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.simulate import simulate


def by_name(*arguments, **options):
    return {bound.name: bound for bound in gemm_bounds(*arguments, **options)}


def test_the_bounds_of_a_product_are_those_of_their_papers():
    found = by_name(1024, 1024, 1024, 2 * 4096)
    assert found["compulsory"].value == 2 * 3 * 1024**2
    leading = 2 * 1024**3 / 64  # S = 4096 elements
    assert found["Smith-van de Geijn"].value == 2 * (leading - 2 * 4096)
    assert found["Smith-van de Geijn, leading term"].value == 2 * leading
    assert found["COSMA"].value == 2 * (leading + 1024**2)
    assert best_bound(found.values()).name == "COSMA"


def test_accumulators_are_fast_memory_too():
    assert by_name(512, 512, 512, 2 * 3000, accumulators=1096) == by_name(512, 512, 512, 2 * 4096)


def test_cosmas_parallel_form_takes_the_smaller_of_its_two_terms():
    found = by_name(1000, 1000, 1000, 2 * 10**6, workers=100)
    share = 10**4
    assert found["COSMA, parallel"].value == pytest.approx(
        2 * 100 * min(2e9 / (100 * 100) + share, 3 * (1e7) ** (2 / 3))
    )
    assert not found["COSMA, parallel"].applies


def test_a_gap_is_relative_to_the_bound():
    bound = best_bound(gemm_bounds(64, 64, 64, 10**6))
    assert bound.gap(bound.value * 1.5) == pytest.approx(0.5)
    assert by_name(64, 64, 64, 10**6)["Smith-van de Geijn"].gap(5) is None


@settings(max_examples=60)
@given(
    *[st.integers(1, 5)] * 3,
    st.integers(2, 40),
    st.sampled_from(list(GRID_ORDERS)),
    st.sampled_from(["lru", "belady"]),
    st.booleans(),
)
def test_no_order_moves_less_than_the_bounds(rows, cols, depth, tiles, order, policy, wave):
    m, n, k = 16 * rows - 3, 16 * cols, 16 * depth - 5
    graph = gemm(m, n, k, (16, 16, 16))
    capacity = 512 * tiles
    machine = Machine(workers=3, levels=(CacheLevel("L2", capacity, policy=policy),))
    report = simulate(graph, order, machine, mode="wave" if wave else "serial").report
    lanes = 3 if wave else 1
    moved = report.memory_loaded + report.memory_stored
    for bound in gemm_bounds(m, n, k, capacity, accumulators=lanes * 256):
        assert not bound.applies or moved >= bound.value


def strips(rows, cols, width):
    return [
        (row, col)
        for left in range(0, cols, width)
        for row in range(rows)
        for col in range(left, min(left + width, cols))
    ]


@pytest.mark.parametrize(("side", "depth", "width", "slots"), [(20, 5, 4, 24), (20, 7, 4, 35)])
def test_strips_of_full_depth_move_less_than_cosma_says_where_it_does_not_apply(side, depth, width, slots):
    graph = gemm(side, side, depth, (1, 1, 1))
    order = f"explicit:{json.dumps(strips(side, side, width))}"
    machine = Machine(workers=1, levels=(CacheLevel("L2", 2 * slots, policy="belady"),))
    report = simulate(graph, order, machine, mode="serial").report
    found = by_name(side, side, depth, 2 * slots, accumulators=1)
    moved = report.memory_loaded + report.memory_stored
    assert best_bound(found.values()).value <= moved < found["COSMA"].value
    assert not found["COSMA"].applies


@settings(max_examples=120)
@given(
    st.integers(12, 28),
    st.integers(2, 6),
    st.integers(3, 12),
    st.integers(1, 6),
    st.integers(2, 5),
    st.sampled_from(["strips", "turned strips", "snake", "hilbert"]),
    st.sampled_from(["belady", "lru", "fifo"]),
    st.booleans(),
)
def test_no_order_moves_less_than_a_bound_where_k_is_about_as_large_as_the_cache(
    m, count, k, width, room, kind, policy, several
):
    # S is about width x k, so k / sqrt(S) lies on both sides of 2: below, strips beat what COSMA says; above, nothing.
    n, slots = count * width, width * k + room
    if kind == "turned strips":
        m, n = n, m
    path = strips(m, n, width) if kind == "strips" else [(row, col) for col, row in strips(n, m, width)]
    order = f"explicit:{json.dumps(path)}" if "strips" in kind else kind
    lanes = 3 if several else 1
    machine = Machine(workers=lanes, levels=(CacheLevel("L2", 2 * slots, policy=policy),))
    report = simulate(gemm(m, n, k, (1, 1, 1)), order, machine, mode="wave" if several else "serial").report
    moved = report.memory_loaded + report.memory_stored
    assert moved >= best_bound(gemm_bounds(m, n, k, 2 * slots, accumulators=lanes)).value


def test_a_graphs_bound_is_its_inputs_and_outputs():
    graph = gemm_chain(32, 32, 64, 32, (16, 16, 16))
    assert graph_bound(graph).value == 2 * (32 * 32 + 32 * 64 + 64 * 32 + 32 * 32)


def fewest_panel_loads(rows, cols, capacity):
    """The true optimum from any start, by breadth-first search over what is done and what is resident."""
    everything = (1 << rows * cols) - 1
    queue, seen = deque([(0, 0, 0)]), {(0, 0)}
    while queue:
        done, resident, loads = queue.popleft()
        for r, c in itertools.product(range(rows), range(cols)):
            if resident >> r & 1 and resident >> (rows + c) & 1:
                done |= 1 << (r * cols + c)
        if done == everything:
            return loads
        for panel in range(rows + cols):
            if resident >> panel & 1:
                continue
            full = bin(resident).count("1") == capacity
            for victim in [p for p in range(rows + cols) if resident >> p & 1] if full else [None]:
                after = (resident | 1 << panel) & ~(0 if victim is None else 1 << victim)
                if (done, after) not in seen:
                    seen.add((done, after))
                    queue.append((done, after, loads + 1))
    raise AssertionError("unreachable")


@pytest.mark.parametrize(("rows", "cols"), [(1, 4), (2, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("capacity", [2, 3, 4, 5, 6])
def test_the_page_fetch_bound_is_never_above_the_optimum(rows, cols, capacity):
    assert panel_bound(rows, cols, capacity) <= fewest_panel_loads(rows, cols, capacity)


def test_the_page_fetch_bound_is_met_where_it_can_be():
    assert [panel_bound(3, 3, c) for c in range(2, 7)] == [10, 7, 6, 6, 6]
    assert fewest_panel_loads(3, 3, 2) == 10
    assert panel_bound(100, 100, 11) == 11 + math.ceil((10_000 - 30) / 10)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(2, 8), st.sampled_from(list(GRID_ORDERS)))
def test_no_order_loads_fewer_panels_than_the_bounds(rows, cols, capacity, name):
    least = max(bound.value for bound in panel_bounds(rows, cols, capacity))
    assert panel_loads(rows, cols, grid_order(name, rows, cols).tiles, capacity, "belady") >= least


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gemm_bounds(0, 1, 1, 1), "M: 0"),
        (lambda: gemm_bounds(1, 1, 1, 0), "1 byte"),
        (lambda: panel_bound(1, 1, 1), "2 or more"),
        (lambda: panel_bound(0, 1, 2), "grid: 0 x 1"),
        (lambda: best_bound([]), "one or more"),
    ],
)
def test_what_has_no_bound_is_refused_by_name(call, words):
    with pytest.raises(InvalidArgumentError, match=words):
        call()
