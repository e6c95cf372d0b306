"""What the bench commands share: saying what runs, checking counts, writing the ledger, printing a table."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

from onewave.base.errors import InvalidArgumentError, OnewaveError
from onewave.base.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    from rich.table import Table

    from onewave.bench.ledger import Measurement

# Wide enough for every table when the output is not a terminal.
_COLUMNS = 110


def show_status(text: str) -> None:
    """Say on a terminal's stderr what is going on, over what was said before."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def check_count(name: str, value: int, least: int = 1, most: int | None = None) -> None:
    """Raise InvalidArgumentError for an option outside what makes sense."""
    if value < least or (most is not None and value > most):
        span = f"from {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgumentError(name, got=str(value), allowed=f"whole numbers {span}")


def check_ledger(directory: Path | None) -> None:
    """Refuse a directory that no line could be written to, before anything is measured. Raises InvalidArgumentError."""
    if directory is None:
        return
    nearest = next(place for place in (directory, *directory.absolute().parents) if os.path.exists(place))
    if not (os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)):
        got = f"{directory} ({nearest} is no directory that can be written)"
        raise InvalidArgumentError("--ledger", got=got, allowed="a directory, there or to be made")


def make_current(device: torch.device) -> None:
    """Have a GPU's graphs and events be made on it."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)


def append_to_ledger(directory: Path, measurements: Iterable[Measurement], device: torch.device) -> list[str]:
    """Write a line for each measurement, made on `device` by this command; return their citations.

    Where that fails, the lines not written go to stderr before the error is raised.
    """
    import torch

    from onewave.bench import ledger

    settings = Settings.from_env()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    command = shlex.join(["onewave", *sys.argv[1:]])
    citations: list[str] = []
    failed: OnewaveError | None = None
    for measurement in measurements:
        record = ledger.as_record(measurement, device_name=name, command=command, settings=settings)
        try:
            if failed is None:
                citations.append(f"{directory}/{ledger.append(directory, record)}")
        except OnewaveError as error:
            failed = error
        if failed is not None:
            print(json.dumps(record), file=sys.stderr)
    if failed is not None:
        raise failed
    return citations


def print_table(table: Table, *notes: str) -> None:
    """Print a table, then a line for each note."""
    from rich.console import Console

    # Names of models are shown as they are: "[/y]" and ":x:" in them are neither markup nor emoji.
    console = Console(width=None if sys.stdout.isatty() else _COLUMNS, markup=False, emoji=False)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
