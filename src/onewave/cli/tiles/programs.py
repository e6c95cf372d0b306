"""Programs by name for the `onewave tiles` commands: those of tiles, and the decode step that the wave runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onewave.base.errors import InvalidArgumentError
from onewave.cli.tiles.options import weight_bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onewave.models.llama_plan import DealtStep
    from onewave.tiles.graph.graph import TileGraph
    from onewave.tiles.graph.programs import ProgramOptions
    from onewave.tiles.sim.machine import CacheLevel
    from onewave.tiles.sim.trace import Trace

_DECODE_READS = ("dtype", "workers")
_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class DecodeOptions:
    """What shapes a decode step besides its model. context: tokens in each cache. batch: sequences."""

    context: int = 4096
    batch: int = 1
    weight_format: str = "16-bit"


@dataclass(frozen=True)
class Asked:
    """A program as it was asked for. sizes: as text."""

    program: str
    sizes: Sequence[str]
    options: ProgramOptions
    decode: DecodeOptions = DecodeOptions()

    @property
    def title(self) -> str:
        """The program with its sizes."""
        return " ".join((self.program, *self.sizes))


@dataclass(frozen=True)
class Built:
    """A program's graph, and what it brings along.

    queues: each worker's task ids, where the program prescribes them. levels: the caches that a fusion tree names.
    step: of decode, what the wave's plan has dealt.
    """

    graph: TileGraph
    queues: tuple[tuple[int, ...], ...] | None = None
    levels: tuple[CacheLevel, ...] = ()
    step: DealtStep | None = None

    @property
    def ahead_bytes(self) -> int:
        """Bytes that a worker reads ahead while it waits."""
        return 0 if self.step is None else self.step.ahead_bytes

    @property
    def policy(self) -> str:
        """The sync policy by which the program is lowered, where none is asked for."""
        from onewave.models.llama_plan import SYNC_POLICY

        return "tile" if self.step is None else SYNC_POLICY

    @property
    def resident(self) -> int:
        """Workers that the device runs at once, where nothing says so."""
        return 132 if self.queues is None or self.step is None else len(self.queues)

    def chosen_queues(self, order: str | None, queues: str | None) -> tuple[tuple[int, ...], ...] | None:
        """Return the prescribed queues, unless an order or a kind of queues that was asked for takes their place."""
        if self.step is not None and (order not in (None, "sequential") or queues == "ticket"):
            return None
        return self.queues


def build(asked: Asked) -> Built:
    """Build a program's graph. Raises InvalidArgumentError, UnsupportedError, ConfigError."""
    from onewave.tiles.graph.programs import PROGRAMS, build_program, check_options, read_notation

    if asked.program == "decode":
        step = _dealt(asked)
        return Built(step.graph, step.queues, step=step)
    if asked.program == "notation":
        check_options(asked.program, asked.decode, ())
        read = read_notation(asked.sizes, asked.options)
        return Built(read.graph, levels=read.levels)
    if asked.program not in PROGRAMS:
        allowed = f"{', '.join(PROGRAMS)}, decode, notation"
        raise InvalidArgumentError("program", got=repr(asked.program[:40]), allowed=allowed)
    check_options(asked.program, asked.decode, ())
    return Built(*build_program(asked.program, asked.sizes, asked.options))


def _dealt(asked: Asked) -> DealtStep:
    """Deal a model's decode step out as the engine does on a GPU with options.workers SMs."""
    from onewave.models.config.read import find_config
    from onewave.models.llama_plan import deal_decode, workers_for
    from onewave.tiles.graph.programs import check_options, exactly

    options, decode = asked.options, asked.decode
    check_options("decode", replace(options, stream_k=False), _DECODE_READS)
    [model] = exactly("decode", asked.sizes, ("MODEL",))
    if options.dtype not in _DTYPES:
        next = "Choose int8, fp8 or compact weights by --weight-format."
        raise InvalidArgumentError("decode: dtype", got=options.dtype[:40], allowed=", ".join(_DTYPES), next=next)
    width = weight_bytes_of(decode.weight_format)
    if options.dtype != "bf16" and decode.weight_format == "compact":
        raise InvalidArgumentError("weight format", got=f"compact with {options.dtype}", allowed="compact with bf16")
    config = find_config(str(model))
    workers = workers_for(config, batch=decode.batch, available=options.workers, weight_bytes=width)
    return deal_decode(config, batch=decode.batch, workers=workers, weight_bytes=width, context=decode.context)


def by_stage(trace: Trace) -> Trace:
    """A decode step's trace with the layers of a stage under one name: qkv0, qkv1 as qkv."""
    from onewave.tiles.sim.timeline import stage_of

    return replace(trace, phase=tuple(map(stage_of, trace.phase)))
