"""The feed-forward block of a transformer: two products and an activation, in one launch where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.ffn import reference
from onewave.ops.ffn.measured import fastest
from onewave.ops.library import check_tensors, is_watched, register

if TYPE_CHECKING:
    from onewave.ops.ffn.wave.launch import PackedFFN

BACKENDS = ("auto", "wave", "chain", "streams", "torch", "reference")
ACTIVATIONS = ("silu", "gelu", None)
_DTYPES = (torch.bfloat16, torch.float16)


def ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    w_gate: Tensor | None = None,
    activation: str | None = "silu",
    order: str = "auto",
    policy: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """down(f(gate x) * up x), or down(f(up x)) without a gate.

    x: [..., hidden] bf16|fp16 (fp32 too on a CPU). w_up, w_gate: [intermediate, hidden]; w_down: [out, intermediate],
    all of x's dtype, sizes multiples of 64. Returns [..., out]. activation: f, "silu", "gelu" (exact) or None.
    backend: "wave" runs both products in one persistent launch: up to 64 rows on a card of compute capability 9.0. It
    packs the weights at the first call for a batch size (rounded up to a power of two) and keeps up to six packed
    copies, and for good those that a CUDA graph has recorded; pack_ffn makes one that you own. "chain": the same for
    any number of rows on the same cards, from the weights as they are. "streams": as "chain", but as two launches side
    by side on two streams. In these three, sums and f are float32, the hidden rows are rounded to x's dtype once, and
    every run gives the same bits.
    "torch" or "reference": products one after the other, each rounded. "auto": what measured.py has seen to be fastest
    on this card, for this dtype and block; the products where it has seen nothing, where the backend does not know the
    order or policy asked for or has no plan in it for so many rows, and instead of a wave that would have to drop a
    packed copy in use, fill more than half of the free memory, or pack inference tensors, which tell nobody when they
    are written to. (Writes to weights by way of .data or of other libraries go unnoticed, too: where there are such,
    name a backend, or use pack_ffn.)
    order and policy: "auto" leaves them to the backend. order (wave): "row", "half_row", "sm_local", "sequential" (two
    launches). order (chain, streams): "row", "rows:R", "skewed:R", "sequential:R" (bands of R row blocks), "half_row",
    or any of tiles.orders. policy (wave): "data", every word its own flag. policy (all): counters as in tiles.policies:
    "none", "row", "tile", "strided", "conv2d-tile", "consecutive".
    Raises InvalidArgumentError, ShapeError, UnsupportedError; WaveStalled when an earlier launch has stalled.
    """
    check_choices(activation, order, policy, backend)
    check_tensors("ffn", x=x)
    _check_tensors(x, w_up, w_down, w_gate)
    if is_watched(x, w_up, w_down, w_gate):
        return torch.ops.onewave.ffn(x, w_up, w_down, w_gate, activation, order, policy, backend)
    return _ffn(x, w_up, w_down, w_gate, activation, order, policy, backend)


def pack_ffn(
    w_up: Tensor,
    w_down: Tensor,
    *,
    w_gate: Tensor | None = None,
    batch: int = 1,
    activation: str | None = "silu",
    order: str = "row",
    policy: str = "data",
    workers: int | None = None,
) -> PackedFFN:
    """Pack a block's weights for calls with up to `batch` rows; the originals may go afterwards.

    workers: blocks of the launch, by default one a multiprocessor, or a few less where those have no more to do each;
    any number gives the same bits. The rest as in ffn. Call the result with x [rows, hidden].
    Raises InvalidArgumentError, ShapeError, UnsupportedError.
    """
    from onewave.wave.plan.layout import MAX_ROWS

    check_choices(activation, order, policy, "wave")
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_ROWS:  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
        raise InvalidArgumentError("pack_ffn: batch", got=shown(batch), allowed=f"1 to {MAX_ROWS} rows")
    _check_tensors(None, w_up, w_down, w_gate)
    if not _runs_on(w_up.device) or w_up.dtype not in _DTYPES:
        raise _unsupported(f"{w_up.dtype} on {w_up.device}")
    from onewave.ops.ffn.wave.launch import pack

    order, policy = of_the_wave(order, policy)
    return pack(w_up, w_down, w_gate, batch=batch, activation=activation, order=order, policy=policy, workers=workers)


def _runs_on(device: torch.device) -> bool:
    """Whether the backends of one launch run there. A CPU never imports them."""
    if device.type != "cuda":
        return False
    from onewave.wave.launch.launch import runs_here

    return runs_here(device)


@lru_cache
def _known(backend: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Orders and policies that a backend takes."""
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


def check_choices(activation: str | None, order: str, policy: str, backend: str) -> None:
    """Raises InvalidArgumentError for what no backend, or not the one named, knows."""
    from onewave.ops.ffn.chain.plan import band_rows

    orders, policies = _known(backend)
    name = _order_name(backend, order) if isinstance(order, str) else order  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
    for what, value, got, allowed in (
        ("activation", activation, activation, ACTIVATIONS),
        ("backend", backend, backend, BACKENDS),
        ("order", name, order, orders),
        ("policy", policy, policy, policies),
    ):
        if value not in allowed:
            raise InvalidArgumentError(f"ffn: {what}", got=shown(got), allowed=", ".join(map(repr, allowed)))
    band_rows(order)


def _check_tensors(x: Tensor | None, w_up: Tensor, w_down: Tensor, w_gate: Tensor | None) -> None:
    """x: None where the weights alone are there."""
    check_tensors("ffn", **({} if w_gate is None else {"w_gate": w_gate}), w_up=w_up, w_down=w_down)
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
    if x.dtype not in (*_DTYPES, torch.float32) or (x.dtype is torch.float32 and x.is_cuda):
        raise UnsupportedError("ffn: dtype", got=str(x.dtype), allowed="bfloat16, float16 (float32 on a CPU)")


def check_sizes(columns: int, hidden: int, inner: int, down: Sequence[int]) -> None:
    """Check x's columns, w_up's [inner, hidden] and w_down's shape. Raises ShapeError."""
    if columns != hidden or down[1] != inner:
        got = f"x [..., {columns}], w_up [{inner}, {hidden}], w_down {list(down)}"
        raise ShapeError("ffn: shapes", got=got, allowed="x [..., hidden], w_up [inner, hidden], w_down [out, inner]")
    for name, size in (("hidden", hidden), ("intermediate", inner), ("out", down[0])):
        if size < 64 or size % 64:
            raise ShapeError(f"ffn: {name} size", got=str(size), allowed="multiples of 64")


def _unsupported(got: str, backend: str = "wave") -> UnsupportedError:
    from onewave.wave.plan.layout import MAX_ROWS

    rows = f"1 to {MAX_ROWS} rows" if backend == "wave" else "rows"
    allowed = f"{rows} of bfloat16 or float16 on a card of compute capability 9.0"
    return UnsupportedError(f"ffn (backend={backend})", got=got, allowed=allowed, next='Use backend="torch".')


def _ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    activation: str | None,
    order: str,
    policy: str,
    backend: str,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    chosen = _chosen(rows, w_up, w_down, w_gate, activation, order, policy, backend)
    if chosen == "torch":
        return reference.ffn(x, w_up, w_down, w_gate, activation)
    if chosen == "wave":
        from onewave.ops.ffn.wave import launch as wave_impl

        order, policy = of_the_wave(order, policy)
        out = wave_impl.ffn(rows, w_up, w_down, w_gate, activation, order, policy)
    else:
        from onewave.ops.ffn.chain import launch as chain_impl

        streams = chosen == "streams"
        out = chain_impl.ffn(rows, w_up, w_down, w_gate, activation, order, policy, streams)
    return out.view(*x.shape[:-1], len(w_down))


def of_the_wave(order: str, policy: str) -> tuple[str, str]:
    """The wave's own order and policy in the place of "auto"."""
    from onewave.ops.ffn.wave.plan import DATA

    return "row" if order == "auto" else order, DATA if policy == "auto" else policy


def _chosen(
    rows: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    activation: str | None,
    order: str,
    policy: str,
    backend: str,
) -> str:
    """The backend that runs: "wave", "chain", "streams" or "torch". Raises UnsupportedError if one must but can't."""
    if backend in ("torch", "reference"):
        return "torch"
    from onewave.wave.plan.layout import MAX_ROWS

    here = _runs_on(rows.device) and rows.dtype in _DTYPES
    few = 1 <= len(rows) <= MAX_ROWS
    if backend != "auto" and not (here and len(rows) >= 1 and (few or backend != "wave")):
        raise _unsupported(f"{len(rows)} rows of {rows.dtype} on {rows.device}", backend)
    wanted = backend
    if backend == "auto":
        wanted = _fastest(rows, w_up, w_down, w_gate) if here and len(rows) else "torch"
        if not suits(wanted, order, policy):
            wanted = "torch"
        elif wanted == "wave":
            from onewave.ops.ffn.wave import launch as wave_impl

            given = (rows, w_up, w_down, w_gate, activation, *of_the_wave(order, policy))
            asked = (order, policy) != ("auto", "auto")
            if not wave_impl.has_room(*given) or (asked and not wave_impl.is_planned(*given)):
                wanted = "torch"
    if wanted == "torch" or not torch.cuda.is_current_stream_capturing():
        return wanted
    if _is_prepared(rows, w_up, w_down, w_gate, activation, order, policy, wanted):
        return wanted
    if backend != "auto":
        next = "Call it once before recording, or record what pack_ffn made: calls keep the last few blocks alone."
        what = f"ffn (backend={backend}): recording a CUDA graph"
        raise UnsupportedError(what, got="nothing packed or planned for these sizes yet", next=next)
    return "torch"


def _fastest(rows: Tensor, w_up: Tensor, w_down: Tensor, w_gate: Tensor | None) -> str:
    sizes = (len(rows), w_up.shape[1], w_up.shape[0], w_down.shape[0], w_gate is not None)
    return _looked_up(*sizes, str(rows.dtype).removeprefix("torch."), torch.cuda.get_device_name(rows.device))


@lru_cache(maxsize=1024)
def _looked_up(rows: int, hidden: int, intermediate: int, out: int, gated: bool, dtype: str, card: str) -> str:
    return fastest(rows, hidden, intermediate, out, gated, dtype, card=card)


def suits(backend: str, order: str, policy: str) -> bool:
    """Whether a backend knows an order and a policy that were asked for, "auto" being none."""
    orders, policies = _known(backend)
    return _order_name(backend, order) in orders and policy in policies


def _order_name(backend: str, order: str) -> str:
    # What stands behind a colon is for the plan to read; the wave has none of these.
    return order if backend == "wave" else order.partition(":")[0]


def _is_prepared(
    rows: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    activation: str | None,
    order: str,
    policy: str,
    backend: str,
) -> bool:
    """Whether a call would make nothing new, which a CUDA graph that is being recorded would not allow."""
    if backend == "wave":
        from onewave.ops.ffn.wave import launch as wave_impl

        return wave_impl.is_packed(rows, w_up, w_down, w_gate, activation, *of_the_wave(order, policy))
    from onewave.ops.ffn.chain import launch as chain_impl

    return chain_impl.is_ready(rows, w_up, w_down, w_gate, activation, order, policy, backend == "streams")


def _registered(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    activation: str | None,
    order: str,
    policy: str,
    backend: str,
) -> Tensor:
    out = _ffn(x, w_up, w_down, w_gate, activation, order, policy, backend)
    return out.contiguous()


def _fake(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    activation: str | None,
    order: str,
    policy: str,
    backend: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], w_down.shape[0]))


register("ffn", _registered, _fake)
