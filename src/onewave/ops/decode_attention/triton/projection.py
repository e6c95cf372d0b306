"""Reading the fused projection of masked multi-head attention: dequantised, biased, rotated, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _loads(row_at, head_at, dim, inside, c):
    """(elements of the fused projection, their scales, their biases) as stored. head_at: where a head begins in a row;
    it, dim and inside broadcast."""
    at = head_at + dim
    value = tl.load(c.qkv + row_at + at, mask=inside, other=0)
    scale, bias = value, value
    if c.HAS_QKV_SCALE:
        scale = tl.load(c.qkv_scale + at, mask=inside, other=0.0)
    if c.HAS_BIAS:
        bias = tl.load(c.bias + at, mask=inside, other=0.0)
    return value, scale, bias


@triton.jit
def _projected(loads, c):
    """Loaded elements of the fused projection in float32: dequantised, bias added."""
    value, scale, bias = loads
    result = value.to(tl.float32)
    if c.HAS_QKV_SCALE:
        result = result * scale.to(tl.float32)
    if c.HAS_BIAS:
        result = result + bias.to(tl.float32)
    return result


@triton.jit
def _rotation(dim, c):
    """(whether a dimension turns, whether it is its pair's first, the pair's other one, the pair's number)."""
    half = c.half
    turns = dim < 2 * half
    if c.INTERLEAVED:
        return turns, dim % 2 == 0, tl.where(turns, dim ^ 1, dim), dim // 2
    first = dim < half
    partner = tl.where(turns, tl.where(first, dim + half, dim - half), dim)
    angle = tl.where(first, dim, dim - half)
    if c.IN_EIGHTS:  # then eight neighbours turn with eight neighbours, and are loaded with them at once
        turns = tl.max_constancy(turns, [8])
        partner = tl.max_contiguous(tl.multiple_of(partner, [8]), [8])
        angle = tl.max_contiguous(tl.multiple_of(angle, [8]), [8])
    return turns, first, partner, angle


@triton.jit
def _rotated(own, other, first, cos, sin, c):
    """Projected elements after the rotary embedding, float32. other: of the pairs' other dimensions."""
    value, partner = _projected(own, c), _projected(other, c)
    return tl.fma(value, cos, tl.where(first, -partner, partner) * sin)  # which product is rounded is not left open


@triton.jit
def projected_row(loads, DTYPE: tl.constexpr, c):
    """(queries, new key, new value) from a fused row's loads: the first two rotated and of DTYPE, the last float32."""
    q, q_other, k, k_other, v, first, cos, sin = loads
    q = _rotated(q, q_other, first[None, :], cos[None, :], sin[None, :], c).to(DTYPE)
    k = _rotated(k, k_other, first, cos, sin, c).to(DTYPE)
    return q, k, _projected(v, c)


@triton.jit
def row_loads(row64, head, query, kv_head, dim, inside, in_head, head_dim, c):
    """Load a row's values besides its keys: its queries, or with FUSED all that projected_row takes. c: the Call.

    The other dimension of an element's pair is read again, from L1.
    """
    if c.FUSED:
        turns, first, partner, angle = _rotation(dim, c)
        # head_dim is a multiple of 8, and with it whatever begins a head.
        at = tl.multiple_of(row64 * (c.num_heads + 2 * c.num_kv_heads) * head_dim, 8)
        q_at = tl.multiple_of(head * head_dim, 8)[:, None]
        k_at = tl.multiple_of((c.num_heads + kv_head) * head_dim, 8)
        v_at = tl.multiple_of((c.num_heads + c.num_kv_heads + kv_head) * head_dim, 8)
        q = _loads(at, q_at, dim[None, :], inside, c)
        q_other = _loads(at, q_at, partner[None, :], inside, c)
        k = _loads(at, k_at, dim, in_head, c)
        k_other = _loads(at, k_at, partner, in_head, c)
        v = _loads(at, v_at, dim, in_head, c)
        half = c.half
        if c.IN_EIGHTS:
            half = half // 8 * 8  # says so; a hint at an argument is lost
        angles = c.rotary + row64 * 2 * half + angle
        cos = tl.load(angles, mask=turns & in_head, other=1.0)
        sin = tl.load(angles + half, mask=turns & in_head, other=0.0)
        return q, q_other, k, k_other, v, first, cos, sin
    else:
        q_at = row64 * c.stride_q_row + head.to(tl.int64) * c.stride_q_head + query.to(tl.int64) * c.stride_q_query
        return tl.load(c.q + q_at[:, None] + dim[None, :], mask=inside, other=0.0)
