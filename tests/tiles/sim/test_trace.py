"""Trace: one type for simulated and measured launches, and its ways in and out."""

import json
import tracemalloc

import numpy as np
import pytest

from kit.refusals import refused
from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import gemm, gemm_chain
from onewave.tiles.sim.fit import stage_spans
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.simulate import simulate
from onewave.tiles.sim.timeline import timeline
from onewave.tiles.sim.trace import Trace, compare

SIMULATED = simulate(
    gemm_chain(64, 32, 64, 32, (16, 16, 16)), "row-by-row", Machine(3, levels=(CacheLevel("L2", 9999),))
)


def measured(**changes):
    """A trace as a GPU might hand it over: two workers, three tasks, in cycles."""
    tasks = {
        "task": [0, 1, 2],
        "worker": [0, 1, 0],
        "wait_start": [0, 0, 10],
        "start": [0, 4, 12],
        "end": [10, 9, 20],
        "name": ["a", "b", "a"],
        "phase": ["x", "y", "x"],
    }
    head = {
        "format": "onewave-trace",
        "version": 1,
        "source": "measured",
        "unit": "cycles",
        "workers": 2,
        "report": None,
    }
    tasks |= {key: value for key, value in changes.items() if key in tasks}
    return head | {"tasks": tasks} | {key: value for key, value in changes.items() if key not in tasks}


def test_a_simulated_trace_is_read_back_as_it_was():
    again = Trace.from_json(SIMULATED.to_json())
    assert again.to_dict() == SIMULATED.to_dict()
    assert again.report == SIMULATED.report
    assert again.makespan == SIMULATED.makespan


def test_a_measured_trace_has_the_same_properties():
    trace = Trace.from_dict(measured())
    assert (trace.makespan, trace.tail, trace.unit) == (20, 11, "cycles")
    assert trace.busy.tolist() == [18, 5]
    assert trace.idle.tolist() == [2, 15]
    assert trace.waited.tolist() == [2, 4]
    assert [(p.phase, p.tasks, p.first, p.last, p.busy, p.waited, p.running) for p in trace.phases()] == [
        ("x", 2, 0, 20, 18, 2, 18),
        ("y", 1, 4, 9, 5, 4, 5),
    ]


def test_a_phase_runs_while_any_of_its_tasks_does():
    trace = Trace.from_dict(measured(worker=[0, 1, 0], start=[0, 4, 12], end=[10, 11, 20], phase=["x", "x", "x"]))
    assert trace.phases()[0].running == 11 + 8


def test_a_measured_trace_may_leave_out_waits_names_and_phases():
    short = measured()
    for key in ("wait_start", "name", "phase"):
        del short["tasks"][key]
    trace = Trace.from_dict(short)
    assert trace.waited.tolist() == [0, 0]
    assert trace.name == trace.phase == ("", "", "")


def test_phases_are_told_apart_to_the_last_character_and_a_long_name_takes_no_memory_of_the_others():
    many = 20_000
    trace = Trace.from_dict(
        measured(
            task=list(range(many)),
            worker=[0] * many,
            wait_start=[0] * many,
            start=list(range(many)),
            end=list(range(1, many + 1)),
            name=["a"] * many,
            phase=["x", "x\0", "y" * 1000, *["x"] * (many - 3)],
        )
    )
    tracemalloc.start()
    assert [phase.tasks for phase in trace.phases()] == [many - 2, 1, 1]
    assert len(timeline(trace).stages) == len(stage_spans(trace)) == 3
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Every name as long as the longest would be 80 MB.
    assert peak < 10e6


def test_ids_keep_every_digit():
    ids = [2**53 + 1, 2**62 - 1, 0]
    assert Trace.from_dict(measured(task=ids)).task.tolist() == ids


def test_perfetto_gets_a_slice_a_task_and_one_a_wait():
    document = Trace.from_dict(measured(unit="us")).to_perfetto()
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert sorted((e["tid"], e["name"], e["ts"], e["dur"]) for e in slices) == [
        (0, "a", 0, 10),
        (0, "a", 12, 8),
        (0, "wait", 10, 2),
        (1, "b", 4, 5),
        (1, "wait", 0, 4),
    ]
    assert [e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"] == ["worker 0", "worker 1"]
    json.dumps(document)


def test_perfetto_times_are_microseconds():
    ends = [e["ts"] + e["dur"] for e in SIMULATED.to_perfetto()["traceEvents"] if e["ph"] == "X"]
    assert max(ends) == pytest.approx(SIMULATED.makespan / 1000)


def test_a_trace_shows_itself_with_waits_in_red():
    picture = Trace.from_dict(measured(name=["<b>", "b", "a"])).show()._repr_html_()
    assert picture.startswith("<svg")
    assert picture.count("<title>") == 3
    assert picture.count("#d0463b") == 3  # two waits and the legend
    assert "<b>" not in picture


def test_traces_are_compared_phase_by_phase():
    other = Trace.from_dict(measured(end=[10, 14, 30], phase=["x", "z", "x"]))
    rows = {row["phase"]: row for row in compare(Trace.from_dict(measured()), other)}
    assert list(rows) == ["x", "y", "z", "total"]
    assert rows["x"]["busy_ratio"] == pytest.approx(28 / 18)
    assert (rows["y"]["b_tasks"], rows["y"]["busy_ratio"]) == (0, 0)
    assert rows["z"]["busy_ratio"] is None
    assert (rows["total"]["a_span"], rows["total"]["b_span"]) == (20, 30)
    with pytest.raises(InvalidArgumentError, match="one unit"):
        compare(other, SIMULATED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "chrome"}, "onewave-trace"),
        ({"version": 2}, "version 1"),
        ({"unit": "hours"}, "ns, us, cycles"),
        ({"source": "dreamt"}, "simulated, measured"),
        ({"workers": 0}, "workers: 0"),
        ({"workers": "2"}, "whole number"),
        ({"workers": True}, "whole number"),
        ({"tasks": []}, "an object"),
        ({"task": [0, 1]}, "worker: 3 entries"),
        ({"task": "abc"}, "a list"),
        ({"worker": [0, 2, 0]}, "0 to 1"),
        ({"worker": [0, -1, 0]}, "worker"),
        ({"worker": [0, 0.5, 0]}, "whole numbers"),
        ({"start": [0, None, 1]}, "finite numbers"),
        ({"start": [0, float("nan"), 1]}, "finite numbers"),
        ({"end": [0, 1, 10**400]}, "finite numbers"),
        ({"task": [0, 1, 2**62]}, "task: 4611686018427387904"),
        ({"phase": ["x", "y", "z" * 1001]}, "phase: a text of 1,001 characters"),
        ({"start": [0, 10, 12]}, "times of task 1"),
        ({"wait_start": [-1, 0, 0]}, "times of task 0"),
        ({"name": [1, 2, 3]}, "texts"),
        ({"report": {"order": "row"}}, "report"),
        ({"report": SIMULATED.report.to_dict() | {"waves": "many"}}, "waves"),
        ({"report": SIMULATED.report.to_dict() | {"levels": [{"level": "L2"}]}}, "report"),
        ({"report": SIMULATED.report.to_dict() | {"energy_mj": {"L2": "x"}}}, "report"),
        ({"report": SIMULATED.report.to_dict() | {"more": 1}}, "report"),
        ({"report": [1]}, "an object"),
    ],
)
def test_a_malformed_trace_is_refused_by_name(changes, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Trace.from_dict(measured(**changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format": "onewave-trace", "version": 1}'])
def test_what_is_no_json_or_no_trace_is_one_line(text):
    with refused(InvalidArgumentError):
        Trace.from_json(text)


def test_twenty_thousand_tasks_are_written_and_read():
    graph = gemm(128 * 140, 128 * 143, 64, (128, 128, 64))
    trace = simulate(graph, "snake")
    assert len(trace) == 20_020
    again = Trace.from_json(trace.to_json())
    assert np.array_equal(again.end, trace.end)
    assert len(trace.show().svg) < 3_000_000


LARGE = {"level": "L2", "policy": "lru", "capacity": 1, "accesses": 1, "hits": 10**400, "requested_bytes": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"critical_path": float("inf")},
        {"critical_path": 10**400},
        {"energy_mj": {"memory": float("nan")}},
        {"energy_mj": {"memory": 10**400}},
        {"flops": 10**31},
        {"levels": [LARGE | {"loaded_bytes": 0, "stored_bytes": 0, "evictions": 0}]},
    ],
)
def test_a_report_of_numbers_that_json_or_a_ratio_does_not_have_is_refused(change):
    counts = dict.fromkeys(("memory_loaded", "memory_stored", "compulsory_loaded", "compulsory_stored"), 1)
    report = {"order": "row", "mode": "serial", "levels": [], **counts, "flops": 1, "waves": 1, "critical_path": 2.0}
    report["energy_mj"] = {"memory": 1.0}
    assert Trace.from_dict(measured() | {"report": report}).report is not None
    with pytest.raises(InvalidArgumentError, match="trace: report"):
        Trace.from_dict(measured() | {"report": report | change})
