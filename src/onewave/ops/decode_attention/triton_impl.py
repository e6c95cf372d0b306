"""Decode attention in Triton: split over the keys, query heads of one KV head in one tile.

Program (row, kv head, piece) attends the group's queries, padded to 16 rows for the tensor cores, to a piece of SPLIT
keys held in one tile: all its loads are in flight at once, and one maximum and one sum finish the softmax. It stores
(max, sum, unnormalised output) in float32; a second kernel merges a row's pieces in order.
Pieces have a fixed size and start at multiples of it, so a row's result depends on nothing but the row. Programs past a
row's length leave at once; the lengths are read on the device, so one captured graph serves every length the cache
holds. Roofline: the bytes of the keys and values, each read once per group.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportCallIssue=false, reportArgumentType=false
# (Triton ships no type information.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["decode_attention"]

_LOG2E = 1.4426950408889634


@triton.jit
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    seq_lens_ptr,
    part_ptr,
    stats_ptr,
    stride_slot,
    stride_head,
    stride_position,
    group,
    head_dim,
    window,
    scale_log2,
    SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, kv_head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_pieces = tl.num_programs(1), tl.num_programs(2)
    length = tl.load(seq_lens_ptr + row)
    first_visible = tl.maximum(length - window, 0)
    begin = piece * SPLIT
    end = tl.minimum(begin + SPLIT, length)
    if (begin < length) & (end > first_visible):
        member, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        head = kv_head * group + member
        q_at = q_ptr + (row * num_kv_heads * group + head)[:, None].to(tl.int64) * head_dim + dim[None, :]
        q = tl.load(q_at, mask=(member < group)[:, None] & (dim < head_dim)[None, :], other=0.0)
        base = tl.load(slots_ptr + row) * stride_slot + kv_head.to(tl.int64) * stride_head
        key = begin + tl.arange(0, SPLIT)
        visible = (key < end) & (key >= first_visible)
        at = base + key[:, None].to(tl.int64) * stride_position + dim[None, :]
        mask = visible[:, None] & (dim < head_dim)[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(visible[None, :], scores, float("-inf"))
        # At least one key of this piece is visible, so the maximum is finite.
        top = tl.max(scores, axis=1)
        weight = tl.exp2(scores - top[:, None])
        total = tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        slot = ((row * num_kv_heads * group + head) * num_pieces + piece).to(tl.int64)
        tl.store(stats_ptr + slot * 2, top, mask=member < group)
        tl.store(stats_ptr + slot * 2 + 1, total, mask=member < group)
        tl.store(part_ptr + slot[:, None] * BLOCK_D + dim[None, :], acc, mask=(member < group)[:, None])


@triton.jit
def merge_kernel(
    part_ptr, stats_ptr, seq_lens_ptr, out_ptr, num_pieces, head_dim, window, SPLIT: tl.constexpr, BLOCK_D: tl.constexpr
):
    row, head = tl.program_id(0), tl.program_id(1)
    index = (row * tl.num_programs(1) + head).to(tl.int64)
    length = tl.load(seq_lens_ptr + row)
    dim = tl.arange(0, BLOCK_D)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    first = tl.maximum(length - window, 0) // SPLIT
    for piece in range(first, (length + SPLIT - 1) // SPLIT):
        at = index * num_pieces + piece
        piece_top = tl.load(stats_ptr + at * 2)
        new_top = tl.maximum(top, piece_top)
        keep, weight = tl.exp2(top - new_top), tl.exp2(piece_top - new_top)
        total = total * keep + tl.load(stats_ptr + at * 2 + 1) * weight
        acc = acc * keep + tl.load(part_ptr + at * BLOCK_D + dim) * weight
        top = new_top
    tl.store(out_ptr + index * head_dim + dim, (acc / total).to(out_ptr.dtype.element_ty), mask=dim < head_dim)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    *,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """See op.decode_attention."""
    rows, num_heads, head_dim = q.shape
    num_kv_heads, capacity = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Keys a program: few enough that a short context spreads over the card and a tile fits in shared memory.
    split = 128 if block_d <= 128 else 64
    pieces = triton.cdiv(capacity, split)
    q = q.contiguous()
    out = torch.empty_like(q)
    part = torch.empty((rows, num_heads, pieces, block_d), dtype=torch.float32, device=q.device)
    stats = torch.empty((rows, num_heads, pieces, 2), dtype=torch.float32, device=q.device)
    scale_log2 = (head_dim**-0.5 if scale is None else scale) * _LOG2E
    visible = capacity if window is None else window
    decode_attention_kernel[(rows, num_kv_heads, pieces)](
        q,
        k_cache,
        v_cache,
        slots,
        seq_lens,
        part,
        stats,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        group,
        head_dim,
        visible,
        scale_log2,
        SPLIT=split,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        num_warps=4,
    )
    merge_kernel[(rows, num_heads)](
        part, stats, seq_lens, out, pieces, head_dim, visible, SPLIT=split, BLOCK_D=block_d, num_warps=1
    )
    return out
