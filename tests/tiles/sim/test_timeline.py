"""Traces taken apart: hand-offs, runs and stragglers counted by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kit.task_tables.small_graphs import small_step
from onewave.cli.tiles.commands import tiles
from onewave.tiles.graph.builders import ffn, gemm_chain
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.graph.notation import parse_notation
from onewave.tiles.sim.machine import Machine
from onewave.tiles.sim.simulate import simulate
from onewave.tiles.sim.timeline import timeline
from onewave.tiles.sim.trace import Trace


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


def test_a_simulated_decode_steps_layers_are_found_stage_by_stage() -> None:
    step = small_step(workers=16, num_layers=5, hidden_size=256, num_heads=4, num_kv_heads=2, vocab_size=1000)
    trace = simulate(step.graph, machine=Machine(16), queues=step.queues)
    found = timeline(trace)
    layer = ["qkv", "attend", "o", "gate_up", "down"]
    assert [stage.stage for stage in found.stages] == [*layer, "head"]
    assert [stage.layers for stage in found.stages] == [5] * 5 + [1]
    assert [stage.after for stage in found.stages] == ["down", *layer]
    # Each task starts as soon as what it reads is there, and each needs all of the stage before.
    assert [stage.hand_off for stage in found.stages] == pytest.approx([0] * 6, abs=1e-6)


@pytest.mark.parametrize(
    ("graph", "stages"),
    [
        (gemm_chain(64, 64, 64, 64, (32, 32, 32)), {"gemm0": 1, "gemm1": 1}),
        (ffn(64, 64, 128, (32, 32, 32)), {"gate": 1, "up": 1, "silu": 1, "down": 1}),
        (
            parse_notation("dim M=4\nop a T[M] = X[M]\nop b Y[M] = T[M]\ntree for M:1 { a b }").graph,
            {"a": 4, "b": 4},
        ),
        (TileGraph({}, ()), {}),
    ],
    ids=["chain", "ffn", "tree", "nothing"],
)
def test_products_of_a_chain_are_stages_and_turns_of_a_loop_are_layers(
    graph: TileGraph, stages: dict[str, int]
) -> None:
    found = timeline(simulate(graph, machine=Machine(4)))
    assert {stage.stage: stage.layers for stage in found.stages} == stages
    assert (found.period is None) == (max(stages.values(), default=0) < 2)


def test_the_command_prints_a_row_a_stage_and_the_same_as_json(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(trace_of(layers(4), 3).to_json())
    shown = CliRunner().invoke(tiles, ["timeline", str(file)])
    assert shown.exit_code == 0
    assert "390 ns in all, a layer every 100" in shown.output
    found = json.loads(CliRunner().invoke(tiles, ["timeline", str(file), "--json"]).output)
    assert [stage["stage"] for stage in found["stages"]] == ["a", "b"]
    assert found["stages"][1]["hand_off"] == 5
