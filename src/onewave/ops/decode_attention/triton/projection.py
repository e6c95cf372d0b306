"""Reading the fused projection of masked multi-head attention: dequantised, biased, rotated, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


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
def _projected(loads, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Loaded elements of the fused projection in float32: dequantised, bias added."""
    value, scale, bias = loads
    result = value.to(tl.float32)
    if HAS_SCALE:
        result = result * scale.to(tl.float32)
    if HAS_BIAS:
        result = result + bias.to(tl.float32)
    return result


@triton.jit
def _rotation(dim, half, INTERLEAVED: tl.constexpr, IN_EIGHTS: tl.constexpr):
    """(whether a dimension turns, whether it is its pair's first, the pair's other one, the pair's number)."""
    turns = dim < 2 * half
    if INTERLEAVED:
        return turns, dim % 2 == 0, tl.where(turns, dim ^ 1, dim), dim // 2
    first = dim < half
    partner = tl.where(turns, tl.where(first, dim + half, dim - half), dim)
    angle = tl.where(first, dim, dim - half)
    if IN_EIGHTS:  # then eight neighbours turn with eight neighbours, and are loaded with them at once
        turns = tl.max_constancy(turns, [8])
        partner = tl.max_contiguous(tl.multiple_of(partner, [8]), [8])
        angle = tl.max_contiguous(tl.multiple_of(angle, [8]), [8])
    return turns, first, partner, angle


@triton.jit
def _rotated(own, other, first, cos, sin, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Projected elements after the rotary embedding, float32. other: of the pairs' other dimensions."""
    value, partner = _projected(own, HAS_BIAS, HAS_SCALE), _projected(other, HAS_BIAS, HAS_SCALE)
    return tl.fma(value, cos, tl.where(first, -partner, partner) * sin)  # which product is rounded is not left open


@triton.jit
def projected_row(loads, DTYPE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """(queries, new key, new value) from a fused row's loads: the first two rotated and of DTYPE, the last float32."""
    q, q_other, k, k_other, v, first, cos, sin = loads
    q = _rotated(q, q_other, first[None, :], cos[None, :], sin[None, :], HAS_BIAS, HAS_SCALE).to(DTYPE)
    k = _rotated(k, k_other, first, cos, sin, HAS_BIAS, HAS_SCALE).to(DTYPE)
    return q, k, _projected(v, HAS_BIAS, HAS_SCALE)


@triton.jit
def row_loads(
    q_ptr, qkv_ptr, bias_ptr, scale_ptr, rotary_ptr, row64, head, query, kv_head, dim, inside, in_head, num_heads,
    num_kv_heads, head_dim, half, stride_q_row, stride_q_head, stride_q_query, FUSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, INTERLEAVED: tl.constexpr, IN_EIGHTS: tl.constexpr,
):  # fmt: skip
    """What a row brings besides its keys: its queries, or with FUSED all that projected_row takes.

    The other dimension of an element's pair is read again, from L1. IN_EIGHTS: whether `half` is a
    multiple of 8 and pairs are halves apart.
    """
    if FUSED:
        turns, first, partner, angle = _rotation(dim, half, INTERLEAVED, IN_EIGHTS)
        # head_dim is a multiple of 8, and with it whatever begins a head.
        at = tl.multiple_of(row64 * (num_heads + 2 * num_kv_heads) * head_dim, 8)
        q_at = tl.multiple_of(head * head_dim, 8)[:, None]
        k_at = tl.multiple_of((num_heads + kv_head) * head_dim, 8)
        v_at = tl.multiple_of((num_heads + num_kv_heads + kv_head) * head_dim, 8)
        q = _loads(qkv_ptr, bias_ptr, scale_ptr, at, q_at, dim[None, :], inside, HAS_BIAS, HAS_SCALE)
        q_other = _loads(qkv_ptr, bias_ptr, scale_ptr, at, q_at, partner[None, :], inside, HAS_BIAS, HAS_SCALE)
        k = _loads(qkv_ptr, bias_ptr, scale_ptr, at, k_at, dim, in_head, HAS_BIAS, HAS_SCALE)
        k_other = _loads(qkv_ptr, bias_ptr, scale_ptr, at, k_at, partner, in_head, HAS_BIAS, HAS_SCALE)
        v = _loads(qkv_ptr, bias_ptr, scale_ptr, at, v_at, dim, in_head, HAS_BIAS, HAS_SCALE)
        if IN_EIGHTS:
            half = half // 8 * 8  # says so; a hint at an argument is lost
        angles = rotary_ptr + row64 * 2 * half + angle
        cos = tl.load(angles, mask=turns & in_head, other=1.0)
        sin = tl.load(angles + half, mask=turns & in_head, other=0.0)
        return q, q_other, k, k_other, v, first, cos, sin
    else:
        q_at = row64 * stride_q_row + head.to(tl.int64) * stride_q_head + query.to(tl.int64) * stride_q_query
        return tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=inside, other=0.0)
