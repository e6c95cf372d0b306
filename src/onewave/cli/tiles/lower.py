"""`onewave tiles lower`: a program through all of its steps: built, verified, lowered to a table, simulated."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, VerificationError, shown
from onewave.cli import options
from onewave.cli.tiles import options as given
from onewave.cli.tiles import tables

if TYPE_CHECKING:
    from onewave.cli.tiles.programs import Asked
    from onewave.tiles.graph.graph import TileGraph
    from onewave.tiles.order.schedule import Schedule
    from onewave.tiles.proof.table import TaskTable
    from onewave.tiles.proof.verify import VerifiedSchedule
    from onewave.tiles.sim.trace import Trace
    from onewave.wave.plan.program import WaveProgram

WORKERS_A_LINE = 12


def lower_command(
    program: given.Program,
    sizes: given.Sizes = None,
    tile: given.Tile = None,
    order: given.Order = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", "--sync", help="none, row, tile (the default; decode: none), strided, conv2d-tile, consecutive."
        ),
    ] = None,
    queues: given.Queues = None,
    workers: Annotated[
        int, typer.Option("--workers", help="Workers to simulate; with --queues static also the queues to deal out to.")
    ] = 132,
    resident: Annotated[
        int | None,
        typer.Option("--resident", help="Workers that the device runs at once. Default: 132; decode: all of them."),
    ] = None,
    dtype: given.Dtype = "bf16",
    splits: given.Splits = 1,
    fused: given.Fused = False,
    causal: given.Causal = False,
    kv_heads: given.KvHeads = None,
    context: given.Context = 4096,
    batch: given.Batch = 1,
    weight_format: given.WeightFormat = "16-bit",
    reuse: Annotated[
        bool,
        typer.Option("--reuse", help="decode: the activations of all layers in one place."),
    ] = False,
    tokens: Annotated[int, typer.Option("--tokens", help="Times that one launch runs the program, on one memory.")] = 1,
    simulated: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Predict the time per phase and each worker's idle time.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the table: .npy, or raw int32 for other names; decode as .npz: with all words of the launch.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Build a program, prove its schedule, write it as a task table, predict its time.

    The table is int32 words; onewave.tiles.proof.table tells the layout. Examples:
    lower chain 256 256 512 256 --order row-by-row --policy row --out chain.npy;
    lower decode llama-3.1-8b --workers 132 --batch 1 --out step.npz.
    decode is the plan that the engine launches on so many SMs: step.npz has its step records (32 words each, "steps"),
    lanes, waits and counters as the kernel reads them, the places of all weights, and the task table ("table").
    Exit status: 0 written, 1 the schedule was rejected, 2 bad input.
    """
    from onewave.cli.tiles.programs import Asked, DecodeOptions
    from onewave.tiles.graph.programs import ProgramOptions, parse_tile

    if queues not in (None, "static", "ticket"):
        raise InvalidArgumentError("queues", got=shown(queues), allowed="static, ticket")
    for what, value in (("workers", workers), ("resident", resident)):
        if value is not None and not 1 <= value <= 65536:
            raise InvalidArgumentError(what, got=str(value), allowed="1 to 65536")
    if not 1 <= tokens <= 1000:
        raise InvalidArgumentError("tokens", got=str(tokens), allowed="1 to 1000")
    cut = None if tile is None else parse_tile(tile)
    shape = ProgramOptions(cut, dtype, splits, fused, causal, kv_heads, workers, order == "stream-k")
    asked = Asked(program, sizes or [], shape, DecodeOptions(context, batch, weight_format))
    how = _How(order, policy, queues, workers, resident, reuse, tokens)
    try:
        done = _run(asked, how, out, simulated=simulated)
    except VerificationError as error:
        raise tables.rejected(error, as_json) from None
    if as_json:
        print(json.dumps(done.facts()))
    else:
        done.show()


@dataclass(frozen=True)
class _How:
    """How a program is to be scheduled. None: as the program itself has it."""

    order: str | None
    policy: str | None
    queues: str | None
    workers: int
    resident: int | None
    reuse: bool
    tokens: int


class _Clock:
    """Seconds that each step took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def _run(asked: Asked, how: _How, out: Path | None, *, simulated: bool) -> _Done:
    from onewave.cli.tiles.programs import build, by_stage
    from onewave.tiles.order.orders import task_order
    from onewave.tiles.order.policies import plan
    from onewave.tiles.order.schedule import Mode
    from onewave.tiles.proof.table import lower
    from onewave.tiles.proof.verify import verify
    from onewave.tiles.sim.machine import Machine
    from onewave.tiles.sim.simulate import simulate

    clock, trace, launch = _Clock(), None, None
    with clock.step("build"):
        built = build(asked)
    graph, prescribed = built.graph, built.chosen_queues(how.order, how.queues)
    chosen = how.order or ("row" if asked.program == "gemm" else "sequential")
    mode = Mode.STATIC if prescribed is not None else Mode(how.queues or "ticket")
    policy = how.policy or built.policy
    ids = task_order(graph, "sequential" if prescribed is not None else chosen, workers=how.workers)
    with clock.step("verify"):
        schedule = plan(
            graph,
            ids,
            policy,
            workers=how.workers,
            mode=mode,
            co_resident=how.resident or built.resident,
            queues=prescribed,
            buffers=_one_place_a_layer(graph) if how.reuse else None,
            tokens=how.tokens,
        )
        proved = verify(schedule)
    with clock.step("lower"):
        table = lower(proved)
        as_launched = policy == built.policy and prescribed is not None and how.tokens == 1 and not how.reuse
        if built.step is not None and as_launched:
            launch = built.step.program(table)
    if out is not None:
        _write(out, _file_of(out, table, launch))
    if simulated:
        with clock.step("simulate"):
            machine = Machine(workers=how.workers, queues=mode.value, ahead_bytes=built.ahead_bytes)
            trace = simulate(graph, ids, machine, queues=prescribed, sync=None if launch is not None else policy)
            trace = trace if built.step is None else by_stage(trace)
    return _Done(asked.title, chosen, policy, proved, table, launch, trace, clock.seconds, out)


def _file_of(out: Path, table: TaskTable, launch: WaveProgram | None) -> bytes:
    """What is written, by the file's name."""
    from onewave.wave.plan.program_file import program_bytes

    if out.suffix == ".npz":
        if launch is None:
            allowed = "decode in the order, on the queues and by the policy that it is launched with"
            raise InvalidArgumentError("out", got=f"{out}: a launch's words", allowed=allowed, next="Use .npy.")
        return program_bytes(launch, table=table.to_words())
    return table.to_npy() if out.suffix == ".npy" else table.to_bytes()


def _one_place_a_layer(graph: TileGraph) -> dict[str, str]:
    """Map each written tensor that is numbered by layer to one buffer: x1, x2, ... to x."""
    written = {tile[0] for task in graph.tasks for tile in task.writes}
    return {name: base for name in written if (base := re.sub(r"[0-9]+$", "", name)) and base != name}


@dataclass(frozen=True)
class _Done:
    """What came of it."""

    title: str
    order: str
    policy: str
    proved: VerifiedSchedule
    table: TaskTable
    launch: WaveProgram | None
    trace: Trace | None
    seconds: dict[str, float]
    out: Path | None

    def facts(self) -> dict[str, Any]:
        schedule: Schedule = self.proved.schedule
        words = len(self.table.to_words())
        return {
            "ok": True,
            "program": self.title,
            "order": self.order,
            "policy": self.policy,
            "tasks": schedule.program.num_tasks,
            "mode": schedule.mode.value,
            "workers": schedule.num_workers if schedule.mode.value == "static" else None,
            "pairs": self.proved.num_pairs,
            "counters": schedule.syncs.num_counters,
            "waits": len(schedule.syncs.waits.first),
            "posts": len(schedule.syncs.posts.first),
            "words": words,
            "bytes": 4 * words,
            "launch": None if self.launch is None else self._launch_facts(self.launch),
            "file": None if self.out is None else str(self.out),
            "seconds": self.seconds,
            "prediction": None if self.trace is None else tables.timing(self.trace),
        }

    @staticmethod
    def _launch_facts(launch: WaveProgram) -> dict[str, Any]:
        return {"steps": len(launch.steps), "workers": launch.workers, "weight_tiles": int(launch.lanes[:, 0].sum())}

    def show(self) -> None:
        facts = self.facts()
        how = f"order {self.order}, policy {self.policy}, {facts['mode']}"
        print(f"verified and lowered: {facts['program']}, {how}")
        print(f"  {facts['tasks']:,} tasks, {facts['pairs']:,} conflicting pairs, all ordered")
        print(f"  {facts['counters']:,} counters, {facts['waits']:,} waits, {facts['posts']:,} posts")
        print(f"  {facts['words']:,} words ({facts['bytes']:,} bytes){'' if self.out is None else f' in {self.out}'}")
        if facts["launch"] is not None:
            counts = [f"{facts['launch'][name]:,}" for name in ("steps", "workers", "weight_tiles")]
            print(f"  one launch: {counts[0]} step records, {counts[1]} thread blocks, {counts[2]} weight tiles")
        steps = ", ".join(f"{name} {taken:.2f} s" for name, taken in self.seconds.items())
        print(f"  {steps}; {sum(self.seconds.values()):.2f} s in all")
        if self.trace is not None:
            self._show_prediction(facts["prediction"])

    def _show_prediction(self, found: dict[str, Any]) -> None:
        times = [f"{found[name] / 1000:,.2f} us" for name in ("makespan_ns", "critical_path_ns")]
        share = tables.percent(found["idle"]["share"])
        print(f"\npredicted, one run: {times[0]}; critical path {times[1]}; idle {share}\n")
        tables.show(tables.phase_table(found["phases"]))
        idle = found["idle"]["per_worker_ns"]
        span = f"idle us of each worker ({min(idle) / 1000:,.2f} to {max(idle) / 1000:,.2f})"
        shown = tables.table(span, "workers", *map(str, range(WORKERS_A_LINE)))
        for first in range(0, min(len(idle), 1024), WORKERS_A_LINE):
            part = idle[first : first + WORKERS_A_LINE]
            shown.add_row(f"{first}+", *(f"{value / 1000:,.1f}" for value in part))
        tables.show(shown)
        if len(idle) > 1024:
            print(f"... and {len(idle) - 1024:,} workers more (--json has all)")


def _write(out: Path, data: bytes) -> None:
    """Replace a file whole, or leave it as it was."""
    try:
        tables.replace_file(out, data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError("out", got=f"{out}: {reason}", allowed="a file that can be written") from None
