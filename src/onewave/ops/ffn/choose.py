"""Chooses the implementation of ffn: one launch (wave, chain), two side by side (streams), or products one by one."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from onewave.base.device import Device
from onewave.base.errors import UnsupportedError
from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.choice import Asked, Choice, Reason, because, empty_on_meta
from onewave.ops.ffn.call import FFNCall, check_choices, check_dtype, check_operands, suits
from onewave.ops.ffn.chain.plan import ChainPlan, plan_chain
from onewave.ops.ffn.measured import Block, fastest, table_lines
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.plan import DATA, FFNPlan, has_plan, keeps_compact, plan_ffn, workers_for
from onewave.wave.plan.layout import MAX_ROWS

_IN_TORCH = "ffn/reference.py: products one by one"
_PRODUCTS_ALONE = because("both products in one launch need 16-bit types on sm_90")


@dataclass(frozen=True)
class WaveChoice(Choice):
    """One launch from packed weights. order, policy: the wave's own; given_workers: None for workers_for's."""

    sizes: FFNSizes
    order: str
    policy: str
    dtype: torch.dtype
    max_workers: int
    given_workers: int | None

    @cached_property
    def compact(self) -> bool:
        """Whether the packed copy keeps thirteen bits a weight."""
        return keeps_compact(self.dtype, self.sizes.rows, self.order, self.policy)

    @cached_property
    def how(self) -> dict[str, Any]:
        """plan_ffn's options."""
        workers = self.given_workers
        if workers is None:
            workers = workers_for(self.sizes, order=self.order, available=self.max_workers, compact=self.compact)
        return {"workers": workers, "order": self.order, "policy": self.policy, "compact": self.compact}

    @property
    def plan(self) -> FFNPlan:
        """The plan of the launch."""
        return plan_ffn(self.sizes, **self.how)

    @property
    def tile(self) -> str:
        shape = self.plan.programs[0].shape
        return f"{shape.rows} rows x {shape.cols}, ring of {shape.ring}"

    @property
    def split(self) -> str:
        return "K in {} and {}".format(*self.plan.splits)

    @property
    def programs(self) -> str:
        return str(self.how["workers"])

    @property
    def why(self) -> tuple[Reason, ...]:
        lanes = [[int(count) for count in program.lanes[:, 0]] for program in self.plan.programs]
        tiles = [sum(counts) for counts in zip(*lanes, strict=True)]
        tasks, workers = sum(table.num_tasks for table in self.plan.tables), self.how["workers"]
        few = "few rows: bound by reading the weights, which one launch streams without a pause; order {}, {}"
        packs = (
            "packs the weights at the first call{} and keeps the copy; auto does so for as many blocks as it keeps "
            "copies of"
        )
        return (
            because(few, self.order, self.policy),
            because(
                "{} tasks, proved; {} weight tiles on the busiest worker, {:.1f} a worker",
                tasks, max(tiles), sum(tiles) / workers,
            ),
            because(packs, ", in thirteen bits each without loss," if self.compact else ""),
            *self.reasons,
        )  # fmt: skip


@dataclass(frozen=True)
class ChainChoice(Choice):
    """One launch, or two side by side on two streams, from the weights as they are."""

    sizes: FFNSizes
    order: str
    policy: str
    workers: int

    @property
    def streams(self) -> bool:
        """Whether there are two launches."""
        return self.backend == "streams"

    @property
    def plan(self) -> ChainPlan:
        """The plan for exactly so many rows."""
        return plan_chain(self.sizes, workers=self.workers, order=self.order, policy=self.policy, streams=self.streams)

    @property
    def tile(self) -> str:
        tile = self.plan.tile
        return f"{tile.rows} rows x {tile.columns}, ring of {tile.stages}"

    @property
    def split(self) -> str:
        return f"K in 1 and {self.plan.tile.splits}"

    @property
    def programs(self) -> str:
        return " + ".join(str(len(lanes)) for lanes in self.plan.lanes)

    @property
    def why(self) -> tuple[Reason, ...]:
        made = self.plan
        steps = int(made.records[:, 4].sum())
        launches = "two launches side by side" if self.streams else "one launch"
        grid = " x ".join(map(str, made.graph.tensors["H"].grid))
        return (
            because(
                "{}, {} semaphores; order {}, {}; hidden tensor of {} tiles",
                launches, len(made.totals), made.order, made.policy, grid,
            ),
            because(
                "{} tasks, proved; the last ends {:.0%} after the mean",
                len(made.records), made.predicted * self.workers / steps - 1,
            ),
            *self.reasons,
        )  # fmt: skip


def choose(call: FFNCall) -> Choice:
    """Return what runs where memory allows it; see ops/choice.py, and op.py for what else a launch looks at.

    Raises UnsupportedError where the named backend does not take the call.
    """
    named = (call.order, call.policy, call.backend, call.workers)
    return _chosen(FFNSizes(len(call.x), *call.block), call.x.dtype, *named, call.device)


@lru_cache(maxsize=1024)
def _chosen(
    sizes: FFNSizes, dtype: torch.dtype, order: str, policy: str, backend: str, workers: int | None, device: Device
) -> Choice:
    rows = sizes.rows
    here = device.capability == (9, 0) and dtype in checks.HALVES
    name = str(dtype).removeprefix("torch.")
    block = Block(sizes.hidden, sizes.intermediate, sizes.out, sizes.gated, name, device.name)
    known = tuple(because("{}", line) for line in table_lines(block))
    if backend not in ("auto", "torch", "reference") and not (
        here and rows >= 1 and (rows <= MAX_ROWS or backend != "wave")
    ):
        raise unsupported(f"{rows} rows of {dtype} on {device.text}", backend)
    if not here:
        return products(_PRODUCTS_ALONE)
    wanted = "torch" if backend == "reference" else backend
    if backend == "auto":
        wanted = fastest(rows, block) if rows else "torch"
        if not suits(wanted, order, policy):
            return products(because("{} has no such order or policy", wanted), *known)
    if wanted == "torch":
        return products(*known)
    if wanted != "wave":
        return ChainChoice(
            wanted, "chain.launch", "ffn/chain/kernel.py: chain_kernel", known,
            sizes, order, policy, workers or device.num_sms,
        )  # fmt: skip
    made = WaveChoice(
        "wave", "wave.launch", "wave/kernel/kernel.py: wave_kernel", known,
        replace(sizes, rows=1 << (rows - 1).bit_length()), *of_the_wave(order, policy), dtype, device.num_sms, workers,
    )  # fmt: skip
    if backend == "auto" and (order, policy) != ("auto", "auto") and not has_plan(made.sizes, **made.how):
        return products(because("wave has no plan for so many rows in order {}", made.order), *known)
    return made


def settled(call: FFNCall, choice: Choice) -> Choice:
    """Return the choice, or products where "auto" would need memory, or a recording CUDA graph something new.

    Raises UnsupportedError for a named backend that would need something new while a graph is recorded.
    """
    if not isinstance(choice, (WaveChoice, ChainChoice)):
        return choice
    launches = load("ffn", choice.module)
    if call.backend == "auto" and isinstance(choice, WaveChoice) and not launches.has_room(call, choice):
        return products()
    if not torch.cuda.is_current_stream_capturing() or launches.is_ready(call, choice):
        return choice
    if call.backend == "auto":
        return products()
    next = "Call it once before recording, or record what pack_ffn made: calls keep the last few blocks alone."
    what = f"ffn (backend={call.backend}): recording a CUDA graph"
    raise UnsupportedError(what, got="nothing packed or planned for these sizes yet", next=next)


def products(*reasons: Reason) -> Choice:
    """Return the choice of products one by one."""
    return Choice("torch", "reference", _IN_TORCH, reasons)


def unsupported(got: str, backend: str = "wave") -> UnsupportedError:
    """Return the error of a named backend that does not take a call."""
    rows = f"1 to {MAX_ROWS} rows" if backend == "wave" else "rows"
    allowed = f"{rows} of bfloat16 or float16 on a GPU of compute capability 9.0"
    return UnsupportedError(f"ffn (backend={backend})", got=got, allowed=allowed, next='Use backend="torch".')


def of_the_wave(order: str, policy: str) -> tuple[str, str]:
    """Return the wave's own order and policy in the place of "auto"."""
    return "row" if order == "auto" else order, DATA if policy == "auto" else policy


def describe(asked: Asked) -> FFNCall:
    """A question: x, w_up, w_down; options as ffn's, and workers and gated."""
    x, up, down = asked.take((1, 2, 3), (2,), (2,))
    choices = {"activation": "silu", "order": "auto", "policy": "auto", "backend": "auto"}
    choices |= asked.given(*choices)
    check_choices(**choices)
    given, w_up, w_down = (empty_on_meta(shape, asked.dtype) for shape in (x, up, down))
    check_operands(given, w_up, w_down, None)
    check_dtype(asked.dtype, on_gpu=not asked.on_cpu)
    rows = given.view(math.prod(x[:-1]), x[-1])
    gate = w_up if asked.options.get("gated") else None
    return FFNCall(rows, w_up, w_down, gate, **choices, workers=asked.number("workers"), described=asked.device)
