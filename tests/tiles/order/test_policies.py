"""Policies: hand-counted waits and posts, and what holds for each of them."""

import numpy as np
import pytest

from kit.task_tables.small_graphs import CHAINS, two_convolutions
from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import gemm_chain
from onewave.tiles.graph.graph import Task, Tensor, TileGraph
from onewave.tiles.order.policies import POLICIES, derived_edges, plan
from onewave.tiles.order.schedule import Mode, Program, Schedule
from onewave.tiles.proof.verify import verify


def waits_of(schedule: Schedule, task: int) -> list[tuple[list[int], int]]:
    """A task's waits: the tasks that post to each of its counters, and the value."""
    waits, posts = schedule.syncs.waits, schedule.syncs.posts
    part = slice(waits.start[task], waits.start[task + 1])
    return sorted(
        (posts.row[posts.first == counter].tolist(), int(value))
        for counter, value in zip(waits.first[part], waits.second[part], strict=True)
    )


def by_ticket(graph: TileGraph, policy: str, order=None) -> Schedule:
    return plan(graph, range(len(graph.tasks)) if order is None else order, policy, mode=Mode.TICKET)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # Two GEMMs of 2 x 2 tiles each: tasks 0..3 write H row by row, 4..7 write Y; task 4 reads row 0 of H.
        ("none", [([0, 1, 2, 3], 4)]),
        ("row", [([0, 1], 2)]),
        ("tile", [([0], 1), ([1], 1)]),
        ("strided", [([0, 1], 2)]),  # neighbours: distance 1
        ("conv2d-tile", [([0], 1), ([1], 1)]),
        ("consecutive", [([0, 1], 2)]),
    ],
)
def test_the_first_task_of_a_second_gemm_waits_for(policy, expected):
    graph = gemm_chain(4, 2, 4, 4, tile=(2, 2, 2))
    assert waits_of(by_ticket(graph, policy), 4) == expected


def heads_of_qkv(heads: int) -> TileGraph:
    """A projection writes Q, K and V tiles of every head side by side; each head's attention reads its three."""
    tensors = {"qkv": Tensor("qkv", (1, 3 * heads), (1, 1), 2), "out": Tensor("out", (1, heads), (1, 1), 2)}
    made = [Task(i, "qkv", (), (("qkv", (0, i)),), 1) for i in range(3 * heads)]
    for head in range(heads):
        reads = tuple(("qkv", (0, head + part * heads)) for part in range(3))
        made.append(Task(len(made), "attention", reads, (("out", (0, head)),), 1))
    return TileGraph(tensors, tuple(made))


def test_strided_finds_the_distance_between_a_heads_q_k_and_v():
    assert waits_of(by_ticket(heads_of_qkv(4), "strided"), 13) == [([1, 5, 9], 3)]
    assert len(waits_of(by_ticket(heads_of_qkv(4), "tile"), 13)) == 3
    assert waits_of(by_ticket(heads_of_qkv(4), "row"), 13) == [(list(range(12)), 12)]


def test_consecutive_joins_the_tiles_that_all_readers_need_together():
    tensors = {"x": Tensor("x", (6,), (1,), 1), "y": Tensor("y", (2,), (1,), 1)}
    made = [Task(i, "make", (), (("x", (i,)),), 1) for i in range(6)]
    made.append(Task(6, "low", tuple(("x", (i,)) for i in range(4)), (("y", (0,)),), 1))
    made.append(Task(7, "high", tuple(("x", (i,)) for i in range(2, 6)), (("y", (1,)),), 1))
    schedule = by_ticket(TileGraph(tensors, tuple(made)), "consecutive")
    assert waits_of(schedule, 6) == [([0, 1], 2), ([2, 3], 2)]
    assert waits_of(schedule, 7) == [([2, 3], 2), ([4, 5], 2)]


def test_a_convolutions_taps_along_a_line_need_one_wait_a_channel_tile():
    graph = two_convolutions(lines=3, blocks=2, channels=2)
    corner = 12  # the second convolution's first tile: lines 0 and 1, both blocks, both channel tiles
    assert waits_of(by_ticket(graph, "conv2d-tile"), corner) == [([0, 2], 2), ([1, 3], 2), ([4, 6], 2), ([5, 7], 2)]
    assert len(waits_of(by_ticket(graph, "tile"), corner)) == 8


def test_a_group_is_cut_where_the_order_runs_a_consumer_between_its_members():
    graph = gemm_chain(2, 2, 8, 2, tile=(2, 2, 2), splits=2)
    # H has one row of 4 tiles; Y's one tile is added up by tasks 4 (tiles 0, 1) and 5 (tiles 2, 3).
    assert waits_of(by_ticket(graph, "row"), 4) == [([0, 1, 2, 3], 4)]
    halves = by_ticket(graph, "row", [0, 1, 4, 2, 3, 5])
    assert waits_of(halves, 4) == [([0, 1], 2)]
    assert ([2, 3], 2) in waits_of(halves, 5)
    assert verify(halves)


def test_a_worker_does_not_wait_for_its_own_queue():
    graph = gemm_chain(4, 2, 4, 4, tile=(2, 2, 2))
    assert len(plan(graph, range(8), "tile", workers=1).syncs.waits.first) == 0
    assert plan(graph, range(8), "tile", workers=1).syncs.num_counters == 0


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_dependency_is_waited_for_and_every_value_is_what_is_posted(name, policy):
    graph = CHAINS[name]
    schedule = by_ticket(graph, policy)
    syncs = schedule.syncs
    totals = np.zeros(syncs.num_counters, dtype=np.int64)
    np.add.at(totals, syncs.posts.first, syncs.posts.second)
    assert (syncs.waits.second == totals[syncs.waits.first]).all()
    assert (totals > 0).all()
    edges = graph.edges
    for producer, consumer in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True):
        assert any(producer in posters for posters, _ in waits_of(schedule, consumer))


@pytest.mark.parametrize("name", CHAINS)
def test_edges_over_slots_equal_the_graphs_own_where_no_memory_is_shared(name):
    graph = CHAINS[name]
    edges = graph.edges
    expected = sorted(set(zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True)))
    found = derived_edges(Program.from_graph(graph), np.arange(graph.num_tiles))
    assert [tuple(pair) for pair in found.tolist()] == expected


def test_a_coarser_policy_never_has_more_counters():
    for graph in CHAINS.values():
        counters = {policy: by_ticket(graph, policy).syncs.num_counters for policy in POLICIES}
        assert counters["none"] <= counters["row"] <= counters["tile"]
        assert max(counters.values()) == counters["tile"]


def test_unknown_policies_orders_buffers_and_workers_are_refused():
    graph = CHAINS["chain"]
    everything = range(len(graph.tasks))
    for wrong in (
        lambda: plan(graph, everything, "rows"),
        lambda: plan(graph, [0, 0, *range(2, len(graph.tasks))]),
        lambda: plan(graph, [0]),
        lambda: plan(graph, everything, workers=0),
        lambda: plan(graph, everything, buffers={"nobody": "b"}),
        lambda: plan(graph, everything, queues=[[0], [len(graph.tasks)]]),
        lambda: plan(graph, everything, queues=[[-1]]),
    ):
        with pytest.raises(InvalidArgumentError):
            wrong()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_scalar_has_a_counter_under_every_policy(policy):
    tasks = (Task(0, "make", (), (("s", ()),), 1), Task(1, "read", (("s", ()),), (), 1))
    made = verify(plan(TileGraph({"s": Tensor("s", (), (), 2)}, tasks), [0, 1], policy))
    assert made.schedule.syncs.num_counters == 1
