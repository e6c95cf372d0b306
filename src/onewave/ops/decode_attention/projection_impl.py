"""Reading the fused projection of masked multi-head attention: dequantised, biased, rotated, in Triton."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# (Triton ships no type information.)

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["projected", "rotated"]


@triton.jit
def projected(
    qkv_ptr, bias_ptr, scale_ptr, row_at, head, dim, inside, head_dim, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr
):
    """Elements of the fused projection in float32: dequantised, bias added. head, dim and inside broadcast."""
    at = head * head_dim + dim
    value = tl.load(qkv_ptr + row_at + at, mask=inside, other=0).to(tl.float32)
    if HAS_SCALE:
        value = value * tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value = value + tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def rotated(
    qkv_ptr,
    bias_ptr,
    scale_ptr,
    rotary_ptr,
    row_at,
    row,
    head,
    dim,
    inside,
    head_dim,
    half,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Projected elements after the rotary embedding, float32. The partner is read again, from L1."""
    turns = dim < 2 * half
    if INTERLEAVED:
        first = dim % 2 == 0
        partner = tl.where(turns, dim ^ 1, dim)
        angle = dim // 2
    else:
        first = dim < half
        partner = tl.where(turns, tl.where(first, dim + half, dim - half), dim)
        angle = tl.where(first, dim, dim - half)
    value = projected(qkv_ptr, bias_ptr, scale_ptr, row_at, head, dim, inside, head_dim, HAS_BIAS, HAS_SCALE)
    other = projected(qkv_ptr, bias_ptr, scale_ptr, row_at, head, partner, inside, head_dim, HAS_BIAS, HAS_SCALE)
    angles = rotary_ptr + row.to(tl.int64) * 2 * half + angle
    cos = tl.load(angles, mask=turns & inside, other=1.0)
    sin = tl.load(angles + half, mask=turns & inside, other=0.0)
    return value * cos + tl.where(first, -other, other) * sin
