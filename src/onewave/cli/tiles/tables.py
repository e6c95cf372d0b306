"""Tables and files that several `onewave tiles` commands print and read: times, bounds, traces, rejections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onewave.base.errors import VerificationError
from onewave.base.json_files import in_file
from onewave.cli.output import amount, percent, read_file, table
from onewave.tiles.sim.timeline import Timeline
from onewave.tiles.sim.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table


MAX_TRACE_BYTES = 1 << 30
MAX_TENSORS = 12


def read_trace(path: Path) -> Trace:
    """Read a Trace. Raises InvalidArgumentError."""
    text = read_file("trace", path, MAX_TRACE_BYTES)
    with in_file(path):
        return Trace.from_json(text)


def simulation_tables(facts: dict[str, Any]) -> list[Table]:
    """Tables of what simulate found."""
    idle = facts["idle"]["per_worker_ns"]
    head = table(f"{facts['program']}, order {facts['order']}, {facts['mode']} mode", "", "")
    head.add_row("tasks, lanes, waves", f"{facts['tasks']:,}, {facts['workers']:,}, {facts['waves']:,}")
    for name in ("makespan", "critical path", "tail"):
        head.add_row(name, f"{facts[name.replace(' ', '_') + '_ns'] / 1000:,.2f} us")
    span = f"{min(idle) / 1000:,.2f} to {max(idle) / 1000:,.2f} us a lane"
    head.add_row("idle", f"{percent(facts['idle']['share'])}, {span}")
    head.add_row("memory loads, stores", f"{amount(facts['loads_bytes'])}, {amount(facts['stores_bytes'])}")
    if facts["predicted_ms"] is not None:
        head.add_row("a step, by costs fitted on an H200", f"{facts['predicted_ms']:.4f} ms")
    for bound in facts["bounds"]:
        if bound["applies"]:
            head.add_row(f"gap to {bound['name']}", f"{percent(bound['gap'])} over {amount(bound['value'])}")
    head.add_row("energy (mJ)", ", ".join(f"{name} {value:,.3g}" for name, value in facts["energy_mj"].items()))
    levels = table("cache levels", "level", "policy", "capacity", "accesses", "hits", "requested", "loads", "stores")
    tensors = table("by tensor", "level: tensor", "accesses", "hits", "loads", "stores")
    for level in facts["levels"]:
        sizes = [amount(level[name]) for name in ("requested_bytes", "loaded_bytes", "stored_bytes")]
        counts = [f"{level['accesses']:,}", percent(level["hit_rate"])]
        levels.add_row(level["level"], level["policy"], amount(level["capacity"]), *counts, *sizes)
        largest = sorted(level["tensors"], key=lambda t: -t["loaded_bytes"] - t["stored_bytes"])
        for tensor in largest[:MAX_TENSORS]:
            moved = [amount(tensor["loaded_bytes"]), amount(tensor["stored_bytes"])]
            counts = [f"{tensor['accesses']:,}", f"{tensor['hits']:,}"]
            tensors.add_row(f"{level['level']}: {tensor['tensor']}", *counts, *moved)
        if len(largest) > MAX_TENSORS:
            tensors.add_row(f"{level['level']}: {len(largest) - MAX_TENSORS} more")
    return [head, *([levels, tensors] if facts["levels"] else []), phase_table(facts["phases"])]


def timing(trace: Trace) -> dict[str, Any]:
    """The times of a simulated trace as JSON's plain types: makespan, idle of every worker, phases."""
    idle, times = trace.idle, ("running", "busy", "waited", "first", "last")
    share = float(idle.sum()) / max(trace.makespan * trace.workers, 1e-9)
    return {
        "makespan_ns": trace.makespan,
        "critical_path_ns": trace.report.critical_path if trace.report is not None else None,
        "tail_ns": trace.tail,
        "idle": {"share": share, "per_worker_ns": idle.tolist()},
        "phases": [
            {"phase": phase.phase, "tasks": phase.tasks} | {f"{name}_ns": getattr(phase, name) for name in times}
            for phase in trace.phases()
        ],
    }


def phase_table(phases: list[dict[str, Any]]) -> Table:
    """A row a phase. running: while any of its tasks ran; busy, waited: all of its tasks added up."""
    columns = ("running", "busy", "waited", "first", "last")
    made = table("phases", "phase", "tasks", *(f"{name} us" for name in columns))
    for phase in phases:
        made.add_row(phase["phase"], f"{phase['tasks']:,}", *(f"{phase[f'{n}_ns'] / 1000:,.2f}" for n in columns))
    return made


def rejected(error: VerificationError, as_json: bool) -> typer.Exit:
    """Print a rejection; the exit to raise."""
    facts = {"ok": False, "kind": error.kind, "witness": error.witness, "message": str(error)}
    print(json.dumps(facts) if as_json else f"rejected: {error}")
    return typer.Exit(1)


def verified(message: str, as_json: bool) -> None:
    """Print that there is a proof."""
    facts = {"ok": True, "kind": None, "witness": None, "message": f"verified: {message}"}
    print(json.dumps(facts) if as_json else facts["message"])


def timeline_table(found: Timeline) -> Table:
    """A row a stage."""
    period = "" if found.period is None else f", a layer every {found.period:,.0f}"
    heading = f"{found.makespan:,.0f} {found.unit} in all{period}"
    rows = table(heading, "stage", "layers", "tasks", "hand-off, first", "median", "run", "last after median")
    for stage in found.stages:
        times = (stage.hand_off, stage.middle_hand_off, stage.run, stage.late)
        rows.add_row(stage.stage, str(stage.layers), str(stage.tasks), *(f"{value:,.0f}" for value in times))
    return rows
