"""`onewave tiles timeline`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onewave.cli import options
from onewave.cli.output import show
from onewave.cli.tiles import tables


def timeline_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A Trace as JSON.")],
    as_json: options.Json = False,
) -> None:
    """Say where a launch's time goes: each stage, the hand-off before it, and its stragglers, averaged over layers.

    The trace may be measured (bench wave --trace FILE), predicted (bench predict --trace FILE) or simulated (simulate
    --trace FILE). In a simulated decode step a stage's layers are the times that its phase comes.
    """
    from onewave.tiles.sim.timeline import timeline

    found = timeline(tables.read_trace(trace))
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        show(tables.timeline_table(found))
