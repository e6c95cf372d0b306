"""Attention in float8 on Hopper: turns the values, describes tensors to TMA, launches fp8_kernel_impl's kernel."""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportCallIssue=false
# (Triton ships no type information.)

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onewave.base.device import num_sms
from onewave.gpu.descriptors import describe
from onewave.gpu.launch import launch_kernel
from onewave.gpu.scratch import held, scratch
from onewave.ops.attention.fp8.kernel import fp8_kernel, turn_values
from onewave.ops.attention.fp8.plan import COLUMNS, FP8_TILE, KEYS, ROWS, WARPGROUPS, deal
from onewave.ops.attention.hopper.order import order_of
from onewave.ops.attention.masks import Options

_LOG2E = math.log2(math.e)
# A place plus a side stays inside 32 bits.
_MOST_KEYS = 1 << 30
_FLOAT_BYTES = 4


def attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    wanted: Options,
    *,
    sinks: Tensor | None = None,
    starts_q: Tensor | None = None,
    starts_k: Tensor | None = None,
    longest: int = _MOST_KEYS,
) -> None:
    """Write out (bf16 or fp16, like q) and lse (float32 [B, H, Sq]); what fp8_op has checked.

    q, k, v: float8_e4m3fn, head_dim up to 128. scales: of q [heads], k and v [kv_heads], float32. starts_q, starts_k:
    int32 [sequences + 1]; then batch is 1 everywhere, Sq, Sk count all tokens, and rows beyond the first `longest` of a
    sequence are not written. Takes Hkv * head_dim bytes of scratch a key, in whole tiles.
    """
    packed = starts_q is not None
    if q.numel() == 0:
        return
    batch, num_heads, num_queries, _ = q.shape
    kv_heads, num_keys, shift, first_key = k.shape[1], k.shape[2], 0, 0
    if not packed:
        shift = wanted.shift(num_queries, num_keys)
        if wanted.right is not None:
            num_keys = min(num_keys, num_queries + shift + wanted.right)
        if wanted.left is not None:
            first_key = min(max(0, shift - wanted.left), max(0, num_keys - 1))
    sequences = None if starts_q is None else starts_q.shape[0] - 1
    if num_keys <= 0 or sequences == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    v_tiles = -(-num_keys // KEYS) if sequences is None else num_keys // KEYS + sequences
    if not packed and wanted.left is not None:
        # Rows whose window begins beyond the last key have a tile of zeros there, and not another head's values.
        rows = ROWS * WARPGROUPS
        v_tiles = max(v_tiles, ((num_queries - 1) // rows * rows + shift - wanted.left) // KEYS + 1)
    flags = {
        "RAGGED": packed, "TOP_LEFT": wanted.top_left, "LEFT": wanted.left is not None,
        "RIGHT": wanted.right is not None,
    }  # fmt: skip
    left, right = (min(side or 0, _MOST_KEYS) for side in (wanted.left, wanted.right))
    steps = (sequences or 0).bit_length() + 1
    places = (starts_q, starts_k)
    with held(q.device):
        tiles = _turned(v, places, (num_keys, first_key, sequences or 0, steps, v_tiles, left, right), flags)
        plan = deal(
            heads=num_heads if packed else batch * num_heads, group=num_heads // kv_heads, num_queries=num_queries,
            num_keys=num_keys, wanted=wanted, shift=shift, sequences=sequences, processors=num_sms(q.device),
        )  # fmt: skip
        order, which, rounds = order_of(
            plan, q.device, wanted, num_queries=num_queries, num_keys=num_keys, shift=shift, starts_q=starts_q,
            starts_k=starts_k, longest=longest,
        )  # fmt: skip
        if not packed:
            k = k[:, :, first_key:num_keys]
        launch_kernel(
            fp8_kernel,
            (plan.programs,),
            describe(q, ROWS, COLUMNS, packed),
            describe(k, KEYS, COLUMNS, packed),
            tiles,
            describe(out, ROWS, COLUMNS, packed),
            *scales,
            scales[0] if lse is None else lse,
            scales[0] if sinks is None else sinks,
            scales[0].view(torch.int32) if starts_q is None else starts_q,
            scales[0].view(torch.int32) if starts_k is None else starts_k,
            scales[0].view(torch.int32) if order is None else order,
            v_tiles,
            0 if lse is None else lse.stride(0),
            0 if lse is None else lse.stride(1),
            num_heads,
            num_heads // kv_heads,
            plan.section,
            min(longest, num_queries),
            num_keys,
            first_key,
            sequences or 0,
            steps,
            plan.slots,
            plan.slots * plan.heads,
            rounds,
            shift,
            left,
            right,
            wanted.scale * _LOG2E,
            2 * _LOG2E * wanted.scale / (wanted.softcap or 1.0),
            _LOG2E * (wanted.softcap or 1.0),
            ORDER=which,
            SOFTCAP=wanted.softcap is not None,
            SINKS=sinks is not None,
            LSE=lse is not None,
            num_warps=4,
            **FP8_TILE,
            **flags,
        )


def _turned(
    v: Tensor, starts: tuple[Tensor | None, Tensor | None], sizes: tuple[int, ...], flags: dict[str, bool]
) -> TensorDescriptor:
    """Launch turn_values; the descriptor of what it writes. sizes: its arguments from num_keys to right."""
    batch, kv_heads, _, head_dim = v.shape
    v_tiles = sizes[4]
    rows = batch * kv_heads * v_tiles * COLUMNS
    turned = scratch(v.device, rows * KEYS // _FLOAT_BYTES, "turned values").view(torch.uint8)
    values = v.view(torch.uint8)
    launch_kernel(
        turn_values, (batch * v_tiles, kv_heads),
        values, turned, *(values if each is None else each for each in starts), *v.stride()[:3], *sizes,
        head_dim=head_dim, D=COLUMNS, BN=KEYS, num_warps=4, **flags,
    )  # fmt: skip
    tiles = turned[: rows * KEYS].view(torch.float8_e4m3fn).view(rows, KEYS)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor(tiles, [rows, KEYS], [KEYS, 1], [COLUMNS, KEYS], layout)
