"""The feed-forward block in every arrangement on the same operands, in CUDA graphs, on weights that no cache holds.

Few rows (up to 64): one wave over packed weights. Any number: one launch with row semaphores ("chain"), two launches on
two streams with the same semaphores ("streams"), and two cuBLAS products with the activation between them: PyTorch's
own, and where there is a gate also one product for gate and up and our SwiGLU kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary, time_calls
from onewave.bench.ledger import Measurement
from onewave.ops.ffn import pack_ffn
from onewave.ops.ffn.reference import ffn as two_products
from onewave.ops.swiglu import swiglu
from onewave.wave.launch import runs_here
from onewave.wave.layout import MOST_BATCH

__all__ = ["PRODUCTS", "SHAPES", "SWEEP", "FFNResult", "FFNShape", "check_card", "measure_ffn"]

# More than any cache that could serve a repetition.
_BYTES_IN_ROTATION = 512 << 20
PRODUCTS = "cuBLAS, two products"
"""What the others are compared with."""
SIDE_BY_SIDE = "cuBLAS, gate and up in one"


@dataclass(frozen=True)
class FFNShape:
    """rows of x, and the sizes of the block; gated: SiLU(gate) * up, otherwise SiLU(up)."""

    rows: int
    hidden: int = 4096
    intermediate: int = 14336
    gated: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices, which every way reads at least once."""
        return 2 * self.hidden * self.intermediate * (3 if self.gated else 2)

    @property
    def flops(self) -> int:
        """Floating-point operations of the products, a multiply-add counting as two."""
        return self.rows * self.weight_bytes

    @property
    def is_many(self) -> bool:
        """Whether the tensor cores are the bound, not the memory: from 512 rows on on an H200."""
        return self.rows >= 512

    def __str__(self) -> str:
        return f"{self.rows}x{self.hidden}x{self.intermediate}{' gated' if self.gated else ''}"


SHAPES = tuple(FFNShape(rows) for rows in (1, 2, 4, 8, 16, 32, 64))
SWEEP = (
    FFNShape(16),
    *(FFNShape(64 << i, gated=gated) for gated in (False, True) for i in range(10)),
)
"""The dataflow notes' own case, then 64 to 32,768 rows without and with a gate."""


@dataclass(frozen=True)
class FFNResult:
    """Seconds a call of one implementation on one shape. products: the median of PRODUCTS on it, None if unknown."""

    shape: FFNShape
    implementation: str
    seconds: Summary
    products: float | None = None

    @property
    def gigabytes_per_second(self) -> float:
        """Weight bytes over the median, 10^9 a second."""
        return self.shape.weight_bytes * 1e-9 / self.seconds.p50

    @property
    def teraflops_per_second(self) -> float:
        """Operations over the median, 10^12 a second."""
        return self.shape.flops * 1e-12 / self.seconds.p50

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the products."""
        return None if self.products is None else self.products / self.seconds.p50

    def share(self, ceiling: Ceiling) -> float:
        """Of a ceiling in GB/s or TFLOP/s."""
        rate = self.gigabytes_per_second if ceiling.unit == "GB/s" else self.teraflops_per_second
        return rate / ceiling.value

    def measurement(self, dtype: str, ceiling: Ceiling) -> Measurement:
        """The ledger's line."""
        extra: dict[str, object] = {
            "implementation": self.implementation,
            "shape": str(self.shape),
            "dtype": dtype,
            "bytes": self.shape.weight_bytes,
            "ceiling_share": self.share(ceiling),
        }
        if self.speedup is not None:
            extra["times_as_fast_as_products"] = self.speedup
        return Measurement("ffn", "ffn", "us", self.seconds.scaled(1e6), ceiling, extra)


@dataclass
class _Arrangement:
    """One way to compute the block: calls on different operands, and what finds out whether they went well."""

    name: str
    calls: list[Callable[[], object]]
    check: list[Callable[[], None]]


def check_card(device: torch.device) -> None:
    """Raise UnsupportedError where neither the wave nor the kernel for many rows runs."""
    if not runs_here(device):
        raise UnsupportedError("bench ops ffn", got=str(device), allowed="a card of compute capability 9.0")


def measure_ffn(
    shape: FFNShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    reps: int,
    order: str = "auto",
    policy: str = "auto",
    workers: int | None = None,
) -> list[FFNResult]:
    """Time every arrangement on the same operands, one after the other in one process; PRODUCTS is the last.

    order, policy: as ops.ffn's, of the arrangements that know them. workers: blocks of the wave's launch, by default
    one a multiprocessor. Raises UnsupportedError where the wave does not run, WaveStalled if a launch has stalled.
    """
    check_card(device)
    copies = max(1 if shape.is_many else 2, -(-_BYTES_IN_ROTATION // shape.weight_bytes))

    def random(*size: int) -> Tensor:
        return (torch.randn(size, device=device) * size[-1] ** -0.5).to(dtype)

    operands = [
        (
            random(shape.rows, shape.hidden),
            random(shape.intermediate, shape.hidden),
            random(shape.hidden, shape.intermediate),
            random(shape.intermediate, shape.hidden) if shape.gated else None,
        )
        for _ in range(copies)
    ]
    ways: list[_Arrangement] = []
    if shape.rows <= MOST_BATCH:
        ways.append(_wave(operands, order, policy, workers))
    ways += [_chain(operands, order, policy, streams) for streams in (False, True)]
    if shape.gated:
        ways.append(_side_by_side(operands))
    ways.append(
        _Arrangement(PRODUCTS, [lambda given=given: two_products(*given, activation="silu") for given in operands], [])
    )
    times: dict[str, Summary] = {}
    with torch.inference_mode():
        for way in ways:
            times[way.name] = time_calls(way.calls, device, reps=reps)
            torch.cuda.synchronize(device)
            for check in way.check:
                check()
    products = times[PRODUCTS].p50
    return [FFNResult(shape, name, seconds, products) for name, seconds in times.items()]


Operands = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _side_by_side(operands: list[Operands]) -> _Arrangement:
    """One product for gate and up, SwiGLU in one kernel, and the product down."""
    calls: list[Callable[[], object]] = []
    for x, up, down, gate in operands:
        assert gate is not None
        both = torch.cat((gate, up))
        calls.append(lambda x=x, both=both, down=down: F.linear(swiglu(F.linear(x, both)), down))
    return _Arrangement(SIDE_BY_SIDE, calls, [])


def _wave(operands: list[Operands], order: str, policy: str, workers: int | None) -> _Arrangement:
    packed = [
        pack_ffn(up, down, w_gate=gate, batch=len(x), order=order, policy=policy, workers=workers)
        for x, up, down, gate in operands
    ]
    calls: list[Callable[[], object]] = [
        lambda each=each, x=given[0]: each(x) for each, given in zip(packed, operands, strict=True)
    ]
    return _Arrangement(f"wave, {order}, {policy}", calls, [each.check for each in packed])


def _chain(operands: list[Operands], order: str, policy: str, streams: bool) -> _Arrangement:
    from onewave.ops.ffn.chain_impl import chain

    x, up, down, gate = operands[0]
    made = chain(x, up, down, gate, order=order, policy=policy, streams=streams)
    plan = made.plan
    cut = f", K in {plan.tile.splits}" if plan.tile.splits > 1 else ""
    name = (
        f"{'streams' if streams else 'chain'}, {plan.order}, {plan.policy}, {plan.tile.rows}x{plan.tile.columns}{cut}"
    )
    return _Arrangement(name, [lambda given=given: made(*given) for given in operands], [made.check])
