"""Shared parts of the bench commands: their options, saying what runs, the ledger, and how results are shown.

A command that is killed has said what it was at: each stage is a line on stderr as it begins (`show_status`), each row
is printed, and its ledger lines are appended, as it is measured (`Rows`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import CapacityError, InvalidArgumentError, OnewaveError, UnsupportedError, shown
from onewave.base.settings import Settings
from onewave.cli import options, session
from onewave.cli.output import answer
from onewave.engine.load.stopwatch import phases_told

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from pathlib import Path

    import torch
    from rich.table import Table

    from onewave.bench.ceilings import Ceiling
    from onewave.bench.ledger import Measurement
    from onewave.engine.scheduler.load import HostTime

Reps = Annotated[int, typer.Option("--reps", min=1, help="Measured repetitions.")]
# Behind a stage: which repetition of it runs.
_REPETITION = re.compile(r"[:,]? (\w+ )?\d+ of \d+$")
# Columns on the left are at least as wide as most of what stands in them, others as most numbers.
_LEFT_WIDTH, _WIDTH = 22, 8

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
        _clear_status()
        answer(self.as_json, facts | {"ledger": citations}, *parts, *citations)


class Rows:
    """A table on stdout that grows: a row is printed and its lines are appended to the ledger as it is measured.

    The first row decides how wide columns are, the first `left` of which are on the left. device: where it is measured.
    With JSON nothing is printed before `finish`.
    """

    def __init__(self, out: Results, device: torch.device, title: str, *columns: str, left: int = 1) -> None:
        self._out, self._device = out, device
        self.head(title, *columns, left=left)
        self._citations: list[str] = []
        self._failed: OnewaveError | None = None

    def head(self, title: str, *columns: str, left: int = 1) -> None:
        """Begin another table with the next row."""
        self._title, self._columns, self._left = title, columns, left
        self._widths: list[int] = []

    def add(self, cells: Sequence[str], lines: Iterable[Measurement] = ()) -> None:
        """Print a row, whose last cells may be missing, and append its lines. One that can't be written goes to stderr,
        and `finish` raises the error."""
        if not self._out.as_json:
            _clear_status()
            if not self._widths:
                self._begin(cells)
            print(self._line(cells), flush=True)
        try:
            self._citations += self._out.record(lines, self._device)
        except OnewaveError as error:
            self._failed = self._failed or error

    def finish(self, facts: dict[str, Any], *parts: Table | str) -> None:
        """Print JSON, or what stands below the table. Raises the first error of the ledger."""
        self._out.show(facts, self._citations, *parts)
        if self._failed is not None:
            raise self._failed

    def _begin(self, cells: Sequence[str]) -> None:
        for at, name in enumerate(self._columns):
            cell = cells[at] if at < len(cells) else ""
            self._widths.append(max(_LEFT_WIDTH if at < self._left else _WIDTH, len(name), len(cell)))
        print(f"{self._title}\n{self._line(self._columns)}")

    def _line(self, cells: Sequence[str]) -> str:
        placed = (
            f"{cell:<{width}}" if at < self._left else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(cells, self._widths, strict=False))
        )
        return "  ".join(placed).rstrip()


@contextmanager
def failure_kept(command: str, no_memory: str) -> Generator[list[OnewaveError]]:
    """Yield a list that gets the error which ends the work meanwhile, so that results before it are shown first: one of
    ours, or a CapacityError where memory runs out."""
    from onewave.memory.shortage import is_out_of_memory

    failures: list[OnewaveError] = []
    try:
        yield failures
    except OnewaveError as error:
        failures.append(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failures.append(CapacityError(command, got=no_memory))


def show_status(text: str) -> None:
    """Say on stderr that a stage begins, and when: seconds since the command began. Its repetitions, "... 3 of 9", are
    none of their own. On a terminal all is said, over what was said before."""
    if sys.stderr.isatty():
        show_progress(text)
    else:
        _say(_REPETITION.sub("", text))


def show_progress(text: str) -> None:
    """Say on a terminal's stderr how far a stage is, over what was said before."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K[{time.perf_counter() - session.STARTED:6.1f} s] {text}")
        sys.stderr.flush()


@lru_cache(maxsize=1)  # a stage that goes on is said once
def _say(stage: str) -> None:
    print(f"[{time.perf_counter() - session.STARTED:6.1f} s] {stage}", file=sys.stderr, flush=True)


def _clear_status() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def open_llm(asked: options.ModelOptions, **more: Any) -> session.Opened:
    """Load a model, each phase of it a stage. Raises what session.open_llm raises."""
    show_status(f"loading {asked.model}")
    with phases_told(show_status):
        return session.open_llm(**vars(asked), **more)


def host_line(host_us: HostTime) -> str:
    """Return a decode step's host time in words, with what was computing and no wait, and the sum of the parts that are
    no model's launch or reader."""
    own = ("scheduler", "sampling", "detokenising")

    def told(*parts: str) -> str:
        wall, cpu = (sum(found.get(part, 0.0) for part in parts) for found in (host_us.wall, host_us.cpu))
        return f"{wall:.0f} (cpu {cpu:.0f})" if host_us.cpu else f"{wall:.0f}"

    shown = ", ".join(f"{part} {told(part)}" for part in host_us.wall)
    return f"host a step: {shown} us; scheduler, sampling and detokenising {told(*own)}"


def numbers(name: str, text: str, least: int = 0) -> list[int]:
    """Whole numbers separated by commas, none below `least`. Raises InvalidArgumentError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise InvalidArgumentError(name, got=shown(text), allowed="whole numbers below 10^9, separated by commas")
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
