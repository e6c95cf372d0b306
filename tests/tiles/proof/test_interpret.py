"""Tables run by several workers in random interleavings: every order, policy and chain; real arithmetic; no hanging."""

import dataclasses
import tracemalloc

import numpy as np
import pytest

from kit.task_tables.execute import execute
from kit.task_tables.interpret_all import explore
from kit.task_tables.small_graphs import CHAINS
from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import gemm_chain
from onewave.tiles.graph.graph import Task, Tensor, TileGraph
from onewave.tiles.order.orders import ORDERS, task_order
from onewave.tiles.order.policies import POLICIES, plan
from onewave.tiles.order.schedule import Csr, Mode
from onewave.tiles.proof.interpret import interpret
from onewave.tiles.proof.table import TaskTable, lower
from onewave.tiles.proof.verify import verify


def table_of(graph: TileGraph, order="sequential", policy="tile", mode=Mode.STATIC, workers=3) -> TaskTable:
    return lower(verify(plan(graph, task_order(graph, order, workers=workers), policy, workers=workers, mode=mode)))


def without_waits(table: TaskTable) -> TaskTable:
    none = np.zeros(0, dtype=np.int64)
    return dataclasses.replace(table, waits=Csr.build(table.num_tasks, none, none, none))


@pytest.mark.parametrize("name", ["chain", "ffn", "attention block", "two convolutions", "decode"])
def test_every_order_and_policy_is_verified_and_ends_under_hundreds_of_interleavings(name):
    graph = CHAINS[name]
    done: set[bytes] = set()
    for order in ORDERS.keys() - {"explicit"}:
        for policy in POLICIES:
            for mode in Mode:
                table = table_of(graph, order, policy, mode)
                key = table.to_bytes()
                # Two orders of a small graph may be one and the same.
                if key not in done:
                    result = interpret(table, runs=300, seed=len(done))
                    assert result.ok, (order, policy, mode, result.complaint)
                done.add(key)
    # Every stage of a decode step reads all of the stage before, which leaves few orders.
    assert len(done) >= (1 if name == "decode" else 3) * len(POLICIES)


@pytest.mark.parametrize("mode", list(Mode))
def test_an_explicit_order_ends_too(mode):
    graph = CHAINS["gemm"]
    order = "explicit:[[2,1],[0,0],[1,1],[0,1],[2,0],[1,0]]"
    assert interpret(table_of(graph, order, "tile", mode), runs=1000).ok


@pytest.mark.parametrize("workers", [1, 2, 5, 40])
def test_tickets_are_live_with_any_number_of_workers(workers):
    for policy in POLICIES:
        assert interpret(table_of(CHAINS["ffn"], "bpt", policy, Mode.TICKET), workers, runs=200).ok


def test_counters_are_not_reset_between_epochs():
    for mode in Mode:
        assert interpret(table_of(CHAINS["ffn"], policy="row", mode=mode), runs=100, epochs=4).ok
    table = table_of(CHAINS["ffn"], policy="row")
    wrong = dataclasses.replace(table, totals=table.totals - 1)  # the second epoch would start too early
    assert interpret(wrong, runs=100, epochs=1).ok
    assert interpret(wrong, runs=100, epochs=2).wrong.any()


def test_a_missing_wait_is_found_by_some_interleaving_and_told():
    result = interpret(without_waits(table_of(CHAINS["chain"])), runs=200)
    assert result.wrong.any()
    assert "reads slot" in str(result.complaint)
    assert not result.ok


def test_a_wait_that_nobody_answers_ends_stuck_instead_of_hanging():
    table = table_of(CHAINS["chain"])
    waits = table.waits
    never = dataclasses.replace(table, waits=Csr(waits.start, waits.first, waits.second + 1))
    result = interpret(never, runs=50)
    assert result.stuck.all()
    assert not result.finished.any()


def pair_of_tasks() -> TaskTable:
    """Worker 0 runs b, which reads what worker 1's task a writes."""
    tensors = {name: Tensor(name, (1,), (1,), 1) for name in "xy"}
    tasks = (Task(0, "a", (), (("x", (0,)),), 1), Task(1, "b", (("x", (0,)),), (("y", (0,)),), 1))
    return lower(verify(plan(TileGraph(tensors, tasks), [0, 1], workers=2, queues=[[1], [0]])))


def test_more_queues_than_run_at_once_get_stuck_as_verify_says_they_may():
    # Worker 0 waits for worker 1, which only starts when worker 0 has left.
    assert interpret(pair_of_tasks(), 2, runs=10).ok
    assert interpret(pair_of_tasks(), 1, runs=10).stuck.all()


def test_a_budget_of_turns_ends_every_run():
    result = interpret(table_of(CHAINS["chain"]), runs=5, max_turns=3)
    assert result.turns == 3
    assert not result.finished.any()
    assert not result.stuck.any()


def test_the_same_seed_gives_the_same_runs_and_another_seed_others():
    table = without_waits(pair_of_tasks())
    first, again, other = (interpret(table, runs=64, seed=seed).wrong.tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_bad_arguments_are_refused():
    table = table_of(CHAINS["chain"])
    for wrong in ({"workers": 0}, {"runs": 0}, {"epochs": 0}, {"workers": 10**9}, {"seed": -1}):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}: .*allowed: "):
            interpret(table, **wrong)


def test_runs_of_many_workers_are_refused_before_memory_is_taken():
    table = lower(verify(plan(CHAINS["chain"], range(len(CHAINS["chain"].tasks)), mode=Mode.TICKET)))
    assert interpret(table, 60_000).ok
    with pytest.raises(InvalidArgumentError, match=r"runs: 100000 of 60,000 workers .*allowed: up to [0-9]+"):
        interpret(table, 60_000, runs=100_000)


def test_one_long_row_among_many_short_ones_takes_memory_in_proportion():
    n = 2000
    tensors = {"x": Tensor("x", (n,), (1,), 1), "y": Tensor("y", (1,), (1,), 1)}
    parts = [Task(i, "part", (), (("x", (i,)),), 1) for i in range(n)]
    graph = TileGraph(tensors, (*parts, Task(n, "sum", tuple(("x", (i,)) for i in range(n)), (("y", (0,)),), 1)))
    table = table_of(graph, policy="none")
    tracemalloc.start()
    assert interpret(table, runs=1).ok
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A row of 2,000 operands for each of 2,000 tasks would be 32 MB.
    assert peak < 15e6
    with pytest.raises(InvalidArgumentError, match=r"runs: 100000 of .*allowed: up to [0-9]+"):
        interpret(table, runs=100_000)


def test_an_empty_table_ends_at_once():
    table = table_of(TileGraph({}, ()))
    assert interpret(table, runs=3).ok
    assert explore(table) is None


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("policy", POLICIES)
def test_real_tiles_multiply_to_the_product_of_the_whole_matrices(mode, policy):
    rng = np.random.default_rng(0)
    graph = gemm_chain(6, 4, 8, 4, tile=(2, 2, 2), splits=2)
    x, w0, w1 = rng.standard_normal((6, 4)), rng.standard_normal((4, 8)), rng.standard_normal((8, 4))
    memory = {
        graph.tile_number((name, (i, j))): matrix[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
        for name, matrix in (("X", x), ("W0", w0), ("W1", w1))
        for i in range(matrix.shape[0] // 2)
        for j in range(matrix.shape[1] // 2)
    }

    def multiply(reads):
        pairs, start = (reads, 0) if len(reads) % 2 == 0 else (reads[:-1], reads[-1])
        return [start + sum(a @ b for a, b in zip(pairs[::2], pairs[1::2], strict=True))]

    table = table_of(graph, "half-row", policy, mode)
    for seed in range(5):
        out = execute(table, memory, {"gemm0": multiply, "gemm1": multiply}, seed=seed)
        y = np.block([[out[graph.tile_number(("Y", (i, j)))] for j in range(2)] for i in range(3)])
        np.testing.assert_allclose(y, x @ w0 @ w1, rtol=1e-12)
