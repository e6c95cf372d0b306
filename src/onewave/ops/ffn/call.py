"""A call of ffn: its tensors and options, and what is checked before anything is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.choice import Call

BACKENDS = ("auto", "wave", "chain", "streams", "torch", "reference")
ACTIVATIONS = ("silu", "gelu", None)


@dataclass(frozen=True, eq=False)
class FFNCall(Call):
    """One call; see op.ffn. x: [rows, hidden]. workers: thread blocks of the launch that explain is asked about."""

    x: Tensor
    w_up: Tensor
    w_down: Tensor
    w_gate: Tensor | None
    activation: str | None = "silu"
    order: str = "auto"
    policy: str = "auto"
    backend: str = "auto"
    workers: int | None = None
    described: Device | None = None

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The matrices that there are."""
        up, down, gate = self.w_up, self.w_down, self.w_gate
        return (up, down) if gate is None else (up, down, gate)

    @property
    def block(self) -> tuple[int, int, int, bool]:
        """(hidden, intermediate, out, gated)."""
        inner, hidden = self.w_up.shape
        return hidden, inner, self.w_down.shape[0], self.w_gate is not None


@lru_cache
def _known(backend: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Orders and policies that a backend takes."""
    # Late: `import onewave.ops` loads neither wave nor tiles.
    from onewave.ops.ffn.chain.plan import BANDS
    from onewave.ops.ffn.wave.plan import DATA, ORDERS
    from onewave.tiles.order.orders import ORDERS as TILE_ORDERS
    from onewave.tiles.order.policies import POLICIES

    few, many = ("auto", *ORDERS), ("auto", *BANDS, "half_row", *TILE_ORDERS)
    if backend == "wave":
        return few, ("auto", DATA, *POLICIES)
    if backend in ("chain", "streams"):
        return many, ("auto", *POLICIES)
    return tuple(dict.fromkeys(few + many)), ("auto", DATA, *POLICIES)


def suits(backend: str, order: str, policy: str) -> bool:
    """Return whether a backend knows an order and a policy that were asked for, "auto" being none."""
    orders, policies = _known(backend)
    return _order_name(backend, order) in orders and policy in policies


def _order_name(backend: str, order: str) -> str:
    # The part after a colon is for the plan to read; the wave has none of these.
    return order if backend == "wave" else order.partition(":")[0]


def check_choices(activation: str | None, order: str, policy: str, backend: str) -> None:
    """Raise InvalidArgumentError for what no backend, or not the one named, knows."""
    from onewave.ops.ffn.chain.plan import band_rows

    orders, policies = _known(backend)
    name = _order_name(backend, order) if isinstance(order, str) else order  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
    checks.one_of("ffn", "activation", activation, ACTIVATIONS)
    checks.one_of("ffn", "backend", backend, BACKENDS)
    checks.one_of("ffn", "order", name, orders)
    checks.one_of("ffn", "policy", policy, policies)
    band_rows(order)


def check_operands(x: Tensor | None, w_up: Tensor, w_down: Tensor, w_gate: Tensor | None) -> None:
    """Check shapes, dtypes and devices. x: None where the weights alone are there.

    Raises InvalidArgumentError, ShapeError, UnsupportedError.
    """
    checks.tensors("ffn", **({} if w_gate is None else {"w_gate": w_gate}), w_up=w_up, w_down=w_down)
    x = w_up if x is None else x
    if x.ndim < 1 or w_up.ndim != 2 or w_down.ndim != 2:
        got = f"{tuple(x.shape)}, {tuple(w_up.shape)}, {tuple(w_down.shape)}"
        raise ShapeError("ffn: x, w_up, w_down", got=got, allowed="[..., hidden], [intermediate, hidden], [out, inner]")
    if w_gate is not None and w_gate.shape != w_up.shape:
        got = f"{tuple(w_gate.shape)} and {tuple(w_up.shape)}"
        raise ShapeError("ffn: w_gate, w_up", got=got, allowed="one shape, [inner, hidden]")
    check_sizes(x.shape[-1], w_up.shape[1], w_up.shape[0], w_down.shape)
    tensors = [t for t in (x, w_up, w_down, w_gate) if t is not None]
    if any(t.dtype is not x.dtype or t.device != x.device for t in tensors):
        got = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise UnsupportedError("ffn: tensors", got=got, allowed="one dtype on one device")
    check_dtype(x.dtype, on_gpu=x.is_cuda)


def check_dtype(dtype: torch.dtype, *, on_gpu: bool) -> None:
    """Raise UnsupportedError for what no backend multiplies there."""
    if dtype not in (*checks.HALVES, torch.float32) or (dtype is torch.float32 and on_gpu):
        raise UnsupportedError("ffn: dtype", got=str(dtype), allowed="bfloat16, float16 (float32 on a CPU)")


def check_sizes(columns: int, hidden: int, inner: int, down: Sequence[int]) -> None:
    """Check x's columns, w_up's [inner, hidden] and w_down's shape. Raises ShapeError."""
    if columns != hidden or down[1] != inner:
        got = f"x [..., {columns}], w_up [{inner}, {hidden}], w_down {list(down)}"
        raise ShapeError("ffn: shapes", got=got, allowed="x [..., hidden], w_up [inner, hidden], w_down [out, inner]")
    for name, size in (("hidden", hidden), ("intermediate", inner), ("out", down[0])):
        if size < 64 or size % 64:
            raise ShapeError(f"ffn: {name} size", got=str(size), allowed="multiples of 64")
