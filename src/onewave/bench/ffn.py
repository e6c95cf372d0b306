"""The feed-forward block in one wave beside two cuBLAS products, both in CUDA graphs, on weights no cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary, time_calls
from onewave.bench.ledger import Measurement
from onewave.ops.ffn import pack_ffn
from onewave.ops.ffn.reference import ffn as two_products
from onewave.wave.launch import runs_here

__all__ = ["SHAPES", "FFNResult", "FFNShape", "measure_ffn"]

# More than any cache that could serve a repetition.
_BYTES_IN_ROTATION = 512 << 20


@dataclass(frozen=True)
class FFNShape:
    """rows of x, and the sizes of the block; gated: SiLU(gate) * up, otherwise SiLU(up)."""

    rows: int
    hidden: int = 4096
    intermediate: int = 14336
    gated: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices, which both ways read once."""
        return 2 * self.hidden * self.intermediate * (3 if self.gated else 2)

    def __str__(self) -> str:
        return f"{self.rows}x{self.hidden}x{self.intermediate}{' gated' if self.gated else ''}"


SHAPES = tuple(FFNShape(rows) for rows in (1, 2, 4, 8, 16, 32, 64))


@dataclass(frozen=True)
class FFNResult:
    """Seconds a call of one implementation on one shape."""

    shape: FFNShape
    implementation: str
    seconds: Summary

    @property
    def gigabytes_per_second(self) -> float:
        """Weight bytes over the median, 10^9 a second."""
        return self.shape.weight_bytes * 1e-9 / self.seconds.p50

    def measurement(self, dtype: str, ceiling: Ceiling) -> Measurement:
        """The ledger's line."""
        extra = {
            "implementation": self.implementation,
            "shape": str(self.shape),
            "dtype": dtype,
            "bytes": self.shape.weight_bytes,
            "ceiling_share": self.gigabytes_per_second / ceiling.value,
        }
        return Measurement("ffn", "ffn", "us", self.seconds.scaled(1e6), ceiling, extra)


def measure_ffn(
    shape: FFNShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    reps: int,
    order: str = "row",
    policy: str = "data",
    workers: int | None = None,
) -> list[FFNResult]:
    """Time the wave and the two products on the same operands, one after the other in one process.

    workers: blocks of the wave's launch, by default one a multiprocessor. Raises UnsupportedError where the wave does
    not run.
    """
    if not runs_here(device):
        raise UnsupportedError("bench ops ffn", got=str(device), allowed="a card of compute capability 9.0")
    copies = max(2, -(-_BYTES_IN_ROTATION // shape.weight_bytes))
    waves: list[Callable[[], object]] = []
    products: list[Callable[[], object]] = []
    checks: list[Callable[[], None]] = []
    for _ in range(copies):

        def random(*size: int) -> Tensor:
            return (torch.randn(size, device=device) * size[-1] ** -0.5).to(dtype)

        x, up = random(shape.rows, shape.hidden), random(shape.intermediate, shape.hidden)
        down = random(shape.hidden, shape.intermediate)
        gate = random(shape.intermediate, shape.hidden) if shape.gated else None
        packed = pack_ffn(up, down, w_gate=gate, batch=shape.rows, order=order, policy=policy, workers=workers)
        waves.append(lambda packed=packed, x=x: packed(x))
        products.append(lambda x=x, up=up, down=down, gate=gate: two_products(x, up, down, gate, "silu"))
        checks.append(packed.check)
    found: list[FFNResult] = []
    with torch.inference_mode():
        for name, calls in ((f"wave, {order}, {policy}", waves), ("cuBLAS, two products", products)):
            found.append(FFNResult(shape, name, time_calls(calls, device, reps=reps)))
    torch.cuda.synchronize(device)
    for check in checks:
        check()
    return found
