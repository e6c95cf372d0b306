"""The feed-forward block in every arrangement on the same operands, taking turns, on weights that no cache holds.

Few rows (up to 64): one wave over packed weights. Any number: one launch with row semaphores ("chain"), two launches on
two streams with the same semaphores ("streams"), and two cuBLAS products with the activation between them: PyTorch's
own, and where there is a gate also one product for gate and up and our SwiGLU kernel. Each is recorded once in a CUDA
graph; then they take turns (`clock.time_in_rounds`): with many rows a GPU's power sets its clock, and the first
would be timed on a cooler GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary, recorded, time_in_rounds
from onewave.bench.ledger import Measurement
from onewave.ops.ffn import pack_ffn
from onewave.ops.ffn.call import FFNCall
from onewave.ops.ffn.reference import ffn as two_products
from onewave.ops.swiglu import swiglu
from onewave.wave.launch.launch import runs_here
from onewave.wave.plan.layout import MAX_ROWS

# More than any cache that could serve a repetition.
_BYTES_IN_ROTATION = 512 << 20
PRODUCTS = "cuBLAS, two products"
"""The baseline of the other arrangements."""
SIDE_BY_SIDE = "cuBLAS, gate and up in one"


@dataclass(frozen=True)
class FFNShape:
    """rows of x, and the sizes of the block; gated: SiLU(gate) * up, otherwise SiLU(up)."""

    rows: int
    hidden: int = 4096
    intermediate: int = 14336
    gated: bool = False

    operator: ClassVar[str] = "ffn"
    baseline: ClassVar[str] = PRODUCTS
    """The arrangement that the others are compared with, and what a line calls it."""
    baseline_name: ClassVar[str] = "products"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices, which every way reads at least once."""
        return 2 * self.hidden * self.intermediate * (3 if self.gated else 2)

    @property
    def flops(self) -> int:
        """Floating-point operations of the products, a multiply-add counting as two."""
        return self.rows * self.weight_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes that every way moves: the matrices, rows in, rows out."""
        return self.weight_bytes + 2 * 2 * self.rows * self.hidden

    @property
    def is_many(self) -> bool:
        """Whether the tensor cores are the bound, not the memory: from 512 rows on on an H200."""
        return self.rows >= 512

    def __str__(self) -> str:
        return f"{self.rows}x{self.hidden}x{self.intermediate}{' gated' if self.gated else ''}"

    def arrangements(self, device: torch.device, dtype: torch.dtype, *, copies: int) -> list[Arrangement]:
        """Return every way to compute it on random operands, `copies` of them, the baseline last."""
        return arrangements(random_operands(self, device, dtype, copies=copies))


SHAPES = tuple(FFNShape(rows) for rows in (1, 2, 4, 8, 16, 32, 64))
SWEEP = (
    FFNShape(16),
    *(FFNShape(64 << i, gated=gated) for gated in (False, True) for i in range(10)),
)
"""The dataflow notes' own case, then 64 to 32,768 rows without and with a gate."""


@dataclass(frozen=True)
class FFNResult:
    """Seconds a call of one implementation on one shape. products: the baseline's median on it, None if unknown.
    compact_bytes: of the weights, if it keeps them in thirteen bits each."""

    shape: FFNShape
    implementation: str
    seconds: Summary
    products: float | None = None
    compact_bytes: int | None = None

    @property
    def weight_bytes(self) -> int:
        return self.compact_bytes or self.shape.weight_bytes

    @property
    def gigabytes_per_second(self) -> float:
        """Weight bytes that are read over the median, 10^9 a second."""
        return self.weight_bytes * 1e-9 / self.seconds.p50

    @property
    def teraflops_per_second(self) -> float:
        """Operations over the median, 10^12 a second."""
        return self.shape.flops * 1e-12 / self.seconds.p50

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the products."""
        return None if self.products is None else self.products / self.seconds.p50

    def share(self, ceiling: Ceiling) -> float:
        """Return the share of a ceiling in GB/s or TFLOP/s."""
        rate = self.gigabytes_per_second if ceiling.unit == "GB/s" else self.teraflops_per_second
        return rate / ceiling.value

    def measurement(self, dtype: str, ceiling: Ceiling) -> Measurement:
        extra: dict[str, object] = {
            "implementation": self.implementation,
            "shape": str(self.shape),
            "dtype": dtype,
            "bytes": self.weight_bytes,
            "compact": self.compact_bytes is not None,
            "ceiling_share": self.share(ceiling),
        }
        if self.speedup is not None:
            extra[f"times_as_fast_as_{self.shape.baseline_name}"] = self.speedup
        operator = self.shape.operator
        return Measurement(operator, operator, "us", self.seconds.scaled(1e6), ceiling, extra)


Operands = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass
class Arrangement:
    """One way to compute the block: calls on different operands, and what finds out whether they went well.
    compact_bytes: of its weights, if it keeps them in thirteen bits each."""

    name: str
    calls: list[Callable[[], object]]
    check: list[Callable[[], None]]
    compact_bytes: int | None = None


def check_gpu(device: torch.device) -> None:
    """Raise UnsupportedError where neither the wave nor the kernels for many rows run."""
    if not runs_here(device):
        next = "onewave bench ops linear times a CPU's products."
        raise UnsupportedError("bench ops", got=str(device), allowed="a GPU of compute capability 9.0", next=next)


def measure_ffn(shape: FFNShape, device: torch.device, dtype: torch.dtype, *, reps: int) -> list[FFNResult]:
    """Time every arrangement on the same operands in one process, in turns; the baseline is the last.

    reps: how often each has its turn. Raises UnsupportedError where the wave does not run, WaveStalled if a launch has
    stalled.
    """
    check_gpu(device)
    copies = max(1 if shape.is_many else 2, -(-_BYTES_IN_ROTATION // shape.weight_bytes))
    ways = shape.arrangements(device, dtype, copies=copies)
    with torch.inference_mode():
        runs = {way.name: (recorded(way.calls, device), len(way.calls)) for way in ways}
        times = time_in_rounds(runs, device, rounds=reps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    for way in ways:
        for check in way.check:
            check()
    if device.type == "cuda":
        # The graphs' pools; the next shape needs them elsewhere.
        runs.clear()
        torch.cuda.empty_cache()
    products = times[shape.baseline].p50
    sizes = {way.name: way.compact_bytes for way in ways}
    return [FFNResult(shape, name, seconds, products, sizes[name]) for name, seconds in times.items()]


def random_operands(shape: FFNShape, device: torch.device, dtype: torch.dtype, *, copies: int) -> list[Operands]:
    """x, w_up, w_down and the gate or None, `copies` times."""

    def random(*size: int) -> Tensor:
        return (torch.randn(size, device=device) * size[-1] ** -0.5).to(dtype)

    return [
        (
            random(shape.rows, shape.hidden),
            random(shape.intermediate, shape.hidden),
            random(shape.hidden, shape.intermediate),
            random(shape.intermediate, shape.hidden) if shape.gated else None,
        )
        for _ in range(copies)
    ]


def arrangements(operands: list[Operands]) -> list[Arrangement]:
    """Every way to compute the block on these operands, PRODUCTS last."""
    x, _, _, gate = operands[0]
    ways = [_wave(operands)] if len(x) <= MAX_ROWS else []
    ways += [_chain(operands, streams) for streams in (False, True)]
    if gate is not None:
        ways.append(_side_by_side(operands))
    calls: list[Callable[[], object]] = [
        lambda given=given: two_products(*given, activation="silu") for given in operands
    ]
    return [*ways, Arrangement(PRODUCTS, calls, [])]


def _side_by_side(operands: list[Operands]) -> Arrangement:
    """One product for gate and up, SwiGLU in one kernel, and the product down."""
    calls: list[Callable[[], object]] = []
    for x, up, down, gate in operands:
        assert gate is not None
        both = torch.cat((gate, up))
        calls.append(lambda x=x, both=both, down=down: F.linear(swiglu(F.linear(x, both)), down))
    return Arrangement(SIDE_BY_SIDE, calls, [])


def _wave(operands: list[Operands]) -> Arrangement:
    packed = [pack_ffn(up, down, w_gate=gate, batch=len(x)) for x, up, down, gate in operands]
    calls: list[Callable[[], object]] = [
        lambda each=each, x=given[0]: each(x) for each, given in zip(packed, operands, strict=True)
    ]
    size = packed[0].weight_bytes if packed[0].compact else None
    return Arrangement("wave, auto, auto", calls, [each.check for each in packed], size)


def _chain(operands: list[Operands], streams: bool) -> Arrangement:
    from onewave.ops.ffn.chain.launch import chain

    made = chain(FFNCall(*operands[0]), streams=streams)
    plan = made.plan
    cut = f", K in {plan.tile.splits}" if plan.tile.splits > 1 else ""
    kind = "streams" if streams else "chain"
    name = f"{kind}, {plan.order}, {plan.policy}, {plan.tile.rows}x{plan.tile.columns}{cut}"
    return Arrangement(name, [lambda given=given: made(*given) for given in operands], [made.check])
