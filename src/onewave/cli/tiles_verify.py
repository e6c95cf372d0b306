"""`onewave tiles verify`, `lower` and `interpret`: prove a schedule, write the proved one as a table, run a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onewave.base.errors import InvalidArgumentError, VerificationError
from onewave.cli import options
from onewave.cli import tiles_options as given

if TYPE_CHECKING:
    from onewave.tiles.verify import VerifiedSchedule

__all__ = ["interpret_command", "lower_command", "verify_command"]

# Turns of all runs together that interpret takes on: about a minute.
MOST_TURNS = 50_000_000


def verify_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A schedule as JSON; - reads standard input.")],
    as_json: options.Json = False,
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
        raise _rejected(error, as_json) from None
    tasks, workers = schedule.program.num_tasks, schedule.num_workers
    who = f"{workers} workers" if schedule.mode.value == "static" else "any number of workers by ticket"
    message = f"verified: {tasks} tasks on {who}, {proved.num_pairs} conflicting pairs ordered"
    if as_json:
        print(json.dumps({"ok": True, "kind": None, "witness": None, "message": message}))
    else:
        print(message)


def lower_command(
    program: given.Program,
    sizes: given.Sizes = None,
    tile: given.Tile = None,
    order: given.Order = None,
    policy: Annotated[
        str, typer.Option("--policy", "--sync", help="none, row, tile, strided, conv2d-tile or consecutive.")
    ] = "tile",
    queues: given.Queues = "ticket",
    workers: Annotated[
        int, typer.Option("--workers", help="Queues to deal the tasks out to, with --queues static.")
    ] = 132,
    resident: Annotated[int, typer.Option("--resident", help="Workers that the device runs at once.")] = 132,
    dtype: given.Dtype = "bf16",
    splits: given.Splits = 1,
    fused: given.Fused = False,
    causal: given.Causal = False,
    kv_heads: given.KvHeads = None,
    context: given.Context = 4096,
    batch: given.Batch = 1,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the table: .npy, or raw int32 for other names.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Prove a program's schedule and write it as a task table (int32 words; onewave.tiles.table tells the layout).

    Examples: lower chain 256 256 512 256 --order row-by-row --policy row --out chain.npy; lower decode llama-3.1-8b.
    Exit status: 0 written, 1 the schedule was rejected, 2 bad input.
    """
    from onewave.tiles.orders import task_order
    from onewave.tiles.policies import plan
    from onewave.tiles.programs import ProgramOptions, build_program, parse_tile
    from onewave.tiles.schedule import Mode
    from onewave.tiles.table import lower
    from onewave.tiles.verify import verify

    if queues not in ("static", "ticket"):
        raise InvalidArgumentError("queues", got=repr(queues), allowed="static, ticket")
    if not 1 <= workers <= 1_000_000:
        raise InvalidArgumentError("workers", got=str(workers), allowed="1 to 1000000")
    cut = None if tile is None else parse_tile(tile)
    stream_k = (order or "").startswith("stream-k")
    shape = ProgramOptions(cut, dtype, splits, fused, causal, kv_heads, context, batch, workers, stream_k)
    graph, prescribed = build_program(program, sizes or [], shape)
    chosen = "sequential" if prescribed is not None else order or ("row" if program == "gemm" else "sequential")
    tasks = task_order(graph, chosen, workers=workers)
    mode = Mode.STATIC if prescribed is not None else Mode(queues)
    schedule = plan(graph, tasks, policy, workers=workers, mode=mode, co_resident=resident, queues=prescribed)
    try:
        proved = verify(schedule)
    except VerificationError as error:
        raise _rejected(error, as_json) from None
    table = lower(proved)
    words = table.to_words()
    if out is not None:
        _write(out, table.save if out.suffix == ".npy" else lambda path: path.write_bytes(table.to_bytes()))
    facts = _facts(proved) | {"words": len(words), "bytes": 4 * len(words), "file": None if out is None else str(out)}
    if as_json:
        print(json.dumps(facts))
        return
    title = " ".join((program, *(sizes or ())))
    print(f"verified and lowered: {title}, order {order or chosen}, policy {policy}, {mode.value}")
    print(f"  {facts['tasks']:,} tasks, {facts['pairs']:,} conflicting pairs, all ordered")
    print(f"  {facts['counters']:,} counters, {facts['waits']:,} waits, {facts['posts']:,} posts")
    print(f"  {facts['words']:,} words ({facts['bytes']:,} bytes){'' if out is None else f' in {out}'}")


def _facts(proved: VerifiedSchedule) -> dict[str, object]:
    schedule = proved.schedule
    return {
        "ok": True,
        "tasks": schedule.program.num_tasks,
        "mode": schedule.mode.value,
        "workers": schedule.num_workers if schedule.mode.value == "static" else None,
        "pairs": proved.num_pairs,
        "counters": schedule.syncs.num_counters,
        "waits": len(schedule.syncs.waits.first),
        "posts": len(schedule.syncs.posts.first),
    }


def interpret_command(
    file: Annotated[Path, typer.Argument(metavar="TABLE", help="A table that lower wrote, as .npy or raw int32.")],
    workers: Annotated[
        int | None, typer.Option("--workers", help="Workers at once. Default: one a queue; by ticket 4.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", help="Random interleavings.")] = 100,
    epochs: Annotated[int, typer.Option("--epochs", help="Times the table runs, on counters that are not reset.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of the interleavings.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Run a table in NumPy under random interleavings, following who wrote what. It need not be a proved one.

    Exit status: 0 every run ended with every read right, 1 some run got stuck or read something else, 2 bad input.
    """
    from onewave.tiles.interpret import interpret
    from onewave.tiles.table import TaskTable

    table = TaskTable.load(file) if file.suffix == ".npy" else TaskTable.from_bytes(_read(str(file)))
    if not 0 <= seed < 2**63:
        raise InvalidArgumentError("seed", got=str(seed), allowed="0 to 2^63 - 1")
    if len(table.queue) * max(runs, 1) * max(epochs, 1) > MOST_TURNS // 3:
        most = MOST_TURNS // 3 // max(1, len(table.queue))
        raise InvalidArgumentError(
            "runs", got=f"{runs} of {len(table.queue):,} tasks, {epochs} epochs", allowed=f"{most} runs x epochs"
        )
    if workers is not None and workers * max(runs, 1) > MOST_TURNS:
        raise InvalidArgumentError(
            "workers", got=str(workers), allowed=f"{MOST_TURNS // max(runs, 1)} for so many runs"
        )
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


def _rejected(error: VerificationError, as_json: bool) -> typer.Exit:
    """Print a rejection; the exit to raise."""
    if as_json:
        print(json.dumps({"ok": False, "kind": error.kind, "witness": error.witness, "message": str(error)}))
    else:
        print(f"rejected: {error}")
    return typer.Exit(1)


def _write(out: Path, write: Callable[[Path], object]) -> None:
    try:
        write(out)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError("out", got=f"{out}: {reason}", allowed="a file that can be written") from None


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
