"""Programs by name for the `onewave tiles` commands: those of tiles, and the decode step that the wave runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.base.json_files import in_file
from onewave.cli.tiles import options
from onewave.models import llama_plan
from onewave.models.config.read import find_config
from onewave.models.step_plan import deal_plan, prove_dealt
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.graph.programs import (
    PROGRAMS,
    ProgramOptions,
    build_program,
    check_options,
    exactly,
    parse_tile,
    read_notation,
)
from onewave.tiles.sim.machine import CacheLevel
from onewave.tiles.sim.timeline import stage_of
from onewave.tiles.sim.trace import Trace


@dataclass(frozen=True)
class Program:
    """A program and the options that shape it, as text; build_program and check_options refuse those it does not read.

    context, batch_size, weight_format: of a decode step, which is the one that the wave runs.
    """

    program: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM",
            help="gemm, chain, ffn, attention, block, conv, decode MODEL, notation FILE, or a step's plan: FILE.json. "
            "Sizes: elements.",
        ),
    ]
    sizes: Annotated[
        list[str] | None, typer.Argument(metavar="SIZES...", help="gemm: M N K; the others say when asked.")
    ] = None
    tile: options.Tile = None
    dtype: options.Dtype = "bf16"
    splits: Annotated[int, typer.Option("--splits", help="chain, ffn, block: K splits of the last GEMM.")] = 1
    fused: Annotated[
        bool, typer.Option("--fused", help="ffn: gate, up and SiLU in one task; attention: flash attention.")
    ] = False
    causal: Annotated[bool, typer.Option("--causal", help="attention, block: the last query sees the last key.")] = (
        False
    )
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="attention, block. Default: as many as heads.")] = (
        None
    )
    context: options.Context = 512
    batch_size: options.BatchSize = 1
    weight_format: options.WeightFormat = "compact"

    @property
    def title(self) -> str:
        """The program with its sizes."""
        return " ".join((self.program, *(self.sizes or ())))

    @property
    def default_order(self) -> str:
        """The order where none is asked for."""
        return "row" if self.program == "gemm" else "sequential"

    def shape(self, workers: int = 132, order: str | None = None) -> ProgramOptions:
        """The options that build_program takes. Raises InvalidArgumentError."""
        cut = None if self.tile is None else parse_tile(self.tile)
        given = (self.dtype, self.splits, self.fused, self.causal, self.kv_heads)
        return ProgramOptions(cut, *given, workers, order == "stream-k")

    def build(self, workers: int = 132, order: str | None = None) -> Built:
        """Build the graph, for so many workers. Raises InvalidArgumentError, UnsupportedError, ConfigError."""
        shape, sizes = self.shape(workers, order), self.sizes or []
        if self.program == "decode":
            step = self._dealt(workers)
            return Built(step.graph, step.queues, step=step)
        if self.program.endswith(".json"):
            return self._planned()
        if self.program == "notation":
            check_options("notation", self, ())
            read = read_notation(sizes, shape)
            return Built(read.graph, levels=read.levels)
        if self.program not in PROGRAMS:
            allowed = f"{', '.join(PROGRAMS)}, decode, notation"
            raise InvalidArgumentError("program", got=repr(self.program[:40]), allowed=allowed)
        check_options(self.program, self, PROGRAMS[self.program].reads)
        return Built(*build_program(self.program, sizes, shape))

    def _dealt(self, sms: int) -> llama_plan.DealtStep:
        """Deal a model's decode step out as the engine does on a GPU with so many SMs."""
        check_options("decode", self, ("dtype", "context", "batch_size", "weight_format"))
        [model] = exactly("decode", self.sizes or [], ("MODEL",))
        if self.dtype not in ("bf16", "fp16"):
            next = "Choose int8, fp8 or compact weights by --weight-format."
            raise InvalidArgumentError("decode: dtype", got=self.dtype[:40], allowed="bf16, fp16", next=next)
        weight_format = options.format_of(self.weight_format)
        if self.dtype != "bf16" and self.weight_format == "compact":
            next = "Add --weight-format 16-bit."
            raise InvalidArgumentError(
                "weight format", got=f"compact with {self.dtype}", allowed="compact with bf16", next=next
            )
        step = llama_plan.DecodeStep(find_config(str(model)), self.batch_size, weight_format)
        return llama_plan.deal_decode(step, workers=llama_plan.workers_for(step, available=sms), context=self.context)

    def _planned(self) -> Built:
        """Read a decode step's plan and prove it."""
        check_options("a plan", self, ("context",))
        exactly("a plan", self.sizes or [], ())
        llama_plan.check_context(self.context)
        plan, config = options.plan_and_config(self.program)
        with in_file(self.program):
            step = deal_plan(config, plan, context=self.context)
        return Built(step.graph, step.queues, step=step, proved=prove_dealt(step))


@dataclass(frozen=True)
class Built:
    """A program's graph, and what it brings along.

    queues: each worker's task ids, where the program prescribes them. levels: the caches that a fusion tree names.
    step: of decode, what the wave's plan has dealt. proved: of a plan's file.
    """

    graph: TileGraph
    queues: tuple[tuple[int, ...], ...] | None = None
    levels: tuple[CacheLevel, ...] = ()
    step: llama_plan.DealtStep | None = None
    proved: llama_plan.DecodePlan | None = None

    @property
    def ahead_bytes(self) -> int:
        """Bytes that a worker reads ahead while it waits."""
        return 0 if self.step is None else self.step.ahead_bytes

    @property
    def policy(self) -> str:
        """The sync policy by which the program is lowered, where none is asked for."""
        return "tile" if self.step is None else llama_plan.SYNC_POLICY

    @property
    def resident(self) -> int:
        """Workers that the device runs at once, where nothing says so."""
        return 132 if self.queues is None or self.step is None else len(self.queues)

    def chosen_queues(self, order: str | None, queues: str | None) -> tuple[tuple[int, ...], ...] | None:
        """Return the prescribed queues, unless an order or a kind of queues that was asked for takes their place."""
        if self.step is not None and (order not in (None, "sequential") or queues == "ticket"):
            return None
        return self.queues


def by_stage(trace: Trace) -> Trace:
    """A decode step's trace with the layers of a stage under one name: qkv0, qkv1 as qkv."""
    return replace(trace, phase=tuple(map(stage_of, trace.phase)))
