"""The output that commands print for people, and the files that they write."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onewave.base.errors import InvalidArgumentError
from onewave.base.json_files import check_size, read_bounded

if TYPE_CHECKING:
    from rich.table import Table


def table(title: str, *columns: str, left: int = 1) -> Table:
    """A table without a frame; its first `left` columns are on the left, the others on the right."""
    from rich import box
    from rich.table import Table

    style = {"title_justify": "left", "title_style": "bold", "pad_edge": False, "min_width": min(len(title), 100)}
    made = Table(title=title, box=box.SIMPLE_HEAD, show_header=any(columns), **style)  # type: ignore[arg-type] # mixed
    for place, column in enumerate(columns):
        justify = "left" if place < left else "right"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=place >= left)
    return made


def show(*parts: Table | str) -> None:
    """Print tables and lines."""
    from rich.console import Console

    # A pipe has no width: wide enough for every table, so that what is read by a program never folds. Names of files,
    # models and phases are shown as they are: "[/y]" and ":x:" in them are neither markup nor emoji.
    width = None if Console().is_terminal else 140
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def answer(as_json: bool, facts: dict[str, Any], *parts: Table | str) -> None:
    """Print JSON, or tables and lines for people."""
    if as_json:
        print(json.dumps(facts))
    else:
        show(*parts)


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


def read_file(what: str, path: Path | str, max_bytes: int) -> bytes:
    """Read a file, or standard input for "-", up to a size. Raises InvalidArgumentError."""
    if path != "-":
        return read_bounded(path, what, max_bytes)
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] # so it is where the shell closed it
        raise InvalidArgumentError(what, got="-: standard input is closed", allowed="a readable file")
    data = sys.stdin.buffer.read(max_bytes + 1)
    check_size(data, path, what, max_bytes)
    return data


def make_directory(what: str, path: Path) -> None:
    """Make a directory, and those above it, unless it is there. Raises InvalidArgumentError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(what, got=f"{path}: {reason}", allowed="a directory, there or to be made") from None


def write_file(what: str, path: Path, data: bytes | str) -> None:
    """Replace a file whole, or leave it as it was. Raises InvalidArgumentError."""
    data = data.encode() if isinstance(data, str) else data
    try:
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
    except (OSError, ValueError) as error:  # ValueError: a name with NUL in it
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(what, got=f"{path}: {reason}", allowed="a path that can be written") from None
