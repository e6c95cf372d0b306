"""What the bench commands share: their options, saying what runs, the ledger, and how results are shown."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, OnewaveError, UnsupportedError, shown
from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.output import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch
    from rich.table import Table

    from onewave.bench.ceilings import Ceiling
    from onewave.bench.ledger import Measurement

Reps = Annotated[int, typer.Option("--reps", min=1, help="Measured repetitions.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Repetitions before that.")]


@dataclass(frozen=True)
class Results:
    """Where results go: to people or programs, and to the ledger.

    Raises InvalidArgumentError for a ledger that no line could be written to, before anything is measured.
    """

    as_json: options.Json = False
    ledger: options.Ledger = None

    def __post_init__(self) -> None:
        if self.ledger is None:
            return
        nearest = next(place for place in (self.ledger, *self.ledger.absolute().parents) if os.path.exists(place))
        if not (os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)):
            got = f"{self.ledger} ({nearest} is no directory that can be written)"
            raise InvalidArgumentError("--ledger", got=got, allowed="a directory, there or to be made")

    def record(self, measurements: Iterable[Measurement], device: torch.device) -> list[str]:
        """Append each measurement, made on `device` by this command, to the ledger if asked for; return citations."""
        return [] if self.ledger is None else _append(self.ledger, measurements, device)

    def show(self, facts: dict[str, Any], citations: list[str], *parts: Table | str) -> None:
        """Print JSON with the citations, or tables and lines, the citations last."""
        show_status("")
        if self.as_json:
            print(json.dumps(facts | {"ledger": citations}))
        else:
            show(*parts, *citations)


def show_status(text: str) -> None:
    """Say on a terminal's stderr what is going on, over what was said before."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def host_line(host_us: Mapping[str, float]) -> str:
    """What a decode step takes of the host's time, in words."""
    return "host a step: " + ", ".join(f"{part} {us:.0f}" for part, us in host_us.items()) + " us"


def numbers(name: str, text: str, least: int = 0) -> list[int]:
    """Whole numbers separated by commas, none below `least`. Raises InvalidArgumentError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise InvalidArgumentError(name, got=shown(text), allowed="whole numbers separated by commas")
    if min(map(int, parts)) < least:
        raise InvalidArgumentError(name, got=text, allowed=f"whole numbers from {least}")
    return [int(part) for part in parts]


def gpu_for(command: str, device: str, next: str) -> torch.device:
    """The GPU that an option names, made current. Raises UnsupportedError for a CPU."""
    from onewave.engine.load.choices import choose_device

    where = choose_device(device)
    if where.type != "cuda":
        raise UnsupportedError(command, got=str(where), allowed="a CUDA GPU", next=next)
    make_current(where)
    return where


def make_current(device: torch.device) -> None:
    """Have a GPU's graphs and events be made on it."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)


def name_of(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def ceiling_line(ceiling: Ceiling, digits: int = 1) -> str:
    """A ceiling as a line below a table."""
    name = ceiling.name.removesuffix(" bandwidth")
    return f"{name} ceiling {ceiling.value:.{digits}f} {ceiling.unit} ({ceiling.method})"


def _append(directory: Path, measurements: Iterable[Measurement], device: torch.device) -> list[str]:
    """Write a line a measurement. Where that fails, those not written go to stderr before the error is raised."""
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
