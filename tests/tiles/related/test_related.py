"""Fusion groups, placement, grid syncs, reuse and block orders, against slow counts written from their definitions."""

import itertools
import math

import numpy as np
import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import Builder, ffn, gemm, gemm_chain
from onewave.tiles.graph.builders_attention import attention, attention_block
from onewave.tiles.graph.graph import Task, Tensor, TileGraph
from onewave.tiles.graph.stages import part_traffic, stages_of, subgraph
from onewave.tiles.order.orders import task_order
from onewave.tiles.related import chimera
from onewave.tiles.related.chimera import (
    BLOCK_ORDERS,
    best_blocks,
    chain_graph,
    closed_form,
    movement,
    needed_bytes,
    separate_bytes,
    square_blocks,
)
from onewave.tiles.related.fusion import plan_fusion
from onewave.tiles.related.placement import place_intermediates
from onewave.tiles.related.reuse import live_peak, reuse_report
from onewave.tiles.related.sync_points import MAPPINGS, grid_syncs
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.traffic import compulsory

FFN = ffn(256, 128, 256, (64, 64, 64))
ATTENTION = attention(256, 256, 1, 64, (64, 64))
CHAIN = gemm_chain(192, 64, 256, 128, (64, 64, 64), splits=2)
BLOCK = attention_block(256, 2, 64, 256, (64, 64, 64))
GRAPHS = {"block": BLOCK, "ffn": FFN, "attention": ATTENTION, "chain": CHAIN}


# --- parts of a graph


def bytes_of(graph, tile):
    return graph.tensors[tile[0]].tile_bytes(tile[1])


def test_stages_are_the_operators_in_program_order():
    stages = stages_of(FFN)
    assert stages.names == ("gate", "up", "silu", "down")
    assert [len(stages.tasks([stage])) for stage in range(4)] == [16, 16, 16, 8]
    assert stages.rank[stages.tasks([2])].tolist() == list(range(16))


def test_a_stage_that_comes_again_gets_a_number():
    both = subgraph(FFN, np.array([0, 16, 1, 17], dtype=np.int64))
    assert stages_of(both).names == ("gate", "up", "gate 2", "up 2")


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_a_whole_graph_with_room_for_all_moves_the_compulsory_bytes_and_stores_no_intermediate(graph):
    every = np.arange(len(graph.tasks), dtype=np.int64)
    found = part_traffic(graph, every, 10**9)
    assert (found.loads, found.stores) == compulsory(graph)


def test_a_part_stores_what_a_later_part_reads():
    stages = stages_of(FFN)
    found = part_traffic(FFN, stages.tasks([0, 1, 2]), 10**9)
    # act leaves; gate_out and up_out die on chip.
    assert found.stores == FFN.tensors["act"].nbytes
    assert found.loads == sum(FFN.tensors[name].nbytes for name in ("X", "W_gate", "W_up"))


def test_an_intermediate_that_is_pushed_out_before_its_last_use_is_stored_and_loaded_again():
    build = Builder()
    for name in ("first", "second", "out"):
        build.tensor(name, (64, 64), (64, 64))
    for name in ("first", "second"):
        build.task(f"write {name}", (), ((name, (0, 0)),), 1)
    build.task("read", (("second", (0, 0)), ("first", (0, 0))), (("out", (0, 0)),), 1)
    every, tile = np.arange(3, dtype=np.int64), 64 * 64 * 2
    graph = build.graph()
    roomy = part_traffic(graph, every, 3 * tile, "lru")
    assert (roomy.loads, roomy.stores) == (0, tile)  # the result
    tight = part_traffic(graph, every, tile, "lru")
    # first is pushed out by second, and read again; second dies unread no more; out is the result.
    assert (tight.loads, tight.stores) == (tile, 2 * tile)


# --- fusion groups


def every_cut(count, before, done=0):
    """All sequences of groups that respect the dependencies, as lists of bit sets."""
    if done == (1 << count) - 1:
        yield []
        return
    left = [stage for stage in range(count) if not done >> stage & 1]
    for size in range(1, len(left) + 1):
        for members in itertools.combinations(left, size):
            group = sum(1 << stage for stage in members)
            if all(before[stage] & ~(done | group) == 0 for stage in members):
                for rest in every_cut(count, before, done | group):
                    yield [group, *rest]


@pytest.mark.parametrize("capacity", [33_000, 66_000, 130_000, 10**6])
def test_the_best_groups_of_an_ffn_equal_all_cuts_tried_out(capacity):
    stages = stages_of(FFN)
    cuts = list(every_cut(4, [0, 0, 0b11, 0b100]))
    assert len(cuts) > 10
    cost = {
        group: part_traffic(FFN, stages.tasks([s for s in range(4) if group >> s & 1]), capacity).moved
        for group in {group for cut in cuts for group in cut}
    }
    plan = plan_fusion(FFN, capacity)
    assert plan.moved == min(sum(cost[group] for group in cut) for cut in cuts)
    assert sum(group.traffic.moved for group in plan.groups) == plan.moved
    assert sorted(name for group in plan.groups for name in group.operators) == sorted(stages.names)
    assert plan.compulsory <= plan.moved <= min(plan.unfused, plan.fused)


def test_attention_is_fused_whole_where_its_scores_fit_a_row_at_a_time():
    plan = plan_fusion(ATTENTION, 200_000)
    assert [group.operators for group in plan.groups] == [("qk", "softmax", "pv")]
    assert plan.moved < plan.unfused / 2


def test_fusion_refuses_what_it_cannot_search():
    with pytest.raises(InvalidArgumentError, match="up to 200,000"):
        plan_fusion(gemm(64 * 64, 64 * 64, 64 * 64, (64, 64, 64)), 10**6)
    with pytest.raises(InvalidArgumentError, match="largest tile"):
        plan_fusion(FFN, 100)


# --- grid syncs


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_barriers_are_the_fewest_that_separate_all_crossing_pairs(graph, mapping):
    plan = grid_syncs(graph, 5, mapping)
    number = {name: stage for stage, name in enumerate(plan.stages)}
    crossing = [(number[p.producer], number[p.consumer]) for p in plan.pairs if p.crossing]

    def orders_all(barriers):
        return all(any(first < barrier <= second for barrier in barriers) for first, second in crossing)

    assert orders_all(plan.barriers)
    boundaries = range(1, len(plan.stages))
    fewer = itertools.combinations(boundaries, max(0, len(plan.barriers) - 1))
    assert not plan.barriers or not any(orders_all(barriers) for barriers in fewer)
    assert 0 < plan.busy <= 1


def test_element_wise_operators_need_no_grid_sync_and_reductions_do():
    plan = grid_syncs(FFN, 7)
    assert [plan.stages[barrier] for barrier in plan.barriers] == ["down"]
    assert {(p.producer, p.consumer): p.crossing for p in plan.pairs}["gate", "silu"] == 0


def test_whole_row_blocks_on_one_worker_need_no_grid_sync():
    assert grid_syncs(FFN, 4, "row").barriers == ()
    assert grid_syncs(FFN, 1).barriers == ()


def test_splits_that_add_up_across_workers_are_reported_as_inside():
    assert grid_syncs(CHAIN, 5, "deal").inside == ("gemm1",)
    assert grid_syncs(CHAIN, 5, "row").inside == ()


def test_following_producers_keeps_every_worker_within_its_share():
    plan, dealt = grid_syncs(FFN, 5), grid_syncs(FFN, 5, "deal")
    assert plan.busy == dealt.busy
    assert sum(p.crossing for p in plan.pairs) <= sum(p.crossing for p in dealt.pairs)


@pytest.mark.parametrize(("workers", "mapping"), [(0, "deal"), (10**6, "deal"), (4, "luck")])
def test_sync_options_are_checked(workers, mapping):
    with pytest.raises(InvalidArgumentError):
        grid_syncs(FFN, workers, mapping)


# --- placement


def footprints(graph, order, names, private, workers):
    """Bytes of these tensors alive at each (step, worker), or (step, None) for all workers, one tile at a time.

    None where a private memory is asked to hold a tile that several workers touch.
    """
    steps = [0] * workers
    at: dict[int, tuple[int, int]] = {}
    for task in order:
        who = graph.tasks[task].index[0] % workers
        at[task] = (steps[who], who)
        steps[who] += 1
    alive: dict[object, int] = {}
    for tile in {tile for task in graph.tasks for tile in task.writes if tile[0] in names}:
        users = [at[task.id] for task in graph.tasks if tile in task.reads or tile in task.writes]
        owners = {who for _, who in users}
        if private and len(owners) > 1:
            return None
        last = max(step for step, _ in users)
        first = min(at[task.id][0] for task in graph.tasks if tile in task.writes)
        for step in range(first, last + 1):
            key = (step, min(owners) if private else None)
            alive[key] = alive.get(key, 0) + bytes_of(graph, tile)
    return alive


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes", [(8_192, 40_000), (24_576, 10_000), (70_000, 1), (1, 1), (10**6, 10**6), (8_191, 16_384)]
)
def test_placement_equals_all_assignments_tried_out(sizes, workers):
    levels = (CacheLevel("near", sizes[0], private=True), CacheLevel("far", sizes[1]))
    names = ("gate_out", "up_out", "act")
    accessed = {
        name: sum(bytes_of(FFN, tile) for task in FFN.tasks for tile in (*task.reads, *task.writes) if tile[0] == name)
        for name in names
    }
    orders = ("sequential", "row-by-row", "accumulate-first-column")
    least = None
    for name in orders:
        order = task_order(FFN, name).tolist()
        for choice in itertools.product(range(3), repeat=3):
            held = [{n for n, level in zip(names, choice, strict=True) if level == which} for which in range(2)]
            alive = [footprints(FFN, order, held[which], which == 0, workers) for which in range(2)]
            if any(a is None or max(a.values(), default=0) > sizes[w] for w, a in enumerate(alive)):
                continue
            cost = tuple(sum(accessed[n] for n, lv in zip(names, choice, strict=True) if lv == at) for at in (2, 1, 0))
            least = cost if least is None else min(least, cost)
    found = place_intermediates(FFN, levels, workers, orders)
    assert tuple(found.traffic.values()) == least
    assert list(found.traffic) == ["memory", "far", "near"]
    assert sum(found.traffic.values()) == found.unplaced == sum(accessed.values())


def test_what_several_workers_touch_stays_out_of_private_memory():
    build = Builder()
    build.tensor("between", (64, 64), (64, 64))
    build.tensor("out", (64, 64), (64, 64))
    build.task("write", (), (("between", (0, 0)),), 1, index=(0, 0))
    build.task("read", (("between", (0, 0)),), (("out", (0, 0)),), 1, index=(1, 0))
    near = (CacheLevel("near", 10**9, private=True),)
    assert [p.level for p in place_intermediates(build.graph(), near, 2).tensors] == ["memory"]
    assert [p.level for p in place_intermediates(build.graph(), near, 1).tensors] == ["near"]


def test_placement_checks_workers_and_the_number_of_intermediates():
    with pytest.raises(InvalidArgumentError, match="workers"):
        place_intermediates(FFN, (), 0)
    assert place_intermediates(FFN, ()).traffic["memory"] > 0


# --- reuse


def test_reuse_of_a_small_product_by_hand():
    graph = gemm(128, 128, 64, (64, 64, 64))  # 2 x 2 tiles of C, one K step, 8192 bytes a tile
    found = reuse_report(graph, "row", Machine(workers=2))
    tile = 64 * 64 * 2
    by_name = {t.tensor: t for t in found.tensors}
    # Wave 0: A0 twice, B0, B1. Wave 1: A1 twice, B0, B1.
    a, b, c = (by_name[name] for name in "ABC")
    assert (a.requested, a.distinct, a.spatial, a.temporal, a.later) == (4 * tile, 2 * tile, 2 * tile, 0, 0)
    assert (b.requested, b.distinct, b.spatial, b.temporal, b.later) == (4 * tile, 2 * tile, 0, 2 * tile, 0)
    assert (c.requested, c.distinct, c.times) == (4 * tile, 4 * tile, 1)
    assert found.waves == 2
    # Wave 0 brings A0, B0, B1 and two tiles of C, and computes for 2 * 2 * 64^3 flops on the whole machine.
    assert found.peak_bandwidth == pytest.approx(5 * tile / (2 * 2 * 64**3 / 989_000))


@pytest.mark.parametrize("workers", [1, 3, 100])
@pytest.mark.parametrize("order", ["sequential", "row-by-row", "critical-path"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_byte_that_is_asked_for_is_first_shared_kept_or_fetched_again(graph, order, workers):
    found = reuse_report(graph, order, Machine(workers=workers))
    asked = set(zip(graph.access_tasks.tolist(), graph.accesses.tile.tolist(), strict=True))
    total = int(graph.bytes_of_numbers(np.array([tile for _, tile in asked])).sum())
    assert sum(t.requested for t in found.tensors) == total
    for t in found.tensors:
        assert t.requested == t.distinct + t.spatial + t.temporal + t.later
        assert min(t.distinct, t.spatial + 1, t.temporal + 1, t.later + 1) > 0
    if workers == 1:
        # One task a wave: nobody is there to share with, a running sum's own tile included.
        assert all(t.spatial == 0 for t in found.tensors)


@pytest.mark.parametrize("order", ["sequential", "row-by-row", "half-row", "critical-path"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_the_live_peak_is_what_a_step_by_step_count_finds(graph, order):
    ids = task_order(graph, order).tolist()
    tasks = [graph.tasks[i] for i in ids]
    peak = 0
    for step in range(len(tasks)):
        alive = {
            tile
            for task in tasks[: step + 1]
            for tile in task.writes
            if any(tile in later.reads for later in tasks[max(step, 0) :])
        }
        results = {t for t in alive if not any(t in x.reads and t not in x.writes for x in tasks)}
        peak = max(peak, sum(bytes_of(graph, tile) for tile in alive - results))
    assert live_peak(graph, np.array(ids)) == peak


# --- block orders of a chain

SIZES = {"m": 256, "n": 96, "k": 128, "l": 320}


@pytest.mark.parametrize("order", BLOCK_ORDERS)
@pytest.mark.parametrize("block", [(64, 32, 32, 64), (128, 96, 128, 32), (256, 32, 64, 160), (32, 96, 128, 320)])
def test_a_chain_moves_no_more_than_its_movement_counts(order, block):
    """The count's own plan fits, so the best evictions move at most as much; and never less than inputs and result."""
    blocks = dict(zip("mnkl", block, strict=True))
    plan = best_blocks(SIZES, 10**7, inner=(32,))
    assert plan.moved.total == sum(movement(plan.order, SIZES, SIZES).by_tensor.values())
    counted = movement(order, SIZES, blocks)
    graph = chain_graph(order, SIZES, blocks)
    found = part_traffic(
        graph, np.arange(len(graph.tasks)), needed_bytes(order, SIZES, blocks, 2), orders=("sequential",)
    )
    least = 2 * (256 * 128 + 128 * 320 + 320 * 96 + 256 * 96)
    assert least <= found.moved <= counted.total


def test_reuse_of_nothing_is_refused():
    for tasks in ((), (Task(0, "idle", (), (), 1),)):
        with pytest.raises(InvalidArgumentError, match="graph: no task reads or writes a tile"):
            reuse_report(TileGraph({"x": Tensor("x", (4,), (2,), 2)}, tasks), "sequential")


def test_movement_by_hand():
    sizes = {"m": 4, "n": 4, "k": 4, "l": 4}
    found = movement("ml", sizes, {"m": 2, "n": 2, "k": 2, "l": 2}, itemsize=1).by_tensor
    # Each of 16 elements; both loops turn twice. A comes again for each l, B and D for each m, E is added to twice.
    assert found == {"A": 32, "B": 32, "D": 32, "E": 16 + 32}
    # With k and n whole, A and E stay while l turns inside m.
    found = movement("ml", sizes, {"m": 2, "n": 4, "k": 4, "l": 2}, itemsize=1).by_tensor
    assert found == {"A": 16, "B": 32, "D": 32, "E": 16}
    found = movement("lm", sizes, {"m": 2, "n": 4, "k": 4, "l": 2}, itemsize=1).by_tensor
    assert found == {"A": 32, "B": 16, "D": 16, "E": 48}


def test_the_closed_form_is_the_least_of_its_own_count(monkeypatch):
    """Over all pairs of block sizes that fit, 1/t_m + 1/t_l is least at the closed form's square."""
    elements, inner = 50_000, 32
    monkeypatch.setattr(chimera, "STEP", 1)
    block = closed_form(2 * elements, inner)
    assert block * block + 2 * inner * block <= elements < (block + 1) ** 2 + 2 * inner * (block + 1)
    for tall in range(1, 2000, 7):
        wide = (elements - inner * tall) // (tall + inner)
        if wide >= 1:
            assert 1 / tall + 1 / wide >= 2 / (block + 1)


def test_the_closed_forms_blocks_fit_with_what_a_product_keeps():
    sizes = {"m": 128, "n": 100, "k": 7, "l": 128}
    assert closed_form(30_953, 32) == 96
    found = square_blocks(sizes, 30_953, 32)
    assert found == {"m": 80, "n": 32, "k": 7, "l": 80}
    assert needed_bytes("ml", sizes, found, 2.0) <= 30_953
    # Where it fits as it is, it stays.
    assert square_blocks(dict.fromkeys("mnkl", 2048), 10**6, 64) == {"m": 640, "n": 64, "k": 64, "l": 640}
    with pytest.raises(InvalidArgumentError, match=r"on-chip memory: 1,600 bytes; allowed: 1,[0-9]+ or more"):
        square_blocks({"m": 64, "n": 64, "k": 7, "l": 64}, 1_600, 16)


def test_fusing_a_long_intermediate_beats_two_launches():
    sizes = {"m": 1024, "n": 64, "k": 64, "l": 1024}
    best = best_blocks(sizes, 65_536, inner=(64,))
    assert best.moved.total < separate_bytes(sizes, 65_536, inner=64) / 2
    assert best.needed <= 65_536


def test_two_launches_with_room_for_all_move_everything_once_and_the_intermediate_twice():
    m, n, k, depth = (SIZES[dim] for dim in "mnkl")
    once = m * k + k * depth + 2 * m * depth + depth * n + m * n
    assert separate_bytes(SIZES, 10**9) == 2 * once


def test_chains_that_do_not_fit_are_refused():
    with pytest.raises(InvalidArgumentError, match="on-chip"):
        closed_form(100, 64)
    with pytest.raises(InvalidArgumentError, match="on-chip"):
        best_blocks(SIZES, 100)
    with pytest.raises(InvalidArgumentError, match="ml, lm"):
        movement("mn", SIZES, SIZES)
    assert math.isfinite(closed_form(10**12, 64))
