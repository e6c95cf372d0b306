"""The plan for many rows: proved tables in every order and policy, even shares, waits that cover what is read."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from kit.task_tables.execute import execute
from kit.task_tables.verify_table import verify_table
from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.ops.ffn.chain.plan import BANDS, ChainPlan, ChainTile, chain_graph, default_tile, plan_chain
from onewave.ops.ffn.reference import ffn as in_torch
from onewave.ops.ffn.sizes import FFNSizes
from onewave.tiles.order.policies import POLICIES
from onewave.tiles.sim.simulate import simulate

SIZES = FFNSizes(700, 128, 960, 448, True)
TILE = ChainTile(2, 128, 6, 2)


def run_out_of_order(plan: ChainPlan, seed: int) -> None:
    """Interpret the records as the kernel does, any worker at any time: what a task reads must be there.

    A worker's load warp is ahead of its own stores, so only posts count, and they come when they like.
    """
    dice = random.Random(seed)
    counters = np.zeros(len(plan.totals), dtype=np.int64)
    next_load = [0] * plan.workers
    lanes = np.concatenate(plan.lanes)
    unposted: list[int] = []
    done: set[tuple[int, ...]] = set()
    left = len(plan.records)
    while left or unposted:
        ready = []
        for worker, (first, count) in enumerate(lanes):
            if next_load[worker] < count:
                record = plan.records[first + next_load[worker]]
                waits = [plan.waits[record[at] : record[at] + record[at + 1]] for at in (6, 8)]
                if all((counters[each[:, 0]] >= each[:, 1]).all() for each in waits):
                    ready.append((worker, first + next_load[worker]))
        assert ready or unposted, "nobody can go on"
        if ready and (not unposted or dice.random() < 0.7):
            worker, number = dice.choice(ready)
            task = plan.graph.tasks[int(plan.records[number, 11])]
            written = {("H", t.index[:2]) for t in plan.graph.tasks if t.name == "up" and ("up", *t.index) in done}
            missing = [tile for tile in task.reads if tile[0] == "H" and tile not in written]
            assert not missing
            if task.name == "down" and task.writes[0][0] == "Y":
                assert all(("down", *task.index[:2], split) in done for split in range(task.index[2]))
            next_load[worker] += 1
            left -= 1
            unposted.append(number)
        else:
            number = unposted.pop(dice.randrange(len(unposted)))
            task = plan.graph.tasks[int(plan.records[number, 11])]
            done.add((task.name, *task.index))
            if plan.records[number, 10] >= 0:
                counters[plan.records[number, 10]] += 1
    assert (counters == plan.totals).all()


@pytest.mark.parametrize("order", [*BANDS, "rows:3", "half_row", "hilbert", "critical-path"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_order_and_policy_is_proved_and_waits_for_all_it_reads(order: str, policy: str) -> None:
    sizes = FFNSizes(300, 64, 448, 192, order != "hilbert")
    splits = 2 if order == "half_row" else 1
    plan = plan_chain(sizes, workers=3, order=order, policy=policy, tile=ChainTile(1, 128, 4, 1, splits))
    verify_table(plan.table)
    assert sorted(plan.records[:, 11]) == list(range(len(plan.graph.tasks)))
    run_out_of_order(plan, seed=len(order))


def test_a_clicked_order_of_the_hidden_tensors_tiles_is_taken_as_it_is(tmp_path: Path) -> None:
    path = [[row, column] for column in (6, 0, 1, 5, 2, 3, 4) for row in (1, 0, 2)]
    file = tmp_path / "order.json"
    file.write_text(json.dumps({"name": "explicit", "rows": 3, "cols": 7, "order": path}))
    sizes, tile = FFNSizes(150, 64, 448, 192, True), ChainTile(1, 128, 4, 1)
    plan = plan_chain(sizes, workers=1, order=f"explicit:{file}", tile=tile)
    up, down = (plan.records[plan.records[:, 0] == kind] for kind in (0, 1))
    assert up[:, 1:3].tolist() == path
    # Row 1's last tile is the third from the end.
    assert down[:, 1].tolist() == [1, 1, 0, 0, 2, 2]
    run_out_of_order(plan, seed=1)
    with pytest.raises(InvalidArgumentError, match="each tile exactly once"):
        plan_chain(FFNSizes(150, 64, 512, 192, True), workers=1, order=f"explicit:{file}", tile=tile)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_last_slice_waits_for_the_others_even_in_one_queue(workers: int) -> None:
    plan = plan_chain(FFNSizes(150, 64, 640, 192, False), workers=workers, tile=ChainTile(1, 128, 4, 1, 3))
    later = plan.records[plan.records[:, 5] & 1 != 0]
    assert len(later) == 3 * 2
    assert (later[:, 9] >= 1).all()
    assert (later[:, 12] == 2).all()
    assert (plan.records[:, 5] & 2 != 0).sum() == 2 * len(later)
    run_out_of_order(plan, seed=workers)


def test_every_step_along_k_is_taken_once() -> None:
    for splits in (1, 2, 4):
        plan = plan_chain(SIZES, workers=7, tile=ChainTile(2, 128, 6, 2, splits))
        rows, columns, outs = 6, 15, 4
        up, down = (plan.records[plan.records[:, 0] == kind] for kind in (0, 1))
        assert len({tuple(r[1:3]) for r in up.tolist()}) == len(up) == rows * columns
        assert (up[:, 3:5] == [0, 2]).all()
        covered = {(r[1], r[2], step) for r in down.tolist() for step in range(r[3], r[3] + r[4])}
        assert len(covered) == down[:, 4].sum() == rows * outs * 15
        ends = down[:, 3] + down[:, 4] == 15
        assert ((down[:, 5] & 2 == 0) == ends).all()


def test_the_table_interpreted_gives_the_blocks_numbers() -> None:
    sizes, tile = FFNSizes(150, 64, 256, 192, True), ChainTile(1, 128, 4, 1, 2)
    plan = plan_chain(sizes, workers=4, order="skewed:1", tile=tile)
    dice = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(n, 64, generator=dice, dtype=torch.float64) / 8 for n in (150, 256, 256))
    down = torch.randn(192, 256, generator=dice, dtype=torch.float64) / 16
    matrices = {"X": x, "W_gate": gate.T, "W_up": up.T, "W_down": down.T}
    memory: dict[int, np.ndarray] = {}
    for name, matrix in matrices.items():
        tensor = plan.graph.tensors[name]
        high, wide = tensor.tile
        for i, j in np.ndindex(*tensor.grid):
            tile_of = matrix[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            memory[plan.graph.tile_number((name, (i, j)))] = tile_of.numpy()

    def up_task(reads: list[np.ndarray]) -> list[np.ndarray]:
        a, g, u = reads
        inner = a @ g
        return [inner / (1 + np.exp(-inner)) * (a @ u)]

    def down_task(reads: list[np.ndarray]) -> list[np.ndarray]:
        (matrix,) = (tile for tile in reads if tile.shape[0] == 128)
        others = [tile for tile in reads if tile.shape[0] != 128]
        # Two tiles of the hidden tensor, then the other slice's sum.
        return [np.concatenate(others[:2], axis=1) @ matrix + sum(others[2:])]

    found = execute(plan.table, memory, {"up": up_task, "down": down_task}, seed=3)
    expected = in_torch(x, up, down, gate, "silu").numpy()
    grid = plan.graph.tensors["Y"].grid
    rows = [[found[plan.graph.tile_number(("Y", (i, j)))] for j in range(grid[1])] for i in range(grid[0])]
    np.testing.assert_allclose(np.block(rows), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [64, 128, 512, 2048, 8192])
@pytest.mark.parametrize("gated", [True, False])
def test_the_busiest_worker_ends_soon_after_the_mean(rows: int, gated: bool) -> None:
    plan = plan_chain(FFNSizes(rows, 4096, 14336, 4096, gated), workers=132)
    mean = plan.records[:, 4].sum() / 132
    assert plan.predicted <= (1.3 if rows <= 512 else 1.2) * mean
    assert plan.tile.shared_bytes <= 227 << 10


def test_bands_of_eight_row_blocks_are_the_default() -> None:
    sizes, tile = FFNSizes(1200, 128, 512, 256, True), ChainTile(1, 128, 4, 1)
    plain, named, narrower = (
        plan_chain(sizes, workers=5, order=o, tile=tile) for o in ("auto", "skewed:8", "skewed:4")
    )
    assert (plain.records == named.records).all()
    assert not np.array_equal(plain.records, narrower.records)


def test_bands_read_the_weights_less_often_than_row_by_row() -> None:
    sizes = FFNSizes(2048, 1024, 4096, 1024, True)
    graph = chain_graph(sizes, ChainTile(2, 256, 4, 1))
    from onewave.ops.ffn.chain.plan import chain_order
    from onewave.tiles.sim.machine import CacheLevel, Machine

    machine = Machine(levels=(CacheLevel("L2", 8 << 20),))
    loaded = {
        order: simulate(graph, chain_order(graph, order, 132), machine).report.memory_loaded
        for order in ("row", "skewed:4", "rows:8")
    }
    assert loaded["skewed:4"] < loaded["row"]
    assert loaded["rows:8"] < loaded["row"]


def test_two_streams_leave_a_place_for_the_watcher_and_cut_nothing_along_k() -> None:
    plan = plan_chain(SIZES, workers=9, streams=True)
    assert [len(lanes) for lanes in plan.lanes] == [8, 9]
    first, second = (
        plan.records[lanes[0, 0] : lanes[-1].sum()] if len(lanes) else plan.records[:0] for lanes in plan.lanes
    )
    assert (first[:, 0] == 0).all()
    assert (second[:, 0] == 1).all()
    # The first launch waits for nobody: whatever the second does, it comes to its end.
    assert (first[:, [7, 9]] == 0).all()
    with pytest.raises(UnsupportedError, match="slices"):
        plan_chain(SIZES, workers=9, streams=True, tile=ChainTile(1, 128, 4, 1, 2))


@pytest.mark.parametrize("rows", [64, 700, 4096])
def test_two_streams_take_half_a_row_at_a_time_uncut(rows: int) -> None:
    plan = plan_chain(FFNSizes(rows, 64, 448, 192, True), workers=5, order="half_row", streams=True)
    assert plan.tile.splits == 1
    verify_table(plan.table)
    assert sorted(plan.records[:, 11]) == list(range(len(plan.graph.tasks)))
    run_out_of_order(plan, seed=rows)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"order": "rows:0"}, InvalidArgumentError, "rows:ROWS"),
        ({"order": "row:2"}, InvalidArgumentError, "row"),
        ({"order": "rows:many"}, InvalidArgumentError, "rows:ROWS"),
        ({"workers": 0}, InvalidArgumentError, "1 or more"),
        ({"sizes": FFNSizes(1 << 24, 64, 1024, 64, False)}, UnsupportedError, "up to"),
    ],
)
def test_bad_plans_are_refused_with_what_is_allowed(change: dict, error: type[Exception], says: str) -> None:
    given = {"sizes": SIZES, "workers": 4} | change
    with pytest.raises(error, match=says):
        plan_chain(given.pop("sizes"), **given)


@pytest.mark.parametrize("tile", [(3, 128, 4, 1), (2, 192, 4, 1), (2, 256, 5, 1), (2, 256, 0, 1)])
def test_tiles_that_no_kernel_has_or_that_do_not_fit_are_refused(tile: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        ChainTile(*tile)


def test_few_rows_get_narrow_tiles_and_slices_many_rows_wide_ones() -> None:
    few, many = (default_tile(FFNSizes(rows, 4096, 14336, 4096, True), 132) for rows in (16, 8192))
    assert (few.rows, few.columns, few.splits) == (64, 128, 4)
    assert (many.rows, many.columns, many.splits) == (128, 256, 1)
