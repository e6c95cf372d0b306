"""Bounds of two chained products and of attention: the counting behind them by brute force, and no order below one."""

import heapq
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from onewave.base.errors import InvalidArgumentError
from onewave.cli.main import app
from onewave.tiles.graph.builders import gemm_chain
from onewave.tiles.graph.builders_attention import attention
from onewave.tiles.search.bounds import Bound, ChainShape, best_bound, chain_bounds, graph_bound
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.simulate import simulate


class Elements:
    """Numbers of the elements of X[m, k], W0[k, n], H[m, n], W1[n, p], Y[m, p], and every multiply-add's three."""

    def __init__(self, m: int, k: int, n: int, p: int):
        shapes = {"X": (m, k), "W0": (k, n), "H": (m, n), "W1": (n, p), "Y": (m, p)}
        count = itertools.count()
        at = {(name, *index): next(count) for name, shape in shapes.items() for index in np.ndindex(*shape)}
        self.count, self.at, self.sizes = len(at), at, (m, k, n, p)
        self.first = [
            (at["X", i, d], at["W0", d, j], at["H", i, j]) for i in range(m) for j in range(n) for d in range(k)
        ]
        self.second = [
            (at["H", i, j], at["W1", j, q], at["Y", i, q]) for i in range(m) for j in range(n) for q in range(p)
        ]

    def subsets(self) -> np.ndarray:
        """Every set of elements as bits."""
        return np.arange(1 << self.count, dtype=np.int64)


def covered(sets: np.ndarray, triples: list[tuple[int, ...]]) -> np.ndarray:
    """How many of the triples lie in each set."""
    masks = [sum(1 << each for each in set(triple)) for triple in triples]
    return sum((sets & mask == mask).astype(np.int64) for mask in masks)


@pytest.mark.parametrize(("sizes", "met"), [((2, 2, 2, 2), 12), ((2, 1, 3, 2), None), ((1, 3, 3, 1), None)])
def test_no_set_of_elements_serves_more_multiply_adds_than_one_products_would(
    sizes: tuple[int, int, int, int], met: int | None
) -> None:
    elements = Elements(*sizes)
    sets = elements.subsets()
    size = np.bitwise_count(sets)
    found = covered(sets, elements.first + elements.second)
    assert (found <= (size / 3) ** 1.5 + 1e-9).all()
    if met is not None:  # a cube of one product: the constant can't be smaller
        assert found[size == met].max() == (met / 3) ** 1.5


@pytest.mark.parametrize("sizes", [(3, 1, 3, 1), (2, 1, 3, 2), (2, 2, 2, 1)])
def test_no_set_of_elements_uses_up_more_of_the_intermediate_than_its_rows_and_columns_meet(
    sizes: tuple[int, int, int, int],
) -> None:
    elements, (m, k, n, p) = Elements(*sizes), sizes
    sets, at = elements.subsets(), elements.at
    lives = [
        (at["H", i, j], *(at["X", i, d] for d in range(k)), *(at["W0", d, j] for d in range(k)),
         *(at["W1", j, q] for q in range(p)), *(at["Y", i, q] for q in range(p)))
        for i in range(m) for j in range(n)
    ]  # fmt: skip
    matrices = sets & ~sum(1 << at["H", i, j] for i in range(m) for j in range(n))
    used_up = covered(sets, lives)
    assert (used_up <= (np.bitwise_count(matrices) / (2 * (k + p))) ** 2 + 1e-9).all()
    assert used_up.max() == m * n


def least_traffic(sizes: tuple[int, int, int, int], slots: int) -> int:
    """The true optimum of the game, by Dijkstra's search over what is red, what is blue, and what has been done."""
    elements = Elements(*sizes)
    m, _, n, p = sizes
    triples = elements.first + elements.second
    whole = {elements.at["H", i, j]: sum(1 << t for t, x in enumerate(elements.first) if x[2] == elements.at["H", i, j])
             for i in range(m) for j in range(n)}  # fmt: skip
    results = sum(1 << elements.at["Y", i, q] for i in range(m) for q in range(p))
    made = results | sum(1 << each for each in whole)
    inputs = ((1 << elements.count) - 1) & ~made
    uses = [sum(1 << t for t, triple in enumerate(triples) if each in triple) for each in range(elements.count)]
    start = (0, inputs, 0)
    best, queue, all_done = {start: 0}, [(0, start)], (1 << len(triples)) - 1
    while queue:
        cost, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        red, blue, done = state
        if done == all_done and blue & results == results:
            return cost

        def reach(red: int, blue: int, done: int, cost: int) -> None:
            if (red, blue, done) not in best or cost < best[red, blue, done]:
                best[red, blue, done] = cost
                heapq.heappush(queue, (cost, (red, blue, done)))

        full = red.bit_count() == slots
        for t, (left, right, total) in enumerate(triples):
            ready = red >> left & red >> right & 1 and (left not in whole or done & whole[left] == whole[left])
            begun = done & uses[total] & sum(1 << u for u, x in enumerate(triples) if x[2] == total)
            room = red >> total & 1 if begun else red >> total & 1 or not full
            if not done >> t & 1 and ready and room:
                reach(red | 1 << total, blue & ~(1 << total), done | 1 << t, cost)
        for each in range(elements.count):
            bit = 1 << each
            if red & bit:
                # Never forgotten while it is needed and lies nowhere else.
                if blue & bit or (done & uses[each] == uses[each] and not results & bit):
                    reach(red & ~bit, blue, done, cost)
                if not blue & bit:
                    reach(red, blue | bit, done, cost + 1)
            elif blue & bit and not full and done & uses[each] != uses[each]:
                reach(red | bit, blue, done, cost + 1)
    raise AssertionError("unreachable")


def bounds_of(shape: ChainShape, compulsory: float, slots: int) -> list[Bound]:
    return [Bound("compulsory", compulsory, "bytes", True, ""), *chain_bounds(shape, slots, itemsize=1)]


@pytest.mark.parametrize(
    ("sizes", "slots"), [((1, 1, 2, 1), 3), ((1, 2, 2, 1), 4), ((2, 1, 2, 1), 3), ((2, 1, 1, 2), 4)]
)
def test_the_bounds_are_never_above_the_optimum(sizes: tuple[int, int, int, int], slots: int) -> None:
    m, k, n, p = sizes
    found = bounds_of(ChainShape(m * n, k, p), m * k + k * n + n * p + m * p, slots)
    assert best_bound(found).value <= least_traffic(sizes, slots)


@settings(max_examples=40)
@given(*[st.integers(2, 9)] * 4, st.integers(4, 40), st.sampled_from(["row-by-row", "sequential", "half-row"]))
def test_no_order_of_a_chain_moves_less(m: int, k: int, n: int, p: int, slots: int, order: str) -> None:
    graph = gemm_chain(m, k, n, p, (1, 1, 1), splits=1)
    machine = Machine(workers=1, levels=(CacheLevel("L2", 2 * slots, policy="belady"),))
    report = simulate(graph, order, machine, mode="serial").report
    found = (graph_bound(graph), *chain_bounds(ChainShape(m * n, k, p), 2 * slots, accumulators=1))
    assert report.memory_loaded + report.memory_stored >= best_bound(found).value


def test_attentions_bound_is_what_flash_attention_moves_in_the_long_run() -> None:
    shape = ChainShape.of_attention(1 << 14, 1 << 14, 1, 64, causal=False)
    slots = 64 * 2 * 1024  # Q and O of 1024 rows
    kept = chain_bounds(shape, slots, itemsize=1)[1]
    streamed = (1 << 14) // 1024 * 2 * 64 * (1 << 14)
    assert 0.8 * streamed < kept.value < streamed
    # No more than the pairs that are seen: the last query sees all keys.
    assert ChainShape.of_attention(3, 5, 2, 64, causal=True).pairs == 2 * (3 + 4 + 5)
    assert ChainShape.of_attention(5, 3, 1, 64, causal=True).pairs == 1 + 2 + 3


@pytest.mark.parametrize("fused", [True, False])
def test_no_simulated_attention_moves_less(fused: bool) -> None:
    graph = attention(64, 64, 1, 4, (4, 4), fused=fused)
    for slots in (64, 128, 512):
        machine = Machine(workers=1, levels=(CacheLevel("L2", 2 * slots, policy="belady"),))
        report = simulate(graph, "sequential", machine, mode="serial").report
        held = 4 * 64 + 4 * 4 * 4
        shape = ChainShape.of_attention(64, 64, 1, 4, causal=False)
        least = best_bound((graph_bound(graph), *chain_bounds(shape, 2 * slots, accumulators=held))).value
        assert report.memory_loaded + report.memory_stored >= least


def test_the_command_prints_the_gap_to_the_game() -> None:
    run = CliRunner().invoke(app, ["tiles", "bounds", "chain", "512", "512", "512", "512", "--cache", "4KB", "--json",
                                   "--workers", "1", "--tile", "32x32x32"])  # fmt: skip
    facts = json.loads(run.output)
    assert facts["best"] == "two products"
    assert {"intermediate kept", "compulsory"} <= {bound["name"] for bound in facts["bounds"]}
    assert 0 < facts["orders"][0]["gap"] < 5


@pytest.mark.parametrize(("call", "words"), [
    (lambda: ChainShape(0, 1, 1), "pairs: 0"),
    (lambda: chain_bounds(ChainShape(1, 1, 1), 0), "1 byte"),
    (lambda: chain_bounds(ChainShape(1, 1, 1), 4, workers=0), "workers: 0"),
])  # fmt: skip
def test_what_has_no_bound_is_refused_by_name(call, words) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        call()
