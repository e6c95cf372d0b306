"""Reading the fused projection of masked multi-head attention: dequantised, biased, rotated, in Triton."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# (Triton ships no type information.)

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["projected", "rotated", "row_loads"]


@triton.jit
def _loads(qkv_ptr, bias_ptr, scale_ptr, row_at, head_at, dim, inside, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """(elements of the fused projection, their scales, their biases) as stored. head_at: where a head begins in a row;
    it, dim and inside broadcast."""
    at = head_at + dim
    value = tl.load(qkv_ptr + row_at + at, mask=inside, other=0)
    scale, bias = value, value
    if HAS_SCALE:
        scale = tl.load(scale_ptr + at, mask=inside, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0)
    return value, scale, bias


@triton.jit
def projected(value, scale, bias, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Loaded elements of the fused projection in float32: dequantised, bias added."""
    result = value.to(tl.float32)
    if HAS_SCALE:
        result = result * scale.to(tl.float32)
    if HAS_BIAS:
        result = result + bias.to(tl.float32)
    return result


@triton.jit
def _rotation(dim, half, INTERLEAVED: tl.constexpr):
    """(whether a dimension is its pair's first, the other one of the pair, the pair's number)."""
    turns = dim < 2 * half
    if INTERLEAVED:
        return dim % 2 == 0, tl.where(turns, dim ^ 1, dim), dim // 2
    first = dim < half
    partner = tl.where(turns, tl.where(first, dim + half, dim - half), dim)
    return first, partner, tl.where(first, dim, dim - half)


@triton.jit
def _rotated_loads(
    qkv_ptr, bias_ptr, scale_ptr, rotary_ptr, row_at, row64, head_at, dim, inside, half, HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """All that `rotated` needs. The partner of an element is read again, from L1."""
    _, partner, angle = _rotation(dim, half, INTERLEAVED)
    own = _loads(qkv_ptr, bias_ptr, scale_ptr, row_at, head_at, dim, inside, HAS_BIAS, HAS_SCALE)
    other = _loads(qkv_ptr, bias_ptr, scale_ptr, row_at, head_at, partner, inside, HAS_BIAS, HAS_SCALE)
    turns, angles = (dim < 2 * half) & inside, rotary_ptr + row64 * 2 * half + angle
    return own, other, tl.load(angles, mask=turns, other=1.0), tl.load(angles + half, mask=turns, other=0.0)


@triton.jit
def rotated(
    loads, dim, half, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Projected elements after the rotary embedding, float32."""
    own, other, cos, sin = loads
    first, _, _ = _rotation(dim, half, INTERLEAVED)
    value = projected(own[0], own[1], own[2], HAS_BIAS, HAS_SCALE)
    partner = projected(other[0], other[1], other[2], HAS_BIAS, HAS_SCALE)
    return tl.fma(value, cos, tl.where(first, -partner, partner) * sin)  # which product is rounded is not left open


@triton.jit
def row_loads(
    q_ptr, qkv_ptr, bias_ptr, scale_ptr, rotary_ptr, row64, head, query, kv_head, dim, inside, in_head, num_heads,
    num_kv_heads, head_dim, half, stride_q_row, stride_q_head, stride_q_query, FUSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """What a row brings besides its keys: (query, -, -), or with FUSED the loads of query, new key and new value."""
    if FUSED:
        # head_dim is a multiple of 8, and with it whatever begins a head.
        at = tl.multiple_of(row64 * (num_heads + 2 * num_kv_heads) * head_dim, 8)
        q_at = tl.multiple_of(head * head_dim, 8)[:, None]
        k_at = tl.multiple_of((num_heads + kv_head) * head_dim, 8)
        v_at = tl.multiple_of((num_heads + num_kv_heads + kv_head) * head_dim, 8)
        q = _rotated_loads(
            qkv_ptr, bias_ptr, scale_ptr, rotary_ptr, at, row64, q_at, dim[None, :], inside, half,
            HAS_BIAS, HAS_SCALE, INTERLEAVED,
        )  # fmt: skip
        k = _rotated_loads(
            qkv_ptr, bias_ptr, scale_ptr, rotary_ptr, at, row64, k_at, dim, in_head, half,
            HAS_BIAS, HAS_SCALE, INTERLEAVED,
        )  # fmt: skip
        v = _loads(qkv_ptr, bias_ptr, scale_ptr, at, v_at, dim, in_head, HAS_BIAS, HAS_SCALE)
        return q, k, v
    else:  # noqa: RET505 - one of the two is compiled
        q_at = row64 * stride_q_row + head.to(tl.int64) * stride_q_head + query * stride_q_query
        q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=inside, other=0.0)
        return q, 0, 0
