"""merge_attention in Triton: one pass over the partial results.

A program takes a few consecutive queries of one head and walks over the parts in their order, keeping the largest LSE
so far, the sum of weights and the weighted sum of outputs in registers (float32), rescaled when the largest grows.
Parts come as a short tuple of tensors, each of which may hold several along its first axis: a list of tensors is a
tuple of ones, a stacked tensor one tuple entry. So neither needs a copy. Bound: memory, each partial read once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.launch import launch_kernel
from onewave.ops.merge_attention.call import MergeCall
from onewave.ops.merge_attention.choose import MergeChoice

MAX_TENSORS = 8
"""A longer list is stacked first: each number of tensors is a kernel of its own."""


@triton.jit
def merge_kernel(
    out_ptrs, lse_ptrs, out_strides, lse_strides, result_ptr, result_lse_ptr, num_stacked, num_heads, num_queries,
    HEAD_DIM: tl.constexpr, TENSORS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Rows are counted in one 64-bit axis of the grid: the others end at 65,535.
    blocks = tl.cdiv(num_queries, BLOCK_S)
    program = tl.program_id(0)
    query = (program % blocks) * BLOCK_S + tl.arange(0, BLOCK_S).to(tl.int64)
    head_of_all = (program // blocks).to(tl.int64)
    batch, head = head_of_all // num_heads, head_of_all % num_heads
    column = tl.arange(0, BLOCK_D)
    inside = query < num_queries
    best = tl.full([BLOCK_S], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for t in tl.static_range(TENSORS):
        so, sl = out_strides[t], lse_strides[t]
        out_at = out_ptrs[t] + batch * so[1] + head * so[2] + query[:, None] * so[3] + column[None, :]
        lse_at = lse_ptrs[t] + batch * sl[1] + head * sl[2] + query * sl[3]
        for _ in range(num_stacked):
            lse = tl.load(lse_at, mask=inside, other=float("-inf"))
            # A part without keys is not even read: it may hold NaN.
            taken = lse != float("-inf")
            out = tl.load(out_at, mask=taken[:, None] & (column < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
            higher = tl.maximum(best, lse)
            reference = tl.where(higher == float("-inf"), 0.0, higher)
            kept, weight = tl.exp(best - reference), tl.exp(lse - reference)
            total = total * kept + weight
            acc = acc * kept[:, None] + weight[:, None] * out
            best = higher
            out_at += so[0]
            lse_at += sl[0]
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    row = head_of_all * num_queries + query
    result_at = result_ptr + row[:, None] * HEAD_DIM + column[None, :]
    tl.store(result_at, acc.to(result_ptr.dtype.element_ty), mask=inside[:, None] & (column < HEAD_DIM)[None, :])
    merged = tl.where(empty, float("-inf"), best + tl.log(tl.where(empty, 1.0, total)))
    tl.store(result_lse_ptr + row, merged, mask=inside)


def run(call: MergeCall, choice: MergeChoice) -> tuple[Tensor, Tensor]:
    """Launch the kernel; return (out, lse)."""
    # [parts, batch, heads, S, D]: the axes before heads become one, those that are missing one of length 1.
    outs = [_five_axes(out) for out in call.outs]
    lses = [_five_axes(lse[..., None])[..., 0] for lse in call.lses]
    if len(outs) > MAX_TENSORS:
        outs, lses = [torch.cat(outs)], [torch.cat(lses)]
    num_stacked, _, heads, queries, head_dim = outs[0].shape
    shape = call.first.shape[1:]
    result = torch.empty(shape, dtype=call.first.dtype, device=call.first.device)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=call.first.device)
    if lse.numel() == 0:
        return result, lse
    launch_kernel(
        merge_kernel, (choice.num_programs,),
        tuple(outs), tuple(lses), tuple(out.stride() for out in outs), tuple(lse.stride() for lse in lses),
        result, lse, num_stacked, heads, queries,
        HEAD_DIM=head_dim, TENSORS=len(outs), BLOCK_S=choice.block_s, BLOCK_D=choice.block_d,
        num_warps=choice.num_warps,
    )  # fmt: skip
    return result, lse


def _five_axes(tensor: Tensor) -> Tensor:
    parts, *batch, queries, head_dim = tensor.shape
    heads = batch.pop() if batch else 1
    return tensor.reshape(parts, math.prod(batch), heads, queries, head_dim)
