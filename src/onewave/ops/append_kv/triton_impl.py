"""append_kv in Triton: everything in one pass over qkv.

Heads are numbered as they lie in qkv: queries, keys, values. `append_kv_kernel`: a program a (block of TOKENS tokens,
head); it holds one head in registers, and each element's rotary partner is loaded a second time from L1 instead of
being shuffled across threads. A head's norm sums over its elements in an order that the block's layout decides, so with
norms a block is one token, and a token's bits depend on it alone.
`append_halves_kernel` takes most models' prompts: heads of two halves that turn into each other, without norms. A
program has HEADS heads of a block of tokens, all of q, of k or of v, and holds the tokens' cosines and sines; halves
are tiles of contiguous elements, each read once, and all are under way before the first is turned. An element is
computed in the same order. Roofline of both: the bytes of qkv, read once, and of q, k and v, written once.

constexpr    meaning [unit] (allowed values)
HAS_..       whether there is a bias, scales of k and of v (False, True)
Q_NORM       whether queries are normalised (False, True); K_NORM: keys
INTERLEAVED  whether rotary pairs are neighbours, or halves apart (True, False)
PAGED        whether a block table says where a token goes (False, True)
KIND         how a number becomes the cache's (0: as it is, 1: int8, 2: float8_e4m3fn)
CHUNK        elements of a key that lie together (head_dim, or the packed layout's x)
BLOCK        head_dim, padded to a power of two
HALF         half of head_dim (powers of two)
PDL          whether launches overlap (programmatic dependent launch; False, True)
AXIS         the grid's axis of blocks of tokens (gpu/grid.py)
TOKENS       tokens of a program (1 with a norm, powers of two)
HEADS        heads of a program (1, 2, 4; divides the KV heads)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.dependent_launch import after_last, dependent_launch
from onewave.gpu.grid import grid_of
from onewave.gpu.launch import launch_kernel
from onewave.ops.append_kv.call import AppendCall
from onewave.ops.append_kv.choose import AppendChoice

# How a number becomes the cache's: as it is, int8, float8_e4m3fn.
_CAST, _INT8, _FLOAT8 = 0, 1, 2


@triton.jit
def _head(qkv_ptr, bias_ptr, norm_ptr, index, eps, head_dim, inside, HAS_BIAS: tl.constexpr, NORM: tl.constexpr):
    """Elements `index` (all of the head's) after bias and norm: float32 that holds values of qkv's dtype."""
    x = tl.load(qkv_ptr + index, mask=inside, other=0.0)
    if HAS_BIAS:
        x = (x.to(tl.float32) + tl.load(bias_ptr + index, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    value = x.to(tl.float32)
    if NORM:
        unit = (value * tl.rsqrt(tl.sum(value * value, axis=1)[:, None] / head_dim + eps)).to(x.dtype).to(tl.float32)
        value = (unit * tl.load(norm_ptr + index, mask=inside, other=0.0).to(tl.float32)).to(x.dtype).to(tl.float32)
    return value


@triton.jit
def _stored(value, scale_ptr, head, HAS_SCALE: tl.constexpr, KIND: tl.constexpr):
    """float32 numbers as they go into the cache, except for the cast."""
    if KIND > 0 and HAS_SCALE:
        value = tl.div_rn(value, tl.load(scale_ptr + head))
    if KIND == 1:
        # Within the bounds, adding and taking away 1.5 * 2^23 rounds half to even.
        value = (tl.minimum(tl.maximum(value, -128.0), 127.0) + 12582912.0) - 12582912.0
    if KIND == 2:
        value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return value


# Tables are as wide as their longest sequence: any number of blocks is one kernel.
@triton.jit(do_not_specialize=["stride_table"])
def append_kv_kernel(
    qkv_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, rotary_ptr, q_ptr, k_ptr, v_ptr, slots_ptr, positions_ptr, table_ptr,
    k_scale_ptr, v_scale_ptr, stride_k_block, stride_k_head, stride_k_key, stride_k_chunk, stride_v_block,
    stride_v_head, stride_v_key, stride_table, block_size, num_tokens, num_heads, num_kv_heads, head_dim, half, eps,
    HAS_BIAS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, INTERLEAVED: tl.constexpr, PAGED: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, KIND: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, AXIS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """half: 0 without rotation."""
    after_last(PDL)
    head = tl.program_id(1 - AXIS)
    token = tl.program_id(AXIS).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    column = tl.arange(0, BLOCK)[None, :]
    real = token < num_tokens
    inside = (column < head_dim) & real
    source, bias = qkv_ptr + token * width + head * head_dim, bias_ptr + head * head_dim
    stored = tl.load(positions_ptr + token, mask=real, other=-1).to(tl.int64)
    written = inside & (stored >= 0)
    position = tl.maximum(stored, 0)
    block = tl.load(slots_ptr + token, mask=real, other=0).to(tl.int64)
    if PAGED:
        # A token that is not stored may have no row in the table either.
        at = table_ptr + block * stride_table + position // block_size
        block = tl.load(at, mask=stored >= 0, other=0).to(tl.int64)
        position = position % block_size
    if head >= num_heads + num_kv_heads:
        value = _head(source, bias, bias, column, eps, head_dim, inside, HAS_BIAS, False)
        kv_head = (head - num_heads - num_kv_heads).to(tl.int64)
        target = v_ptr + block * stride_v_block + kv_head * stride_v_head + position * stride_v_key
        value = _stored(value, v_scale_ptr, kv_head, HAS_V_SCALE, KIND)
        tl.store(target + column, value.to(v_ptr.dtype.element_ty), mask=written)
    else:
        # The element half a rotation away; elements past the rotary part are their own partner and do not turn.
        turns = (column < 2 * half) & real
        if INTERLEAVED:
            first = column % 2 == 0
            partner = tl.where(turns, column ^ 1, column)
            angle = column // 2
        else:
            first = column < half
            partner = tl.where(turns, tl.where(first, column + half, column - half), column)
            angle = tl.where(first, column, column - half)
        if head < num_heads:
            value = _head(source, bias, q_norm_ptr, column, eps, head_dim, inside, HAS_BIAS, Q_NORM)
            other = _head(source, bias, q_norm_ptr, partner, eps, head_dim, inside, HAS_BIAS, Q_NORM)
        else:
            value = _head(source, bias, k_norm_ptr, column, eps, head_dim, inside, HAS_BIAS, K_NORM)
            other = _head(source, bias, k_norm_ptr, partner, eps, head_dim, inside, HAS_BIAS, K_NORM)
        angles = rotary_ptr + token * 2 * half + angle
        cos = tl.load(angles, mask=turns, other=1.0)
        sin = tl.load(angles + half, mask=turns, other=0.0)
        turned = value * cos + tl.where(first, -other, other) * sin
        if head < num_heads:
            tl.store(
                q_ptr + (token * num_heads + head) * head_dim + column, turned.to(q_ptr.dtype.element_ty), mask=inside
            )
        else:
            kv_head = (head - num_heads).to(tl.int64)
            target = k_ptr + block * stride_k_block + kv_head * stride_k_head + position * stride_k_key
            target += (column // CHUNK).to(tl.int64) * stride_k_chunk + column % CHUNK
            turned = _stored(turned, k_scale_ptr, kv_head, HAS_K_SCALE, KIND)
            tl.store(target, turned.to(k_ptr.dtype.element_ty), mask=written)


@triton.jit
def _halves(source, bias, inside, HAS_BIAS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Both halves of HEADS heads, as _head gives them."""
    low, high = (), ()
    for at in tl.static_range(HEADS):
        begin = at * 2 * HALF
        low = low + (_head(source, bias, bias, begin, 0.0, HALF, inside, HAS_BIAS, False),)
        high = high + (_head(source, bias, bias, begin + HALF, 0.0, HALF, inside, HAS_BIAS, False),)
    return low, high


@triton.jit(do_not_specialize=["stride_table"])
def append_halves_kernel(
    qkv_ptr, bias_ptr, rotary_ptr, q_ptr, k_ptr, v_ptr, slots_ptr, positions_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    stride_k_block, stride_k_head, stride_k_key, stride_v_block, stride_v_head, stride_v_key, stride_table, block_size,
    num_tokens, num_heads, num_kv_heads,
    HAS_BIAS: tl.constexpr, PAGED: tl.constexpr, HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    KIND: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr, AXIS: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    after_last(PDL)
    head = tl.program_id(1 - AXIS) * HEADS
    token = tl.program_id(AXIS).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    real = token < num_tokens
    inside = real & (column < HALF)
    width = (num_heads + 2 * num_kv_heads) * 2 * HALF
    source, bias = qkv_ptr + token * width + head * 2 * HALF + column, bias_ptr + head * 2 * HALF + column
    low, high = _halves(source, bias, inside, HAS_BIAS, HALF, HEADS)
    if head < num_heads + num_kv_heads:
        angles = rotary_ptr + token * 2 * HALF + column
        cos, sin = tl.load(angles, mask=inside, other=1.0), tl.load(angles + HALF, mask=inside, other=0.0)
    else:
        cos, sin = tl.full([TOKENS, HALF], 1.0, tl.float32), tl.zeros([TOKENS, HALF], tl.float32)
    if head < num_heads:
        q_at = q_ptr + (token * num_heads + head) * 2 * HALF + column
        for at in tl.static_range(HEADS):
            turned = tl.fma(low[at], cos, -high[at] * sin)
            tl.store(q_at + at * 2 * HALF, turned.to(q_ptr.dtype.element_ty), mask=inside)
            turned = tl.fma(high[at], cos, low[at] * sin)
            tl.store(q_at + at * 2 * HALF + HALF, turned.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        stored = tl.load(positions_ptr + token, mask=real, other=-1).to(tl.int64)
        written = inside & (stored >= 0)
        position = tl.maximum(stored, 0)
        block = tl.load(slots_ptr + token, mask=real, other=0).to(tl.int64)
        if PAGED:
            # A token that is not stored may have no row in the table either.
            at_table = table_ptr + block * stride_table + position // block_size
            block = tl.load(at_table, mask=stored >= 0, other=0).to(tl.int64)
            position = position % block_size
        if head < num_heads + num_kv_heads:
            kv_head = (head - num_heads).to(tl.int64)
            k_at = k_ptr + block * stride_k_block + kv_head * stride_k_head + position * stride_k_key + column
            for at in tl.static_range(HEADS):
                turned = _stored(tl.fma(low[at], cos, -high[at] * sin), k_scale_ptr, kv_head + at, HAS_K_SCALE, KIND)
                tl.store(k_at + at * stride_k_head, turned.to(k_ptr.dtype.element_ty), mask=written)
                turned = _stored(tl.fma(high[at], cos, low[at] * sin), k_scale_ptr, kv_head + at, HAS_K_SCALE, KIND)
                tl.store(k_at + at * stride_k_head + HALF, turned.to(k_ptr.dtype.element_ty), mask=written)
        else:
            kv_head = (head - num_heads - num_kv_heads).to(tl.int64)
            v_at = v_ptr + block * stride_v_block + kv_head * stride_v_head + position * stride_v_key + column
            for at in tl.static_range(HEADS):
                value = _stored(low[at], v_scale_ptr, kv_head + at, HAS_V_SCALE, KIND)
                tl.store(v_at + at * stride_v_head, value.to(v_ptr.dtype.element_ty), mask=written)
                value = _stored(high[at], v_scale_ptr, kv_head + at, HAS_V_SCALE, KIND)
                tl.store(v_at + at * stride_v_head + HALF, value.to(v_ptr.dtype.element_ty), mask=written)


def run(call: AppendCall, choice: AppendChoice) -> Tensor:
    """Launch the kernel; return q."""
    (qkv, rotary, k_cache, v_cache, slots, positions, num_heads, bias, q_norm, k_norm, eps, interleaved, block_table,
     k_scale, v_scale, _) = call.flat  # fmt: skip
    num_kv_heads, block_size, head_dim = v_cache.shape[1:]
    tokens = qkv.shape[0]
    q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    kind = {torch.int8: _INT8, torch.float8_e4m3fn: _FLOAT8}.get(k_cache.dtype, _CAST)
    packed = k_cache.ndim == 5

    def given(tensor: Tensor | None) -> Tensor:
        return qkv if tensor is None else tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    table = given(block_table)
    grid, axis = grid_of(-(-tokens // choice.block_tokens), choice.num_heads // choice.block_heads)
    angles, places = qkv if rotary is None else rotary.contiguous(), (slots.contiguous(), positions.contiguous())
    scales = given(k_scale), given(v_scale)
    steps = 0 if block_table is None else table.stride(0), block_size, tokens, num_heads, num_kv_heads
    flags = {
        "HAS_BIAS": bias is not None, "PAGED": block_table is not None, "HAS_K_SCALE": k_scale is not None,
        "HAS_V_SCALE": v_scale is not None, "KIND": kind, "AXIS": axis, "TOKENS": choice.block_tokens,
        "num_warps": choice.num_warps, **dependent_launch(q),
    }  # fmt: skip
    if choice.in_halves:
        launch_kernel(append_halves_kernel, grid,
            qkv.contiguous(), given(bias), angles, q, k_cache, v_cache, *places, table, *scales,
            *k_cache.stride()[:3], *v_cache.stride()[:3], *steps,
            HALF=head_dim // 2, HEADS=choice.block_heads, **flags,
        )  # fmt: skip
        return q
    launch_kernel(append_kv_kernel, grid,
        qkv.contiguous(), given(bias), given(q_norm), given(k_norm), angles, q, k_cache, v_cache, *places, table,
        *scales, k_cache.stride(0), k_cache.stride(1), k_cache.stride(3 if packed else 2),
        k_cache.stride(2) if packed else 0, *v_cache.stride()[:3], *steps,
        head_dim, 0 if rotary is None else rotary.shape[1] // 2, eps,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, INTERLEAVED=interleaved, CHUNK=k_cache.shape[-1],
        BLOCK=triton.next_power_of_2(head_dim), **flags,
    )  # fmt: skip
    return q
