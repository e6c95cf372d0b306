"""Traces taken apart: hand-offs, runs and stragglers counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from onewave.cli.tiles import tiles
from onewave.tiles.timeline import timeline
from onewave.tiles.trace import Trace


def trace_of(rows: list[tuple[str, int, float, float]], workers: int) -> Trace:
    """rows: (phase, worker, start, end)."""
    phases, lanes, start, end = zip(*rows, strict=True)
    times = [np.array(values, dtype=np.float64) for values in (start, end)]
    return Trace(
        source="measured",
        unit="ns",
        workers=workers,
        task=np.arange(len(rows)),
        worker=np.array(lanes, dtype=np.int64),
        wait_start=times[0],
        start=times[0],
        end=times[1],
        name=tuple(phases),
        phase=tuple(phases),
    )


def layers(count: int) -> list[tuple[str, int, float, float]]:
    """Three workers; every layer takes 100: `a` ends at 30, 31 and 40, `b` starts at 45, 47 and 50."""
    rows: list[tuple[str, int, float, float]] = []
    for layer in range(count):
        at = 100.0 * layer
        rows += [(f"a{layer}", w, at, at + end) for w, end in enumerate((30, 31, 40))]
        rows += [(f"b{layer}", w, at + start, at + 90) for w, start in enumerate((45, 47, 50))]
    return rows


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_hand_offs_runs_and_stragglers_are_those_of_every_layer(count: int) -> None:
    found = timeline(trace_of([*layers(count), ("head", 0, 100.0 * count + 5, 100.0 * count + 25)], 3))
    a, b, head = found.stages
    assert (b.stage, b.after, b.layers, b.tasks) == ("b", "a", count, 3)
    assert (b.hand_off, b.middle_hand_off, b.run, b.late) == (5, 7, 43, 0)
    assert (a.run, a.late) == (31, 9)
    if count > 1:
        assert a.after == "b"
        assert found.period == 100
    if count > 2:
        assert a.hand_off == 10
    assert (head.after, head.hand_off, head.run) == ("b", 15, 20)
    assert found.makespan == 100 * count + 25


def test_a_stage_that_begins_before_the_last_has_ended_has_a_hand_off_below_nothing() -> None:
    found = timeline(trace_of([("up", 0, 0, 10), ("up", 1, 0, 20), ("down", 0, 12, 30)], 2))
    assert [stage.stage for stage in found.stages] == ["up", "down"]
    assert found.stages[1].hand_off == -8
    assert found.period is None


def test_the_command_prints_a_row_a_stage_and_the_same_as_json(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(trace_of(layers(4), 3).to_json())
    shown = CliRunner().invoke(tiles, ["timeline", str(file)])
    assert shown.exit_code == 0
    assert "390 ns in all, a layer every 100" in shown.output
    found = json.loads(CliRunner().invoke(tiles, ["timeline", str(file), "--json"]).output)
    assert [stage["stage"] for stage in found["stages"]] == ["a", "b"]
    assert found["stages"][1]["hand_off"] == 5
