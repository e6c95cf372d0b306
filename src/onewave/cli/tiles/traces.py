"""`onewave tiles compare` and `timeline`: what traces say, simulated or measured."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onewave.cli import options
from onewave.cli.output import answer, table
from onewave.cli.tiles import tables
from onewave.tiles.sim.timeline import timeline
from onewave.tiles.sim.trace import compare


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A Trace as JSON.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of the same program.")],
    as_json: options.Json = False,
) -> None:
    """Set two traces side by side, phase by phase.

    Either may be simulated (simulate --trace FILE) or measured on a GPU.
    """
    rows = compare(tables.read_trace(a), tables.read_trace(b))
    columns = ("a tasks", "b tasks", "a busy", "b busy", "b / a", "a waited", "b waited")
    phases = table("a against b", "phase", *columns)
    for row in rows:
        ratio = "-" if row["busy_ratio"] is None else f"{row['busy_ratio']:.3f}"
        times = [f"{row[name]:,.0f}" for name in ("a_busy", "b_busy", "a_waited", "b_waited")]
        phases.add_row(row["phase"], str(row["a_tasks"]), str(row["b_tasks"]), *times[:2], ratio, *times[2:])
    answer(as_json, {"a": str(a), "b": str(b), "phases": rows}, phases)


def timeline_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A Trace as JSON.")],
    as_json: options.Json = False,
) -> None:
    """Say where a launch's time goes: each stage, the hand-off before it, and its stragglers, averaged over layers.

    The trace may be measured (bench wave --trace FILE), predicted (bench predict --trace FILE) or simulated (simulate
    --trace FILE). In a simulated decode step a stage's layers are the times that its phase comes.
    """
    found = timeline(tables.read_trace(trace))
    answer(as_json, asdict(found), tables.timeline_table(found))
