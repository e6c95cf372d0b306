"""The plan of what comes behind attention: proved tables, waits that cover what is read, no deadlock at any size."""

import random

import numpy as np
import pytest

from kit.task_tables.verify_table import verify_table
from onewave.base.errors import InvalidArgumentError
from onewave.ops.ffn.chain.plan import BANDS, ChainPlan, ChainTile
from onewave.ops.post_attention.chain.plan import LayerSizes, layer_order, plan_layer
from onewave.tiles.order.policies import POLICIES
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.simulate import simulate

TILES = (ChainTile(1, 128, 2, 1), ChainTile(2, 128, 2, 1), ChainTile(2, 256, 2, 1))
ORDERS = (*BANDS, "rows:2", "skewed:1", "half_row", "hilbert", "accumulate-first-column", "critical-path")


def run_in_any_order(plan: ChainPlan, dice: random.Random) -> None:
    """Interpret the records as blocks do, each queue at its own speed: what a task reads must have been written.

    A post comes any time after its task has begun; tasks that follow in the queue do not wait for it.
    """
    graph, lanes = plan.graph, np.concatenate(plan.lanes)
    made = {tile for task in graph.tasks for tile in task.writes}
    counters = np.zeros(len(plan.totals), dtype=np.int64)
    next_of, unposted, written = [0] * len(lanes), list[int](), dict[object, int]()
    left = len(plan.records)
    while left or unposted:
        ready = []
        for queue, (first, count) in enumerate(lanes):
            if next_of[queue] < count:
                record = plan.records[first + next_of[queue]]
                waits = plan.waits[record[6] : record[6] + record[7]]
                if (counters[waits[:, 0]] >= waits[:, 1]).all():
                    ready.append((queue, int(first) + next_of[queue]))
        assert ready or unposted, "nobody can go on"
        if ready and (not unposted or dice.random() < 0.7):
            queue, number = dice.choice(ready)
            task = graph.tasks[int(plan.records[number, 11])]
            # The stream's rows are written twice: by the first norm before the second reads them.
            assert all(tile in written for tile in task.reads if tile in made)
            next_of[queue] += 1
            left -= 1
            unposted.append(number)
        else:
            number = unposted.pop(dice.randrange(len(unposted)))
            task = graph.tasks[int(plan.records[number, 11])]
            written |= dict.fromkeys(task.writes, number)
            if plan.records[number, 10] >= 0:
                counters[plan.records[number, 10]] += 1
    assert (counters == plan.totals).all()


def random_plan(seed: int) -> ChainPlan:
    dice = random.Random(seed)
    attended, hidden, inner = (64 * dice.randint(*most) for most in ((1, 8), (9, 20), (1, 12)))
    sizes = LayerSizes(dice.randint(1, 700), hidden, inner, hidden, True, attended)
    return plan_layer(
        sizes, workers=dice.randint(1, 9), order=dice.choice(ORDERS), policy=dice.choice(list(POLICIES)),
        tile=dice.choice(TILES),
    )  # fmt: skip


def assert_safe(seed: int) -> None:
    plan = random_plan(seed)
    verify_table(plan.table)
    assert sorted(plan.records[:, 11]) == list(range(len(plan.graph.tasks)))
    run_in_any_order(plan, random.Random(seed))


@pytest.mark.parametrize("seed", range(12))
def test_any_size_order_policy_and_tile_is_proved_and_never_waits_for_ever(seed: int) -> None:
    assert_safe(seed)


@pytest.mark.slow
def test_three_hundred_sizes_are_proved_and_never_wait_for_ever() -> None:
    for seed in range(300):
        assert_safe(seed)


def test_tiles_and_norms_have_queues_of_their_own_and_every_step_is_taken_once() -> None:
    plan = plan_layer(LayerSizes(700, 640, 448, 640, True, 128), workers=5, tile=TILES[1])
    assert plan.blocks == (5,)
    assert len(plan.lanes[0]) == 10
    for queue, (first, count) in enumerate(plan.lanes[0]):
        kinds = set(plan.records[first : first + count, 0].tolist())
        assert kinds <= ({0, 1, 2} if queue < 5 else {3, 4})
    steps = {kind: plan.records[plan.records[:, 0] == kind, 4] for kind in (2, 0, 1)}
    assert {kind: (len(each), set(each.tolist())) for kind, each in steps.items()} == {
        2: (6 * 5, {2}), 0: (6 * 7, {10}), 1: (6 * 5, {7}),
    }  # fmt: skip
    # Nothing comes behind the last norm.
    assert (plan.records[plan.records[:, 0] == 4, 10] == -1).all()


def test_the_default_order_is_even_and_reads_less_than_bands_through_all_stages() -> None:
    sizes = LayerSizes(4096, 4096, 14336, 4096, True, 4096)
    plan = plan_layer(sizes, workers=132)
    tiles = plan.records[plan.records[:, 4] > 0]
    assert plan.predicted <= 1.05 * (tiles[:, 4].sum() + 6 * len(tiles)) / 132
    machine = Machine(workers=132, levels=(CacheLevel("L2", 40 << 20),))
    loads: list[int] = []
    for order in (plan.order, "rows:8"):
        report = simulate(plan.graph, layer_order(plan.graph, order, 132), machine).report
        loads.append(report.memory_loaded)
    assert loads[0] < 0.75 * loads[1]


def test_slices_of_k_and_unknown_orders_are_refused() -> None:
    sizes = LayerSizes(100, 640, 448, 640, True, 128)
    with pytest.raises(InvalidArgumentError, match="slices of K"):
        plan_layer(sizes, workers=2, tile=ChainTile(1, 128, 2, 1, 2))
    with pytest.raises(InvalidArgumentError, match="order"):
        plan_layer(sizes, workers=2, order="rows:0")
