"""What `onewave tiles` prints for people: tables, and files it reads and writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onewave.base.errors import InvalidArgumentError, VerificationError

if TYPE_CHECKING:
    from rich.table import Table

    from onewave.tiles.search.bounds import Bound
    from onewave.tiles.sim.timeline import Timeline
    from onewave.tiles.sim.trace import Trace

MAX_TRACE_BYTES = 1 << 30
MAX_TENSORS = 12


def table(title: str, *columns: str) -> Table:
    """A plain table, its first column on the left and the others on the right."""
    from rich import box
    from rich.table import Table

    style = {"title_justify": "left", "title_style": "bold", "pad_edge": False, "min_width": min(len(title), 100)}
    made = Table(title=title, box=box.SIMPLE_HEAD, show_header=any(columns), **style)  # type: ignore[arg-type] # mixed
    for place, column in enumerate(columns):
        left = place == 0 or column == "source"
        made.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    return made


def show(*tables: Table) -> None:
    """Print tables."""
    from rich.console import Console

    # A pipe has no width: wide enough for every table, so that what is read by a program never folds. Names of files,
    # levels and phases are shown as they are: "[/y]" and ":x:" in them are neither markup nor emoji.
    width = None if Console().is_terminal else 140
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for made in tables:
        console.print(made)


def amount(value: float, unit: str = "bytes") -> str:
    """A count of bytes in decimal units, or of anything else as it is."""
    if unit != "bytes":
        return f"{value:,.0f}"
    for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.2f} {name}"
    return f"{value:,.0f} B"


def percent(share: Any) -> str:
    """A share as a percentage; "-" for none."""
    return "-" if share is None else f"{100 * share:,.1f}%"


def bound_row(bound: Bound, moved: float | None) -> dict[str, Any]:
    """A bound as JSON's plain types, with the gap of what was moved."""
    row = {
        "name": bound.name,
        "value": bound.value,
        "unit": bound.unit,
        "applies": bound.applies,
        "source": bound.source,
    }
    return row if moved is None else row | {"gap": bound.gap(moved) if bound.applies else None}


def write_text(path: Path, text: str) -> None:
    """Replace a file whole, or leave it as it was. Raises InvalidArgumentError."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        got = error.strerror or type(error).__name__
        raise InvalidArgumentError(f"file {path}", got=got, allowed="a path that can be written") from None


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file whole, or leave it as it was. Raises OSError or, for a name with NUL in it, ValueError."""
    target = path.resolve()
    if target.exists() and not target.is_file():  # a device or a pipe: nothing to keep
        target.write_bytes(data)
        return
    work = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        work.write_bytes(data)
        os.replace(work, target)
    finally:
        work.unlink(missing_ok=True)


def read_trace(path: Path) -> Trace:
    """Read a Trace. Raises InvalidArgumentError."""
    from onewave.tiles.sim.trace import Trace

    try:
        with path.open("rb") as file:
            text = file.read(MAX_TRACE_BYTES + 1)
    except OSError as error:
        got = error.strerror or type(error).__name__
        raise InvalidArgumentError(f"trace {path}", got=got, allowed="a readable file") from None
    if len(text) > MAX_TRACE_BYTES:
        raise InvalidArgumentError(f"trace {path}", got="over 1 GiB", allowed="up to 1 GiB")
    return Trace.from_json(text)


def print_simulation(facts: dict[str, Any]) -> None:
    """Print what simulate found."""
    head = table(f"{facts['program']}, order {facts['order']}, {facts['mode']} mode", "", "")
    lanes, idle = facts["workers"], facts["idle"]["per_worker_ns"]
    head.add_row("tasks, lanes, waves", f"{facts['tasks']:,}, {lanes:,}, {facts['waves']:,}")
    head.add_row("makespan", f"{facts['makespan_ns'] / 1000:,.2f} us")
    head.add_row("critical path", f"{facts['critical_path_ns'] / 1000:,.2f} us")
    head.add_row("tail", f"{facts['tail_ns'] / 1000:,.2f} us")
    span = f"{min(idle) / 1000:,.2f} to {max(idle) / 1000:,.2f} us a lane"
    head.add_row("idle", f"{percent(facts['idle']['share'])}, {span}")
    head.add_row("memory loads, stores", f"{amount(facts['loads_bytes'])}, {amount(facts['stores_bytes'])}")
    for bound in facts["bounds"]:
        if bound["applies"]:
            head.add_row(f"gap to {bound['name']}", f"{percent(bound['gap'])} over {amount(bound['value'])}")
    energy = ", ".join(f"{name} {value:,.3g}" for name, value in facts["energy_mj"].items())
    head.add_row("energy (mJ)", energy)
    shown = [head]
    levels = table("cache levels", "level", "policy", "capacity", "accesses", "hits", "requested", "loads", "stores")
    tensors = table("by tensor", "level: tensor", "accesses", "hits", "loads", "stores")
    for level in facts["levels"]:
        sizes = [amount(level[name]) for name in ("requested_bytes", "loaded_bytes", "stored_bytes")]
        counts = [f"{level['accesses']:,}", percent(level["hit_rate"])]
        levels.add_row(level["level"], level["policy"], amount(level["capacity"]), *counts, *sizes)
        largest = sorted(level["tensors"], key=lambda t: -t["loaded_bytes"] - t["stored_bytes"])
        for tensor in largest[:MAX_TENSORS]:
            moved = [amount(tensor["loaded_bytes"]), amount(tensor["stored_bytes"])]
            tensors.add_row(
                f"{level['level']}: {tensor['tensor']}", f"{tensor['accesses']:,}", f"{tensor['hits']:,}", *moved
            )
        if len(largest) > MAX_TENSORS:
            tensors.add_row(f"{level['level']}: {len(largest) - MAX_TENSORS} more", "", "", "", "")
    show(*shown, *([levels, tensors] if facts["levels"] else []), phase_table(facts["phases"]))


def timing(trace: Trace) -> dict[str, Any]:
    """The times of a simulated trace as JSON's plain types: makespan, idle of every worker, phases."""
    idle = trace.idle
    return {
        "makespan_ns": trace.makespan,
        "critical_path_ns": trace.report.critical_path if trace.report is not None else None,
        "tail_ns": trace.tail,
        "idle": {
            "share": float(idle.sum()) / max(trace.makespan * trace.workers, 1e-9),
            "per_worker_ns": idle.tolist(),
        },
        "phases": [
            {
                "phase": phase.phase,
                "tasks": phase.tasks,
                "running_ns": phase.running,
                "busy_ns": phase.busy,
                "waited_ns": phase.waited,
                "first_ns": phase.first,
                "last_ns": phase.last,
            }
            for phase in trace.phases()
        ],
    }


def phase_table(phases: list[dict[str, Any]]) -> Table:
    """A row a phase. running: while any of its tasks ran; busy, waited: all of its tasks added up."""
    made = table("phases", "phase", "tasks", "running us", "busy us", "waited us", "first us", "last us")
    columns = ("running_ns", "busy_ns", "waited_ns", "first_ns", "last_ns")
    for phase in phases:
        made.add_row(phase["phase"], f"{phase['tasks']:,}", *(f"{phase[name] / 1000:,.2f}" for name in columns))
    return made


def rejected(error: VerificationError, as_json: bool) -> typer.Exit:
    """Print a rejection; the exit to raise."""
    if as_json:
        print(json.dumps({"ok": False, "kind": error.kind, "witness": error.witness, "message": str(error)}))
    else:
        print(f"rejected: {error}")
    return typer.Exit(1)


def show_timeline(found: Timeline) -> None:
    """Print a row a stage."""
    period = "" if found.period is None else f", a layer every {found.period:,.0f}"
    heading = f"{found.makespan:,.0f} {found.unit} in all{period}"
    rows = table(heading, "stage", "layers", "tasks", "hand-off, first", "median", "run", "last after median")
    for stage in found.stages:
        times = (stage.hand_off, stage.middle_hand_off, stage.run, stage.late)
        rows.add_row(stage.stage, str(stage.layers), str(stage.tasks), *(f"{value:,.0f}" for value in times))
    show(rows)
