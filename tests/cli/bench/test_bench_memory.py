"""`onewave bench memory` on a tiny model."""

import json

import pytest

from kit.ledgers import read_ledger
from onewave.memory.trace import Trace

ALLOCATORS = ["onewave", "torch", "malloc", "static plan"]


def test_a_serving_run_is_recorded_and_its_trace_replayed_alike(onewave, tiny_model, tmp_path):
    trace, figures = tmp_path / "trace.jsonl", tmp_path / "figures"
    model = ("--model", tiny_model, "--max-model-len", "32")
    done = onewave("bench", "memory", *model, "--requests", "8", "--reps", "1", "--record", trace, "--ledger", figures)
    assert done.status == 0
    assert all(name in done.out for name in ALLOCATORS)
    assert [line["extra"]["allocator"] for line in read_ledger(figures / "cpu.jsonl")] == ALLOCATORS[:3]
    recorded = Trace.read(trace)
    assert recorded.num_allocations > 100
    # Nearly all of it ends with the run.
    assert sum(event.num_bytes is None for event in recorded.events) > 0.9 * recorded.num_allocations
    found = json.loads(onewave("bench", "memory", "--trace", trace, "--reps", "1", "--json").out)
    assert (found["allocations"], found["peak_bytes"]) == (recorded.num_allocations, recorded.peak_bytes)
    ours, *_, planned = found["results"]
    assert (ours["calls_first"] > 0, ours["calls_again"]) == (True, 0)
    assert planned["reserved_bytes"] >= found["peak_bytes"]
    assert ours["reserved_bytes"] >= found["peak_bytes"]


@pytest.mark.parametrize(("option", "message"), [(["--record", "x"], "--record"), ([], "--trace: ")])
def test_a_trace_that_is_none_or_recorded_again_is_refused(onewave, tmp_path, option, message):
    assert onewave("bench", "memory", "--trace", tmp_path / "none", *option).error().startswith(f"error: {message}")


def test_a_model_of_too_few_positions_is_refused(onewave, tiny_model):
    refusal = onewave("bench", "memory", "--model", tiny_model, "--max-model-len", "15").error()
    assert refusal == "error: --max-model-len: 15; allowed: 16 or more"
