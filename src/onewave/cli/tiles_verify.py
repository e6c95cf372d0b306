"""`onewave tiles verify` and `onewave tiles lower`: prove a schedule, and write the proved one as a table."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError, VerificationError

__all__ = ["verify_command"]


def verify_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A schedule as JSON; - reads standard input.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove that a schedule can't deadlock, race or lose a task; or show how it can.

    FILE: {"tasks": [{"id", "reads": [tile...], "writes": [tile...], "after": [id...]}], "workers": [[id...], ...],
    "co_resident": n, "mode": "static"|"ticket"}. The order of the tasks is program order. A task waits for the last
    writer before it of each tile it reads, and for the tasks in its "after"; for nothing else. So a task that
    overwrites a tile before its readers have ended is a race, unless a worker's queue, "after" or a chain of waits
    orders them. In ticket mode "workers" is the order of the tickets. Optional: a task's "wait" (the count it waits
    for), or "waits" and "posts" ([[counter, value]...], the counters as they really are); "rings" ([{"name", "slots",
    "fills", "releases"}]); "buffers" ({name: [tile...]}, tiles in one place).

    Kinds: once (a task is not planned exactly once), residency (more workers than run at once), count (a wait does not
    match the posts), deadlock, race. Exit status: 0 verified, 1 rejected, 2 bad file.
    """
    from onewave.tiles.verify import verify
    from onewave.tiles.verify_file import parse_schedule

    schedule = parse_schedule(_read(file))
    try:
        proved = verify(schedule)
    except VerificationError as error:
        if as_json:
            print(json.dumps({"ok": False, "kind": error.kind, "witness": error.witness, "message": str(error)}))
        else:
            print(f"rejected: {error}")
        raise typer.Exit(1) from None
    tasks, workers = schedule.program.num_tasks, schedule.num_workers
    who = f"{workers} workers" if schedule.mode.value == "static" else "any number of workers by ticket"
    message = f"verified: {tasks} tasks on {who}, {proved.num_pairs} conflicting pairs ordered"
    if as_json:
        print(json.dumps({"ok": True, "kind": None, "witness": None, "message": message}))
    else:
        print(message)


def _read(file: str) -> bytes:
    from onewave.tiles.verify_file import MAX_FILE_BYTES

    # One byte more than is allowed tells a file that is too large, even one without an end.
    try:
        if file == "-":
            return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        with open(file, "rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError("schedule file", got=f"{file}: {reason}", allowed="a readable file") from None
