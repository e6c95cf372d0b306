"""What the bench commands share: saying what runs, checking counts, writing the ledger, printing a table."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from onewave.base.errors import InvalidArgumentError
from onewave.base.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    from rich.table import Table

    from onewave.bench.ledger import Measurement

__all__ = ["append_to_ledger", "check_count", "print_table", "show_status"]

# Wide enough for every table when the output is not a terminal.
_COLUMNS = 110


def show_status(text: str) -> None:
    """Say on a terminal's stderr what is going on, over what was said before."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise InvalidArgumentError for an option below the least that makes sense."""
    if value < least:
        raise InvalidArgumentError(name, got=str(value), allowed=f"whole numbers from {least}")


def append_to_ledger(directory: Path, measurements: Iterable[Measurement], device: torch.device) -> list[str]:
    """Write a line for each measurement, made on `device` by this command; return their citations."""
    import torch

    from onewave.bench import ledger

    settings = Settings.from_env()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    command = shlex.join(["onewave", *sys.argv[1:]])
    records = (ledger.as_record(each, device_name=name, command=command, settings=settings) for each in measurements)
    return [f"ledger/{ledger.append(directory, record)}" for record in records]


def print_table(table: Table, *notes: str) -> None:
    """Print a table, then a line for each note."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _COLUMNS)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False)
