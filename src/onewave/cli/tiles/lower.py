"""`onewave tiles lower`: a program through all of its steps: built, verified, lowered to a table, simulated."""

import json
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, VerificationError, check_one_of
from onewave.cli import options
from onewave.cli.output import percent, show, table, write_file
from onewave.cli.tiles import options as given
from onewave.cli.tiles import tables
from onewave.cli.tiles.programs import Program, by_stage
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.order.orders import task_order
from onewave.tiles.order.policies import plan
from onewave.tiles.order.schedule import Mode
from onewave.tiles.proof.table import TaskTable, lower
from onewave.tiles.proof.verify import verify
from onewave.tiles.sim.machine import Machine
from onewave.tiles.sim.simulate import simulate
from onewave.wave.plan.program import WaveProgram
from onewave.wave.plan.program_file import program_bytes

WORKERS_A_LINE = 12
MAX_SHOWN = 1024


def lower_command(
    program: Program,
    order: given.Order = None,
    sync: Annotated[
        str | None,
        typer.Option("--sync", help="none, row, tile (the default; decode: none), strided, conv2d-tile, consecutive."),
    ] = None,
    queues: given.Queues = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=65536,
            help="Workers to simulate; with --queues static also the queues to deal out to.",
        ),
    ] = 132,
    resident: Annotated[
        int | None,
        typer.Option(
            "--resident",
            min=1,
            max=65536,
            help="Workers that the device runs at once. Default: 132; decode: all of them.",
        ),
    ] = None,
    reuse: Annotated[
        bool,
        typer.Option("--reuse", help="decode: the activations of all layers in one place."),
    ] = False,
    tokens: Annotated[
        int,
        typer.Option("--tokens", min=1, max=1000, help="Times that one launch runs the program, on one memory."),
    ] = 1,
    simulated: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Predict the time per phase and each worker's idle time.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write the table: .npy, or raw int32 for other names; decode as .npz: with all words of the launch.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Build a program, prove its schedule, write it as a task table, predict its time.

    The table is int32 words; onewave.tiles.proof.table tells the layout. Examples:
    lower chain 256 256 512 256 --order row-by-row --sync row -o chain.npy;
    lower decode llama-3.1-8b --workers 132 --batch-size 1 -o step.npz.
    decode is the plan that the engine launches on so many SMs: step.npz has its step records (32 words each, "steps"),
    lanes, waits and counters as the kernel reads them, the places of all weights, and the task table ("table").
    Exit status: 0 written, 1 the schedule was rejected, 2 bad input.
    """
    if queues is not None:
        check_one_of("queues", queues, ("static", "ticket"))
    seconds: dict[str, float] = {}
    with _timed("build", seconds):
        built = program.build(workers, order)
    graph, prescribed = built.graph, built.chosen_queues(order, queues)
    order = order or program.default_order
    as_launched = sync in (None, built.policy) and prescribed is not None and tokens == 1 and not reuse
    policy = sync or built.policy
    mode = Mode.STATIC if prescribed is not None else Mode(queues or "ticket")
    ids = task_order(graph, "sequential" if prescribed is not None else order, workers=workers)
    with _timed("verify", seconds):
        schedule = plan(
            graph,
            ids,
            policy,
            workers=workers,
            mode=mode,
            co_resident=resident or built.resident,
            queues=prescribed,
            buffers=_one_place_a_layer(graph) if reuse else None,
            tokens=tokens,
        )
        try:
            proved = verify(schedule)
        except VerificationError as error:
            raise tables.rejected(error, as_json) from None
    with _timed("lower", seconds):
        lowered = lower(proved)
        launch = built.step.program(lowered) if built.step is not None and as_launched else None
    if out is not None:
        write_file("out", out, _file_of(out, lowered, launch))
    prediction: dict[str, Any] | None = None
    if simulated:
        with _timed("simulate", seconds):
            machine = Machine(workers=workers, queues=mode.value, ahead_bytes=built.ahead_bytes)
            trace = simulate(graph, ids, machine, queues=prescribed, sync=None if launch is not None else policy)
        prediction = tables.timing(trace if built.step is None else by_stage(trace))
    words = len(lowered.to_words())
    facts: dict[str, Any] = {
        "ok": True,
        "program": program.title,
        "order": order,
        "policy": policy,
        "tasks": schedule.program.num_tasks,
        "mode": schedule.mode.value,
        "workers": schedule.num_workers if schedule.mode is Mode.STATIC else None,
        "pairs": proved.num_pairs,
        "counters": schedule.syncs.num_counters,
        "waits": len(schedule.syncs.waits.first),
        "posts": len(schedule.syncs.posts.first),
        "words": words,
        "bytes": 4 * words,
        "launch": None
        if launch is None
        else {"steps": len(launch.steps), "workers": launch.workers, "weight_tiles": int(launch.lanes[:, 0].sum())},
        "file": None if out is None else str(out),
        "seconds": seconds,
        "prediction": prediction,
    }
    if as_json:
        print(json.dumps(facts))
    else:
        _print(facts)


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Generator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def _file_of(out: Path, lowered: TaskTable, launch: WaveProgram | None) -> bytes:
    """Return the bytes to write, in the format that the file's name asks for."""
    if out.suffix == ".npz":
        if launch is None:
            allowed = "decode in the order, on the queues and by the policy that it is launched with"
            raise InvalidArgumentError("out", got=f"{out}: a launch's words", allowed=allowed, next="Use .npy.")
        return program_bytes(launch, table=lowered.to_words())
    return lowered.to_npy() if out.suffix == ".npy" else lowered.to_bytes()


def _one_place_a_layer(graph: TileGraph) -> dict[str, str]:
    """Map each written tensor that is numbered by layer to one buffer: x1, x2, ... to x."""
    written = {tile[0] for task in graph.tasks for tile in task.writes}
    return {name: base for name in written if (base := re.sub(r"[0-9]+$", "", name)) and base != name}


def _print(facts: dict[str, Any]) -> None:
    how = f"order {facts['order']}, policy {facts['policy']}, {facts['mode']}"
    print(f"verified and lowered: {facts['program']}, {how}")
    print(f"  {facts['tasks']:,} tasks, {facts['pairs']:,} conflicting pairs, all ordered")
    print(f"  {facts['counters']:,} counters, {facts['waits']:,} waits, {facts['posts']:,} posts")
    where = "" if facts["file"] is None else f" in {facts['file']}"
    print(f"  {facts['words']:,} words ({facts['bytes']:,} bytes){where}")
    if facts["launch"] is not None:
        counts = [f"{facts['launch'][name]:,}" for name in ("steps", "workers", "weight_tiles")]
        print(f"  one launch: {counts[0]} step records, {counts[1]} thread blocks, {counts[2]} weight tiles")
    steps = ", ".join(f"{name} {taken:.2f} s" for name, taken in facts["seconds"].items())
    print(f"  {steps}; {sum(facts['seconds'].values()):.2f} s in all")
    found = facts["prediction"]
    if found is None:
        return
    times = [f"{found[name] / 1000:,.2f} us" for name in ("makespan_ns", "critical_path_ns")]
    share = percent(found["idle"]["share"])
    print(f"\npredicted, one run: {times[0]}; critical path {times[1]}; idle {share}\n")
    idle = found["idle"]["per_worker_ns"]
    span = f"idle us of each worker ({min(idle) / 1000:,.2f} to {max(idle) / 1000:,.2f})"
    lanes = table(span, "workers", *map(str, range(WORKERS_A_LINE)))
    for first in range(0, min(len(idle), MAX_SHOWN), WORKERS_A_LINE):
        lanes.add_row(f"{first}+", *(f"{value / 1000:,.1f}" for value in idle[first : first + WORKERS_A_LINE]))
    show(tables.phase_table(found["phases"]), lanes)
    if len(idle) > MAX_SHOWN:
        print(f"... and {len(idle) - MAX_SHOWN:,} workers more (--json has all)")
