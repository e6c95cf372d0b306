"""`onewave tiles verify` and `interpret`: prove a schedule; run a task table."""

import json
from pathlib import Path
from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError, VerificationError
from onewave.base.json_files import in_file
from onewave.cli import options
from onewave.cli.output import read_file
from onewave.cli.tiles import tables
from onewave.models.config.read import find_config
from onewave.models.step_plan import is_plan, prove_plan, read_plan
from onewave.tiles.proof.interpret import interpret
from onewave.tiles.proof.schedule_file import MAX_FILE_BYTES, parse_schedule
from onewave.tiles.proof.table import TaskTable
from onewave.tiles.proof.verify import verify
from onewave.wave.plan.program_file import read_table

# Turns of all runs together that interpret takes on: about a minute.
MAX_TURNS = 50_000_000


def verify_command(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A schedule or a decode step's plan as JSON; - reads standard input.")
    ],
    as_json: options.Json = False,
) -> None:
    """Prove that a schedule, or a decode step's plan, can't deadlock, race or lose a task; or show how it can.

    FILE: {"tasks": [{"id", "reads": [tile...], "writes": [tile...], "after": [id...]}], "workers": [[id...], ...],
    "co_resident": n, "mode": "static"|"ticket"}. The order of the tasks is program order. A task waits for the last
    writer before it of each tile it reads, and for the tasks in its "after"; for nothing else. So a task that
    overwrites a tile before its readers have ended is a race, unless a worker's queue, "after" or a chain of waits
    orders them. In ticket mode "workers" is the order of the tickets. Optional: a task's "wait" (the count it waits
    for), or "waits" and "posts" ([[counter, value]...], the counters as they really are); "rings" ([{"name", "slots",
    "fills", "releases"}]); "buffers" ({name: [tile...]}, tiles in one place).

    Or FILE is what `onewave tiles plan` has written.
    Kinds: once (a task is not planned exactly once), residency (more workers than run at once), count (a wait does not
    match the posts), deadlock, race; of a plan also hand-off (one that the kernel lacks) and memory (a ring or tiles
    that an SM has no room for). Exit status: 0 verified, 1 rejected, 2 bad file.
    """
    text = read_file("schedule file", file, MAX_FILE_BYTES)
    if is_plan(text):
        _verify_plan(text, file, as_json)
        return
    with in_file(file):
        schedule = parse_schedule(text)
    try:
        proved = verify(schedule)
    except VerificationError as error:
        raise tables.rejected(error, as_json) from None
    tasks, workers = schedule.program.num_tasks, schedule.num_workers
    by = f"{workers} workers" if schedule.mode.value == "static" else "any number of workers by ticket"
    tables.verified(f"{tasks} tasks on {by}, {proved.num_pairs} conflicting pairs ordered", as_json)


def _verify_plan(text: bytes, file: str, as_json: bool) -> None:
    try:
        with in_file(file):
            plan = read_plan(text)
            proved = prove_plan(find_config(plan.model), plan)
    except VerificationError as error:
        raise tables.rejected(error, as_json) from None
    step = f"a step of {plan.model}, {plan.batch} at once, {plan.weights} weights"
    tasks = f"{len(proved.graph.tasks):,} tasks on {plan.workers} workers, rings of {plan.ring} tiles"
    tables.verified(f"{step}: {tasks}", as_json)


def interpret_command(
    file: Annotated[Path, typer.Argument(metavar="TABLE", help="A table that lower wrote: .npy, .npz or raw int32.")],
    workers: Annotated[
        int | None, typer.Option("--workers", help="Workers at once. Default: one a queue; by ticket 4.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", help="Random interleavings.")] = 100,
    epochs: Annotated[int, typer.Option("--epochs", help="Times the table runs, on counters that are not reset.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of the interleavings.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Run a table in NumPy under random interleavings, following which task wrote what. It need not be a proved one.

    Exit status: 0 every run ended with every read right, 1 some run got stuck or read something else, 2 bad input.
    """
    if file.suffix == ".npy":
        table = TaskTable.load(file)
    else:
        data = read_file("task table", file, MAX_FILE_BYTES)
        try:
            words = read_table(data) if file.suffix == ".npz" else None
        except ValueError as error:
            allowed = "a file that `lower decode --out FILE.npz` wrote"
            raise InvalidArgumentError("task table", got=f"{file}: {error}", allowed=allowed) from None
        with in_file(file):
            table = TaskTable.from_bytes(data) if words is None else TaskTable.from_words(words)
    if len(table.queue) * max(runs, 1) * max(epochs, 1) > MAX_TURNS // 3:
        most = MAX_TURNS // 3 // max(1, len(table.queue))
        raise InvalidArgumentError(
            "runs", got=f"{runs} of {len(table.queue):,} tasks, {epochs} epochs", allowed=f"{most} runs x epochs"
        )
    if workers is not None and workers * max(runs, 1) > MAX_TURNS:
        raise InvalidArgumentError("workers", got=str(workers), allowed=f"{MAX_TURNS // max(runs, 1)} for so many runs")
    result = interpret(table, workers, runs=runs, seed=seed, epochs=epochs)
    facts = {
        "ok": result.ok,
        "runs": runs,
        "finished": int(result.finished.sum()),
        "stuck": int(result.stuck.sum()),
        "wrong": int(result.wrong.sum()),
        "complaint": result.complaint,
    }
    if as_json:
        print(json.dumps(facts))
    else:
        line = f"{runs} runs of {table.num_tasks:,} tasks: {facts['finished']} ended, {facts['stuck']} got stuck"
        print(line + ("" if result.complaint is None else f", {facts['wrong']} went wrong: {result.complaint}"))
    if not result.ok:
        raise typer.Exit(1)
