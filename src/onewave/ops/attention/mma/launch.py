"""Attention on few registers: launches mma_kernel_impl's kernel as plan.plan_on_mma lays it out."""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false
# (Triton ships no type information.)

from __future__ import annotations

import math

from torch import Tensor

from onewave.gpu.launch import launch_kernel
from onewave.ops.attention.masks import Options
from onewave.ops.attention.mma.kernel import mma_kernel
from onewave.ops.attention.mma.plan import mma_tile
from onewave.ops.attention.triton.plan import AttentionPlan

_LOG2E = math.log2(math.e)
_PIECE, _PIECE_BYTES = 8, 16
# A place plus a side stays inside 32 bits.
_MOST_KEYS = 1 << 30
_ALL_REGISTERS = 255


def attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    wanted: Options,
    plan: AttentionPlan,
    *,
    sinks: Tensor | None = None,
    starts_q: Tensor | None = None,
    starts_k: Tensor | None = None,
    longest: int = 0,
) -> None:
    """Write out (like q) and lse (float32 [B, H, Sq]); what op.attention has checked and planned.

    starts_q, starts_k: int32 [sequences + 1]; then batch is 1 in q, k, v, out and lse, Sq, Sk count all tokens, and
    rows beyond the first `longest` of a sequence are not written.
    """
    if q.numel() == 0:
        return
    num_heads, num_queries, head_dim = q.shape[1:]
    packed = starts_q is not None
    unit = _PIECE if all(_in_pieces(tensor) for tensor in (q, k, v, out)) else 1
    launch_kernel(
        mma_kernel,
        (plan.programs,),
        q,
        k,
        v,
        out,
        q if lse is None else lse,
        q if sinks is None else sinks,
        q if starts_q is None else starts_q,
        q if starts_k is None else starts_k,
        *_steps(q, unit),
        *_steps(k, unit),
        *_steps(v, unit),
        *_steps(out, unit),
        *((0, 0, 0) if lse is None else lse.stride()),
        num_heads,
        num_heads // k.shape[1],
        longest if packed else num_queries,
        k.shape[2],
        plan.tiles,
        0 if packed else wanted.shift(num_queries, k.shape[2]),
        min(wanted.left or 0, _MOST_KEYS),
        min(wanted.right or 0, _MOST_KEYS),
        wanted.scale * _LOG2E,
        2 * _LOG2E * wanted.scale / (wanted.softcap or 1.0),
        _LOG2E * (wanted.softcap or 1.0),
        PACK=plan.packed_heads,
        HEAD_DIM=head_dim,
        WIDTH=plan.width,
        QUERIES=plan.block_m,
        KEYS=plan.block_n,
        WARPS=plan.num_warps,
        UNIT=unit,
        RAGGED=packed,
        TOP_LEFT=wanted.top_left,
        LEFT=wanted.left is not None,
        RIGHT=wanted.right is not None,
        SOFTCAP=wanted.softcap is not None,
        SINKS=sinks is not None,
        # Folding scale into the exponent takes the max before scaling: only a positive scale keeps its place.
        FOLD=wanted.scale > 0 and wanted.softcap is None,
        LSE=lse is not None,
        num_warps=plan.num_warps,
        # Copies element by element, through registers, would spill below.
        maxnreg=_most_registers(head_dim, plan.block_m) if unit == _PIECE else _ALL_REGISTERS,
    )


def _most_registers(head_dim: int, queries: int) -> int:
    tiles = (mma_tile(head_dim), mma_tile(head_dim, narrow=True))
    return next(tile.registers for tile in tiles if tile.queries == queries)


def _in_pieces(tensor: Tensor) -> bool:
    """Whether every row lies at a multiple of 16 bytes."""
    axes = zip(tensor.shape[:-1], tensor.stride(), strict=False)
    return tensor.data_ptr() % _PIECE_BYTES == 0 and all(n == 1 or step % _PIECE == 0 for n, step in axes)


def _steps(tensor: Tensor, unit: int) -> tuple[int, ...]:
    """Strides of (batch, head, row) in units; 0 for axes of one element, which may have any."""
    return tuple(0 if n == 1 else step // unit for n, step in zip(tensor.shape, tensor.stride(), strict=True))[:3]
