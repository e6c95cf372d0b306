"""simulate: runs counted by hand, and laws that hold for every graph, order and machine."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import ffn, gemm, gemm_chain, gemm_stream_k
from onewave.tiles.graph.builders_attention import attention_block
from onewave.tiles.graph.graph import Task, Tensor, TileGraph
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.simulate import latency_staircase, simulate
from onewave.tiles.sim.traffic import wave_of

TINY = (16, 16, 16)


def program(*tasks, tiles=8):
    """A graph over one tensor of 1-byte tiles: tasks are (reads, writes, flops)."""
    made = tuple(
        Task(i, "t", tuple(("x", (r,)) for r in reads), tuple(("x", (w,)) for w in writes), flops)
        for i, (reads, writes, flops) in enumerate(tasks)
    )
    return TileGraph({"x": Tensor("x", (tiles,), (1,), 1)}, made)


def machine(workers=1, *, capacity=10**6, policy="lru", **changes):
    """A machine that does 1 FLOP a lane and ns, and is otherwise free of charge."""
    level = CacheLevel("L2", capacity, 1e9, policy)
    costs = {"flops_per_ns": float(workers), "memory_bandwidth": 1e9, "task_ns": 0.0}
    return Machine(workers, **(costs | {"levels": (level,)} | changes))


def spans(trace):
    return [
        (int(w), a, b, c)
        for w, a, b, c in zip(trace.worker, trace.wait_start, trace.start.round(6), trace.end.round(6), strict=True)
    ]


def test_a_ticket_is_taken_at_once_and_waits_for_its_producer():
    trace = simulate(program(((), (0,), 4), ((0,), (1,), 3), ((), (2,), 2)), machine=machine(2))
    # Lane 1 takes task 1, which waits for task 0 until 4; task 2 goes to lane 0 then.
    assert spans(trace) == [(0, 0, 0, 4), (1, 0, 4, 7), (0, 4, 4, 6)]
    assert (trace.makespan, trace.tail) == (pytest.approx(7), pytest.approx(1))
    assert trace.idle.tolist() == pytest.approx([1, 4])
    assert trace.waited.tolist() == pytest.approx([0, 4])
    assert trace.report.critical_path == pytest.approx(7)


def test_static_queues_deal_the_order_out_in_turn():
    trace = simulate(program(*[((), (i,), 1 + i) for i in range(4)]), machine=machine(2, queues="static"))
    assert spans(trace) == [(0, 0, 0, 1), (1, 0, 0, 2), (0, 1, 1, 4), (1, 2, 2, 6)]


def test_given_queues_are_kept():
    trace = simulate(program(*[((), (i,), 1) for i in range(3)]), machine=machine(2), queues=[[2, 0], [1]])
    assert trace.worker.tolist() == [0, 1, 0]
    assert trace.start.tolist() == pytest.approx([1, 0, 0])


def test_memory_is_shared_by_the_tasks_that_use_it():
    # 6 and 2 bytes at 2 bytes/ns: both at 1 byte/ns until 2, then the first alone has 4 left at 2 bytes/ns.
    sizes = {"a": Tensor("a", (6,), (6,), 1), "b": Tensor("b", (2,), (2,), 1)}
    tasks = (Task(0, "t", (("a", (0,)),), (), 0), Task(1, "t", (("b", (0,)),), (), 0))
    graph = TileGraph(sizes, tasks)
    assert simulate(graph, machine=machine(2, memory_bandwidth=2.0)).end.tolist() == pytest.approx([4, 2])
    # No lane of eight draws more than four fair shares, 1 byte/ns: the first then takes its 6 ns.
    assert simulate(graph, machine=machine(8, memory_bandwidth=2.0)).end.tolist() == pytest.approx([6, 2])


def test_start_up_costs_count_by_name():
    graph = program(((), (0,), 0), ((0,), (1,), 0))
    assert simulate(graph, machine=machine(task_ns=5.0)).makespan == pytest.approx(10)
    assert simulate(graph, machine=machine(task_ns=5.0, task_costs={"t": 2.0})).makespan == pytest.approx(4)


def test_hand_counted_traffic_of_three_by_three():
    # 3x3 tiles of one K step each, every tile 512 bytes; row order, serial. Besides A and B the stream writes C.
    graph = gemm(48, 48, 16, TINY)
    loads, stores = [], []
    for tiles in (2, 3, 4, 5, 6, 9):
        trace = simulate(graph, "row", machine(capacity=512 * tiles), mode="serial")
        loads.append(trace.report.memory_loaded // 512)
        stores.append(trace.report.memory_stored // 512)
    # Room for 2 keeps nothing (A B C come and go): 18. At 3, A stays for its row: 3 + 9 = 12, still at 4. At 5 and 6
    # the written C tiles push B out before its next row. Only from 3 B + A + the C tiles between on does B stay.
    assert loads == [18, 12, 12, 12, 12, 6]
    assert stores == [9] * 6
    best = simulate(graph, "row", machine(capacity=512 * 5, policy="belady"), mode="serial")
    assert best.report.memory_loaded == 512 * 6


def test_a_wave_shares_what_its_tasks_read_at_the_same_step():
    graph = gemm(32, 32, 64, TINY)
    small = machine(4, capacity=512 * 5)
    together = simulate(graph, "row", small)
    alone = simulate(graph, "row", machine(1, capacity=512 * 5), mode="serial")
    assert together.report.memory_loaded == 512 * 16  # each of A's and B's 8 tiles once
    assert alone.report.memory_loaded > together.report.memory_loaded
    skewed = simulate(graph, "row", machine(4, capacity=512 * 5, skew=6.0))
    assert skewed.report.memory_loaded > together.report.memory_loaded


def test_waves_end_before_a_task_that_depends_on_one_of_theirs():
    graph = program(((), (0,), 1), ((), (1,), 1), ((0,), (2,), 1), ((), (3,), 1), ((1,), (4,), 1))
    assert wave_of(graph, np.arange(5), 8).tolist() == [0, 0, 1, 1, 1]
    assert wave_of(graph, np.arange(5), 2).tolist() == [0, 0, 1, 1, 2]


def test_dirty_tiles_of_an_intermediate_stay_in_a_cache_that_holds_them():
    graph = gemm_chain(32, 32, 32, 32, TINY)
    wide = simulate(graph, "row-by-row", machine(capacity=10**6), mode="serial").report
    assert wide.memory_loaded == wide.compulsory_loaded
    assert wide.memory_stored == wide.compulsory_stored + 2 * 32 * 32
    narrow = simulate(graph, "sequential", machine(capacity=512 * 3), mode="serial").report
    assert narrow.memory_loaded > wide.memory_loaded


def test_levels_pass_on_what_they_miss():
    graph = gemm(64, 64, 64, TINY)
    inner = CacheLevel("smem", 512 * 6, 1e9, private=True)
    outer = CacheLevel("L2", 512 * 12, 1e9)
    report = simulate(graph, "row", machine(levels=(inner, outer)), mode="serial").report
    smem, l2 = report.levels
    assert smem.loaded_bytes + smem.stored_bytes == l2.requested_bytes
    assert smem.requested_bytes == graph.bytes_of_numbers(graph.accesses.tile).sum()
    assert (report.memory_loaded, report.memory_stored) == (l2.loaded_bytes, l2.stored_bytes)
    for level in report.levels:
        assert sum(tensor.loaded_bytes for tensor in level.tensors) == level.loaded_bytes
        assert sum(tensor.stored_bytes for tensor in level.tensors) == level.stored_bytes
        assert sum(tensor.hits for tensor in level.tensors) == level.hits
    assert set(report.energy_mj) == {"smem", "L2", "memory", "flop"}
    assert report.energy_mj["memory"] == pytest.approx(31.3e-9 * (report.memory_loaded + report.memory_stored))


def test_a_private_cache_never_serves_a_tile_that_another_lane_has_rewritten():
    # Lane 0 reads x0, lane 1 rewrites it, lane 0 reads it again.
    graph = program(((0,), (1,), 1), ((), (2,), 1), ((), (3,), 1), ((), (0,), 1), ((0,), (4,), 1), ((), (5,), 1))
    level = CacheLevel("smem", 100, 1e9, private=True)
    trace = simulate(graph, machine=machine(2, levels=(level,)), mode="serial")
    assert trace.report.levels[0].hits == 0


graphs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), max_size=3, unique=True),
        st.lists(st.integers(0, 7), min_size=1, max_size=2, unique=True),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=120)
@given(
    graphs,
    st.integers(1, 5),
    st.sampled_from(["ticket", "static"]),
    st.sampled_from(["serial", "wave"]),
    st.sampled_from(["lru", "fifo", "belady"]),
    st.integers(1, 9),
    st.sampled_from(["sequential", "critical-path"]),
)
def test_every_simulation_obeys_the_laws(tasks, workers, queues, mode, policy, capacity, order):
    graph = program(*tasks)
    where = machine(workers, capacity=capacity, policy=policy, queues=queues, memory_bandwidth=1.5, task_ns=0.25)
    trace = simulate(graph, order, where, mode=mode)
    report, busy = trace.report, trace.busy
    assert sorted(trace.task.tolist()) == list(range(len(tasks)))
    assert trace.makespan >= report.critical_path - 1e-6
    assert trace.makespan >= busy.sum() / workers - 1e-6
    assert (trace.idle >= trace.waited - 1e-6).all()
    assert report.memory_loaded >= report.compulsory_loaded
    assert report.memory_stored >= report.compulsory_stored
    level = report.levels[0]
    assert 0 <= level.hits <= level.accesses == len(graph.accesses.tile)
    edges = graph.edges
    assert (trace.end[edges.producer] <= trace.start[edges.consumer] + 1e-9).all()
    for lane in range(workers):
        mine = np.flatnonzero(trace.worker == lane)
        mine = mine[np.argsort(trace.wait_start[mine], kind="stable")]
        mine = mine[np.argsort(trace.start[mine], kind="stable")]
        assert (trace.end[mine][:-1] <= trace.start[mine][1:] + 1e-9).all()


def test_an_order_of_a_grid_runs_as_it_was_clicked():
    graph = gemm(48, 48, 16, TINY)
    clicked = [[2, 2], [0, 0], [1, 1], [0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]
    trace = simulate(graph, f"explicit:{clicked}", machine())
    assert [list(graph.tasks[i].index) for i in np.argsort(trace.start)] == clicked
    with pytest.raises(InvalidArgumentError, match="inside the 3 x 3 grid"):
        simulate(graph, "explicit:[[3, 0]]", machine())


def test_queues_that_wait_for_each_other_are_a_deadlock_that_names_the_task():
    graph = program(((), (0,), 1), ((0,), (1,), 1), ((), (2,), 1), ((2,), (3,), 1))
    with pytest.raises(InvalidArgumentError, match=r"deadlock: task 1 \(t\) on lane 0 waits for task 0"):
        simulate(graph, machine=machine(2), queues=[[1, 2], [3, 0]])
    with pytest.raises(InvalidArgumentError, match="deadlock"):
        simulate(graph, [1, 0, 2, 3], machine(1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: simulate(gemm(16, 16, 16, TINY), [0, 0]), "exactly once"),
        (lambda: simulate(gemm(16, 16, 16, TINY), None), "order: None; allowed: a name"),
        (lambda: simulate(gemm(16, 16, 16, TINY), mode="parallel"), "serial, wave"),
        (lambda: simulate(gemm(16, 16, 16, TINY), machine=machine(1), queues=[[0], [0]]), "the machine's 1"),
        (lambda: simulate(gemm(16, 16, 16, TINY), machine=machine(1), queues=[[]]), "exactly once"),
        (lambda: simulate(gemm(16, 16, 16, TINY), machine=machine(capacity=100)), "largest tile, 512"),
        (lambda: Machine(workers=0), "workers"),
        (lambda: Machine(workers=70000), "workers"),
        (lambda: Machine(workers=1.5), "workers: 1.5; allowed: a whole number"),
        (lambda: Machine(co_resident="2"), "co_resident: '2'; allowed: a whole number"),
        (lambda: Machine(queues="heap"), "ticket, static"),
        (lambda: Machine(flops_per_ns=0.0), "flops_per_ns"),
        (lambda: Machine(skew=float("nan")), "skew"),
        (lambda: Machine(skew=1e300), "skew"),
        (lambda: Machine(levels=(CacheLevel("a", 1), CacheLevel("a", 2))), "different names"),
        (lambda: CacheLevel("a", 0), "1 byte"),
        (lambda: CacheLevel("a", 1, policy="clock"), "lru"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(call, words):
    with pytest.raises(InvalidArgumentError, match=words):
        call()


def test_an_empty_graph_takes_no_time():
    trace = simulate(TileGraph({}, ()), machine=machine())
    assert (len(trace), trace.makespan, trace.report.waves) == (0, 0.0, 0)


def test_stream_k_ends_earlier_than_whole_tiles_when_a_wave_does_not_fill():
    where = Machine(workers=4, levels=(CacheLevel("L2", 10**7),), task_ns=0.0)
    whole = simulate(gemm(96, 96, 2048, (32, 32, 32)), "row", where)
    graph, queues = gemm_stream_k(96, 96, 2048, (32, 32, 32), workers=4)
    assert simulate(graph, "sequential", where, queues=queues).makespan < 0.85 * whole.makespan


def test_interleaving_a_chain_keeps_its_intermediate_in_the_cache():
    graph = ffn(256, 64, 512, (32, 32, 32), fused=True)
    where = Machine(workers=4, levels=(CacheLevel("L2", 2 * 64 * 512 * 3 + 80_000),))
    moved = {order: simulate(graph, order, where).report.memory_loaded for order in ("sequential", "row-by-row")}
    assert moved["row-by-row"] < moved["sequential"]
    block = attention_block(128, 2, 32, 128, (32, 32, 32))
    assert simulate(block, "bpt", where).makespan > 0


def test_the_staircase_steps_where_a_wave_begins():
    stairs = latency_staircase(512, 256, range(64, 64 * 13, 64), (64, 64, 64), machine=Machine(workers=32))
    assert [stair.tiles for stair in stairs] == [8 * i for i in range(1, 13)]
    assert [stair.waves for stair in stairs] == [1] * 4 + [2] * 4 + [3] * 4
    times = [stair.time for stair in stairs]
    for first in (0, 4, 8):
        assert max(times[first : first + 4]) < 1.2 * min(times[first : first + 4])
    assert times[4] > 1.5 * times[3]
    assert [stair.used for stair in stairs[:4]] == [0.25, 0.5, 0.75, 1.0]


def test_a_million_accesses_take_seconds():
    graph = gemm(8192, 8192, 8192)
    assert len(graph.accesses.tile) > 10**6
    began = time.process_time()
    simulate(graph, "grouped:8")
    assert time.process_time() - began < 40


def test_a_coarser_sync_policy_waits_longer():
    # Two row blocks of two tiles, then a task a row; the second row's tiles take longer. Lanes: enough for all.
    tensors = {"h": Tensor("h", (2, 2), (1, 1), 1), "y": Tensor("y", (2,), (1,), 1)}
    tasks = [Task(2 * r + c, "h", (), (("h", (r, c)),), 2 + 6 * r + c) for r in range(2) for c in range(2)]
    tasks += [Task(4 + r, "y", (("h", (r, 0)),), (("y", (r,)),), 1) for r in range(2)]
    graph = TileGraph(tensors, tuple(tasks))

    def starts(sync):
        return simulate(graph, machine=machine(6), sync=sync).start[4:].tolist()

    assert starts(None) == starts("tile") == pytest.approx([2, 8])
    assert starts("row") == pytest.approx([3, 9])
    assert starts("none") == pytest.approx([9, 9])
    with pytest.raises(InvalidArgumentError, match="none, row, tile"):
        starts("maybe")


@settings(max_examples=60)
@given(graphs, st.integers(1, 4), st.sampled_from(["none", "row", "tile", "strided", "conv2d-tile", "consecutive"]))
def test_no_sync_policy_lets_a_task_start_before_its_producers_end(tasks, workers, sync):
    graph = program(*tasks)
    trace = simulate(graph, machine=machine(workers), sync=sync)
    edges = graph.edges
    assert (trace.end[edges.producer] <= trace.start[edges.consumer] + 1e-9).all()
