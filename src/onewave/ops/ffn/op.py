"""The feed-forward block of a transformer: two products and an activation, in one launch where that pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.ffn.call import FFNCall, check_choices, check_operands
from onewave.ops.library import is_watched, register

if TYPE_CHECKING:
    from onewave.ops.ffn.wave.launch import PackedFFN


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
    backend: "wave" runs both products in one persistent launch: up to 64 rows on a GPU of compute capability 9.0. It
    packs the weights at the first call for a batch size (rounded up to a power of two) and keeps up to six packed
    copies, and for good those that a CUDA graph has recorded; pack_ffn makes one that you own. "chain": the same for
    any number of rows on the same GPUs, from the weights as they are. "streams": as "chain", but as two launches side
    by side on two streams. In these three, sums and f are float32, the hidden rows are rounded to x's dtype once, and
    every run gives the same bits.
    "torch" or "reference": products one after the other, each rounded. "auto": what measured.py has seen to be fastest
    on this GPU, for this dtype and block; the products where it has seen nothing, where the backend does not know the
    order or policy asked for or has no plan in it for so many rows, and instead of a wave that would have to drop a
    packed copy in use, fill more than half of the free memory, or pack inference tensors, which do not tell when they
    are written to. (Writes to weights by way of .data or of other libraries go unnoticed, too: where there are such,
    name a backend, or use pack_ffn.)
    order and policy: "auto" leaves them to the backend. order (wave): "row", "half_row", "sm_local", "sequential" (two
    launches). order (chain, streams): "row", "rows:R", "skewed:R", "sequential:R" (bands of R row blocks), "half_row",
    or any of tiles.orders. policy (wave): "data", every word its own flag. policy (all): counters as in tiles.policies:
    "none", "row", "tile", "strided", "conv2d-tile", "consecutive".
    Raises InvalidArgumentError, ShapeError, UnsupportedError; WaveStalled when an earlier launch has stalled.
    """
    check_choices(activation, order, policy, backend)
    checks.tensors("ffn", x=x)
    check_operands(x, w_up, w_down, w_gate)
    flat = (w_up, w_down, w_gate, activation, order, policy, backend)
    return torch.ops.onewave.ffn(x, *flat) if is_watched(x, w_up, w_down, w_gate) else _run(x, *flat)


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

    workers: blocks of the launch, by default one an SM, or a few less where those have no more to do each;
    any number gives the same bits. The rest as in ffn. Call the result with x [rows, hidden].
    Raises InvalidArgumentError, ShapeError, UnsupportedError.
    """
    from onewave.ops.ffn.choose import of_the_wave, unsupported
    from onewave.wave.launch.launch import runs_here
    from onewave.wave.plan.layout import MAX_ROWS

    check_choices(activation, order, policy, "wave")
    checks.whole("pack_ffn", "batch", batch, 1, MAX_ROWS)
    check_operands(None, w_up, w_down, w_gate)
    if not runs_here(w_up.device) or w_up.dtype not in checks.HALVES:
        raise unsupported(f"{w_up.dtype} on {w_up.device}")
    from onewave.ops.ffn.wave.launch import PackedFFN, Packing

    return PackedFFN(w_up, w_down, w_gate, Packing(batch, activation, *of_the_wave(order, policy), workers))


def _run(x: Tensor, *flat: Any) -> Tensor:
    from onewave.ops.ffn.choose import choose, settled  # late: `import onewave.ops` loads neither wave nor tiles

    call = FFNCall(x.reshape(-1, x.shape[-1]), *flat)
    choice = settled(call, choose(call))
    out = load("ffn", choice.module).run(call, choice)
    return out.view(*x.shape[:-1], len(call.w_down))


def _registered(x: Tensor, *flat: Any) -> Tensor:
    return _run(x, *flat).contiguous()


def _fake(x: Tensor, w_up: Tensor, w_down: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], w_down.shape[0]))


_SCHEMA = "(Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, str? activation, str order, str policy, str backend)"
register("ffn", _registered, _fake, schema=f"{_SCHEMA} -> Tensor")
