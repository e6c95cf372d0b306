"""Chains, sample traces and the staircase as the page gets them."""

import time

import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.lab.launches import (
    CHAIN_ORDERS,
    SAMPLES,
    _tasks_and_accesses,
    chain,
    chain_matrix,
    chain_sweep,
    sample_trace,
    staircase,
)
from onewave.tiles.graph.programs import build_program
from onewave.tiles.order.policies import POLICIES
from onewave.tiles.sim.trace import Trace


@pytest.mark.parametrize("program", ["gemms", "attention"])
def test_no_task_of_a_chain_starts_before_its_producers_end(program):
    found = chain({"program": program, "rows": 3, "cols": 3, "inner": 4, "workers": 5, "order": "half-row"})
    trace = Trace.from_dict(found["trace"])
    assert sum(map(len, found["producers"])) > 0
    for task, producers in enumerate(found["producers"]):
        assert all(trace.end[producer] <= trace.start[task] for producer in producers)
    assert len(found["places"]) == len(trace)
    assert len({tuple(place) for place in found["places"]}) == len(trace)


def test_idle_time_is_what_the_lanes_do_not_run():
    found = chain({"workers": 6, "sync": "none"})
    trace = Trace.from_dict(found["trace"])
    assert found["idle_share"] == pytest.approx(1 - trace.busy.sum() / (6 * found["makespan"]))
    assert found["idle_share"] > 0.3  # a whole stage is waited for


def test_every_order_is_run_under_every_policy():
    cells = chain_matrix({"workers": 3})["cells"]
    assert set(cells) == set(CHAIN_ORDERS)
    assert {len(row) for row in cells.values()} == {len(POLICIES)}
    one = chain({"workers": 3, "order": "half-row", "sync": "row"})
    cell = cells["half-row"][list(POLICIES).index("row")]
    assert cell["makespan"] == one["makespan"]


def test_every_order_of_a_chain_moves_at_least_the_compulsory_bytes():
    found = chain_sweep({"rows": 3, "cols": 3, "inner": 3})
    assert set(found["series"]) == set(CHAIN_ORDERS)
    for column in found["series"].values():
        assert all(moved >= found["bound"][0] for moved in column)
    # With room for everything, H alone is moved beyond what must be: it is stored at the end, though nobody reads it.
    intermediate = 9 * 128 * 128 * 2
    assert {column[-1] for column in found["series"].values()} == {found["bound"][0] + intermediate}


def test_the_staircase_rises_where_a_wave_begins():
    found = staircase({"n": 1024, "k": 512, "max_m": 4096, "workers": 16})
    jumps = [i for i in range(1, len(found["m"])) if found["waves"][i] > found["waves"][i - 1]]
    flat = [i for i in range(1, len(found["m"])) if found["waves"][i] == found["waves"][i - 1]]
    assert jumps
    assert flat
    rise = lambda places: max(found["us"][i] - found["us"][i - 1] for i in places)  # noqa: E731
    assert min(found["us"][i] - found["us"][i - 1] for i in jumps) > rise(flat)


@pytest.mark.parametrize(
    ("program", "sizes"),
    [("gemm", "512,512,256"), ("attention", "256,256,4,64"), ("block", "256,4,64,512"), ("decode", "llama-3.2-1b,512")],
)
def test_a_sample_trace_is_one_that_the_library_reads(program, sizes):
    trace = Trace.from_dict(sample_trace({"program": program, "sizes": sizes, "workers": 8}))
    assert len(trace) > 0
    assert trace.workers == 8


def test_a_trace_that_would_take_too_long_is_refused_before_it_is_built():
    began = time.process_time()
    for program, sizes, words in (
        ("attention", "65536,65536,65536,64", "tasks"),
        ("attention", "65536,65536,8,64", "2,105,344 tasks"),
        ("ffn", "65536,128,65536", "786,944 tasks"),
        ("gemm", "32768,32768,65536", "accesses"),
        ("block", "128,45000,1,1", "accesses"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{words}.*Choose smaller sizes"):
            sample_trace({"program": program, "sizes": sizes})
    assert time.process_time() - began < 5


@pytest.mark.parametrize("program", ["gemm", "chain", "ffn", "attention", "block"])
def test_tasks_are_counted_exactly_before_a_program_is_built(program):
    sizes = [int(size) for size in SAMPLES[program].split(",")]
    tasks, accesses = _tasks_and_accesses(program, sizes)
    graph, _ = build_program(program, sizes)
    assert tasks == len(graph.tasks)
    assert len(graph.accesses.tile) / 2 < accesses < 4 * len(graph.accesses.tile)


@pytest.mark.parametrize(
    "sizes", [(128, 1500, 1, 1), (300, 3, 7, 130), (2000, 1, 1, 1), (128, 1, 5000, 1), (1, 1, 1, 5000)]
)
def test_accesses_of_a_block_are_counted_exactly_however_narrow_or_wide_a_head_is(sizes):
    graph, _ = build_program("block", sizes)
    assert _tasks_and_accesses("block", sizes) == (len(graph.tasks), len(graph.accesses.tile))


def test_a_decode_step_is_built_for_built_in_models_only():
    for sizes in (
        "/etc/passwd",
        "../llama-3.2-1b",
        "llama-3.2-1b.json,1",
        "llama-3.2-1b,-1",
        "llama-3.2-1b,1,0",
        "llama-3.2-1b,1,17",
        "llama-3.2-1b,1,1,1",
    ):
        with pytest.raises(InvalidArgumentError, match="allowed"):
            sample_trace({"program": "decode", "sizes": sizes})
