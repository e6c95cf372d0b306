"""Decode attention in Triton: split over the keys, query heads of one KV head in one tile.

Program (row, kv head, piece) attends the group's queries, padded to 16 rows for the tensor cores, to SPLIT keys read in
blocks of BLOCK_S, and stores (max, sum, unnormalised output) in float32. A second kernel merges a row's pieces in
order. Pieces have a fixed size and start at multiples of it, so a row's result depends on nothing but the row. Programs
past a row's length leave at once; the lengths are read on the device, so one captured graph serves every length the
cache holds. Roofline: the bytes of the keys and values, each read once per group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["decode_attention"]

# Keys a program: small enough that a 512-token context still spreads over tens of SMs.
SPLIT = 128
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
    BLOCK_S: tl.constexpr,
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
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for start in tl.static_range(0, SPLIT, BLOCK_S):
            key = begin + start + tl.arange(0, BLOCK_S)
            visible = (key < end) & (key >= first_visible)
            at = base + key[:, None].to(tl.int64) * stride_position + dim[None, :]
            mask = visible[:, None] & (dim < head_dim)[None, :]
            k = tl.load(k_ptr + at, mask=mask, other=0.0)
            v = tl.load(v_ptr + at, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            scores = tl.where(visible[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            # A block with no visible key leaves the running maximum at -inf; subtract 0 there so that exp2 gives 0, not
            # NaN.
            reference = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(scores - reference[:, None])
            keep = tl.exp2(top - reference)
            total = total * keep + tl.sum(weight, axis=1)
            acc = acc * keep[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            top = new_top
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
    pieces = triton.cdiv(capacity, SPLIT)
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
        SPLIT=SPLIT,
        BLOCK_S=64,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        num_warps=4,
    )
    merge_kernel[(rows, num_heads)](
        part, stats, seq_lens, out, pieces, head_dim, visible, SPLIT=SPLIT, BLOCK_D=block_d, num_warps=1
    )
    return out
