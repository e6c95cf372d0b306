"""append_kv in Triton: one program a (token, head).

Heads are numbered as they lie in qkv: queries, keys, values. A program holds one head in registers; each element's
rotary partner is loaded a second time from L1 instead of being shuffled across threads.
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

__all__ = ["append_kv"]


@triton.jit
def _head(qkv_ptr, bias_ptr, norm_ptr, index, eps, head_dim, inside, HAS_BIAS: tl.constexpr, NORM: tl.constexpr):
    """Elements `index` (all of the head's) after bias and norm: float32 that holds values of qkv's dtype."""
    x = tl.load(qkv_ptr + index, mask=inside, other=0.0)
    if HAS_BIAS:
        x = (x.to(tl.float32) + tl.load(bias_ptr + index, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    value = x.to(tl.float32)
    if NORM:
        unit = (value * tl.rsqrt(tl.sum(value * value, axis=0) / head_dim + eps)).to(x.dtype).to(tl.float32)
        value = (unit * tl.load(norm_ptr + index, mask=inside, other=0.0).to(tl.float32)).to(x.dtype).to(tl.float32)
    return value


@triton.jit
def append_kv_kernel(
    qkv_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    rotary_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    positions_ptr,
    stride_slot,
    stride_head,
    stride_position,
    num_heads,
    num_kv_heads,
    head_dim,
    half,
    eps,
    HAS_BIAS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    column = tl.arange(0, BLOCK)
    inside = column < head_dim
    source, bias = qkv_ptr + token * width + head * head_dim, bias_ptr + head * head_dim
    cache_row = tl.load(slots_ptr + token) * stride_slot + tl.load(positions_ptr + token) * stride_position
    if head >= num_heads + num_kv_heads:
        value = _head(source, bias, bias, column, eps, head_dim, inside, HAS_BIAS, False)
        target = v_ptr + cache_row + (head - num_heads - num_kv_heads) * stride_head
        tl.store(target + column, value.to(v_ptr.dtype.element_ty), mask=inside)
    else:
        # The element half a rotation away; elements past the rotary part are their own partner and do not turn.
        turns = column < 2 * half
        partner = tl.where(turns, tl.where(column < half, column + half, column - half), column)
        if head < num_heads:
            value = _head(source, bias, q_norm_ptr, column, eps, head_dim, inside, HAS_BIAS, Q_NORM)
            other = _head(source, bias, q_norm_ptr, partner, eps, head_dim, inside, HAS_BIAS, Q_NORM)
        else:
            value = _head(source, bias, k_norm_ptr, column, eps, head_dim, inside, HAS_BIAS, K_NORM)
            other = _head(source, bias, k_norm_ptr, partner, eps, head_dim, inside, HAS_BIAS, K_NORM)
        angle = rotary_ptr + token * 2 * half + tl.where(column < half, column, column - half)
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + half, mask=turns, other=0.0)
        turned = value * cos + tl.where(column < half, -other, other) * sin
        if head < num_heads:
            target = q_ptr + (token * num_heads + head) * head_dim
        else:
            target = k_ptr + cache_row + (head - num_heads) * stride_head
        tl.store(target + column, turned.to(q_ptr.dtype.element_ty), mask=inside)


def append_kv(
    qkv: Tensor,
    rotary: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """See op.append_kv."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    tokens = qkv.shape[0]
    q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1
    append_kv_kernel[(tokens, num_heads + 2 * num_kv_heads)](
        qkv.contiguous(),
        qkv if bias is None else bias,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        rotary.contiguous(),
        q,
        k_cache,
        v_cache,
        slots,
        positions,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        num_heads,
        num_kv_heads,
        head_dim,
        rotary.shape[1] // 2,
        eps,
        HAS_BIAS=bias is not None,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return q
