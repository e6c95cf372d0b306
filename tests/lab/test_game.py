"""The game's numbers on the server: each equal to what the tile simulator itself says."""

from dataclasses import replace

import pytest

from onewave.lab.game import Game, overview, sweep
from onewave.tiles.graph.builders import gemm
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.order.orders import GRID_ORDERS, grid_order
from onewave.tiles.search.panels import panel_loads
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.simulate import simulate


def test_a_path_counted_by_hand():
    # A0 B0 | B1 | A1 pushes A0 out | B0 is there no more: A1, B1 were touched since.
    order = [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert Game(2, 2, 2, 3, "panels", "lru").loads(order) == 5
    assert Game(2, 2, 2, 4, "panels", "lru").loads(order) == 4


@pytest.mark.parametrize("policy", ["lru", "fifo", "belady"])
def test_panels_are_counted_as_the_panel_model_counts_them(policy):
    found = overview({"m": 5, "n": 4, "slots": 4, "policy": policy})
    assert set(found["orders"]) == set(GRID_ORDERS)
    for order in found["orders"].values():
        assert order["loads"] == panel_loads(5, 4, order["path"], 4, policy)
        assert order["loads"] >= found["bound"]["loads"]


@pytest.mark.parametrize("name", ["row", "snake", "hilbert"])
@pytest.mark.parametrize("slots", [2, 5, 9, 40])
def test_tiles_are_counted_as_a_simulation_loads_bytes(name, slots):
    # A tile of A or B is 8 x 8 bf16, 128 bytes. The game keeps C's accumulator in registers: no task touches C here.
    full = gemm(24, 32, 16, (8, 8, 8))
    graph = TileGraph(full.tensors, tuple(replace(task, writes=()) for task in full.tasks))
    order = grid_order(name, 3, 4)
    machine = Machine(workers=1, levels=(CacheLevel("L2", slots * 128),))
    report = simulate(graph, name, machine, mode="serial").report
    assert (
        Game(m=3, n=4, k=2, slots=slots, unit="tiles", policy="lru").loads(order.to_list()) * 128
        == report.memory_loaded
    )


@pytest.mark.parametrize("slots", [2, 3, 5, 8, 13, 30])
def test_belady_never_loads_more_than_the_others_and_none_less_than_the_bound(slots):
    path = grid_order("snake", 4, 5).to_list()
    for unit in ("panels", "tiles"):
        loads = {policy: Game(4, 5, 3, slots, unit, policy).loads(path) for policy in ("lru", "fifo", "belady")}
        assert loads["belady"] <= min(loads.values())
        assert loads["belady"] >= Game(4, 5, 3, slots, unit, "belady").bound()[1]


def strips(rows, cols, width):
    return [(row, col) for left in range(0, cols, width) for row in range(rows) for col in range(left, left + width)]


@pytest.mark.parametrize("k", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 12])
def test_strips_of_b_of_full_depth_load_no_less_than_the_bound(k, width):
    path = strips(12, 12, width)
    for slots in range(width * k, 2 * width * k + 2):
        game = Game(12, 12, k, max(slots, 2), "tiles", "belady")
        assert game.loads(path) >= game.bound()[1]


def test_a_larger_cache_never_costs_more_under_lru_and_belady():
    for policy in ("lru", "belady"):
        found = sweep({"m": 7, "n": 6, "policy": policy})
        assert set(found["series"]) == set(GRID_ORDERS)
        for column in found["series"].values():
            assert column == sorted(column, reverse=True)
            assert all(loads >= bound for loads, bound in zip(column, found["bound"], strict=True))
            assert column[-1] == 7 + 6
