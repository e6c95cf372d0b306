"""Attention on Hopper: describes tensors to TMA, launches gluon_kernel_impl's kernel as gluon_plan deals its tiles."""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false
# (Triton ships no type information.)

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from onewave.base.device import num_sms
from onewave.gpu.descriptors import RAGGED_ANY, describe, describe_pages
from onewave.gpu.launch import launch_kernel
from onewave.gpu.scratch import held
from onewave.ops.attention.hopper.kernel import attention_kernel
from onewave.ops.attention.hopper.order import order_of
from onewave.ops.attention.hopper.plan import columns_of, config, knows_limit, schedule
from onewave.ops.attention.masks import Options

_LOG2E = math.log2(math.e)
_ALIGNED_BYTES = 16
_MOST_STRIDE = 1 << 39
# A place plus a side stays inside 32 bits.
_MOST_KEYS = 1 << 30
# Exponents of two that P may reach before its row is rescaled. float16 ends at 2^16; with bf16, P, sums and P V stay
# within float32 for any |v| below 2^60 (and begin below 1: gluon_softmax_impl).
_HEADROOM = {torch.float16: 12, torch.bfloat16: 40}


def undescribable(*tensors: Tensor, pages: tuple[Tensor, ...] = ()) -> str | None:
    """Why TMA can't address one of the tensors, None if it can all. pages: [pages, page_size, kv_heads, head_dim]."""
    for tensor in pages:
        page, row = tensor.stride()[:2]
        if len(tensor) > 1 and (row == 0 or page % row or len(tensor) * (page // row) >= RAGGED_ANY):
            return f"a page's stride must be a multiple of a row's, not strides {tuple(tensor.stride())}"
    for tensor in (*tensors, *pages):
        rows = _rows_lie_apart(tensor.shape, tensor.stride(), tensor.element_size())
        if tensor.numel() and (tensor.data_ptr() % _ALIGNED_BYTES or not rows):
            return f"rows must lie at multiples of 16 bytes and not be expanded, not strides {tuple(tensor.stride())}"
    return None


@lru_cache(maxsize=1024)
def _rows_lie_apart(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    """Whether all rows of a tensor with an aligned first one are aligned, and none is another."""
    steps = zip(shape[:-1], strides, strict=False)
    return all(n == 1 or (0 < step < _MOST_STRIDE and step * item_bytes % _ALIGNED_BYTES == 0) for n, step in steps)


def attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    wanted: Options,
    *,
    sinks: Tensor | None = None,
    starts_q: Tensor | None = None,
    starts_k: Tensor | None = None,
    longest: int = _MOST_KEYS,
    block_table: Tensor | None = None,
) -> None:
    """Write out (like q) and lse (float32 [B, H, Sq]); what op.attention has checked and gluon_plan does not refuse.

    starts_q, starts_k: int32 [sequences + 1]; then batch is 1 in q, k, v, out and lse, Sq, Sk count all tokens, and
    rows beyond the first `longest` of a sequence are not written. block_table: int32 [sequences, pages a sequence];
    then k and v are [pages, page_size, kv_heads, head_dim].
    """
    packed, paged = starts_q is not None, block_table is not None
    if q.numel() == 0:
        return
    batch, num_heads, num_queries, head_dim = q.shape
    num_keys, shift, first_key = k.shape[2], 0, 0
    if block_table is not None:
        num_keys = block_table.shape[1] * k.shape[1]
    if not packed:
        shift = wanted.shift(num_queries, num_keys)
        # Keys that no query sees may hold NaN: the descriptor leaves them out, and zeros stand in for them.
        if wanted.right is not None:
            num_keys = min(num_keys, num_queries + shift + wanted.right)
        if wanted.left is not None:
            first_key = min(max(0, shift - wanted.left), max(0, num_keys - 1))
    sequences = None if starts_q is None else starts_q.shape[0] - 1
    if packed and k.numel() == 0:
        # No memory to describe; no sequence has keys, so nothing is read.
        k = v = k.new_empty(1, *k.shape[1:]) if paged else q
    elif num_keys <= 0 or sequences == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    kv_heads = k.shape[2 if paged else 1]
    columns, group = columns_of(head_dim), num_heads // kv_heads
    constants = config(columns)
    plan_of_tiles = schedule(
        heads=num_heads if packed else batch * num_heads, group=group, num_queries=num_queries, num_keys=num_keys,
        columns=columns, processors=num_sms(q.device), shift=shift, left=wanted.left, right=wanted.right,
        sequences=sequences, queue=True,
    )  # fmt: skip
    # What sorts packed tiles leaves their order in the scratch.
    with held(q.device) if plan_of_tiles.order == "sorted" else nullcontext():
        order, which, rounds = order_of(
            plan_of_tiles, q.device, wanted, num_queries=num_queries, num_keys=num_keys, shift=shift,
            starts_q=starts_q, starts_k=starts_k, longest=longest, queue=True,
        )  # fmt: skip
        if not packed:
            k, v = (tensor[:, :, first_key:num_keys] for tensor in (k, v))
        page = k.shape[1] if paged else 0
        launch_kernel(
            attention_kernel,
            (plan_of_tiles.programs,),
            describe(q, 64, columns, packed),
            *(
                describe_pages(t, constants["BN"]) if paged else describe(t, constants["BN"], columns, packed)
                for t in (k, v)
            ),
            describe(out, 64, columns, packed),
            q if lse is None else lse,
            q if sinks is None else sinks,
            q if starts_q is None else starts_q,
            q if starts_k is None else starts_k,
            q if order is None else order,
            q if block_table is None else block_table,
            0 if block_table is None else block_table.stride(0),
            *((t.stride(0) // t.stride(1) if paged else 0) for t in (k, v)),
            0 if lse is None else lse.stride(0),
            0 if lse is None else lse.stride(1),
            num_heads,
            group,
            plan_of_tiles.section,
            min(longest, num_queries),
            num_keys,
            first_key,
            sequences or 0,
            (sequences or 0).bit_length() + 1,
            plan_of_tiles.slots,
            plan_of_tiles.slots * plan_of_tiles.heads,
            rounds,
            shift,
            min(wanted.left or 0, _MOST_KEYS),
            min(_MOST_KEYS if wanted.right is None else wanted.right, _MOST_KEYS),
            2,
            wanted.scale * _LOG2E,
            2 * _LOG2E * wanted.scale / (wanted.softcap or 1.0),
            _LOG2E * (wanted.softcap or 1.0),
            D=columns,
            HEADROOM=_HEADROOM[q.dtype],
            ORDER=which,
            PAGE=page,
            RAGGED=packed,
            TOP_LEFT=wanted.top_left,
            LEFT=wanted.left is not None,
            RIGHT=wanted.right is not None or knows_limit(columns, packed=packed),
            SOFTCAP=wanted.softcap is not None,
            SINKS=sinks is not None,
            LSE=lse is not None,
            num_warps=4,
            **constants,
        )
