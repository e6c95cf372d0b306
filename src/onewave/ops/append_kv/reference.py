"""The reference of `append_kv`, in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from onewave.ops.append_kv.call import AppendCall
from onewave.ops.choice import Choice
from onewave.ops.kv_layout import key_rows
from onewave.ops.rms_norm.reference import rms_norm

_FP8_LIMIT = 448.0


def rotate(x: Tensor, rotary: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the leading dimensions of every head by its token's angles, in at least float32.

    x: [tokens, heads, head_dim]. rotary: [tokens, rotary_dim] float32, cosines then sines. Pair i is dimensions i and
    i + rotary_dim / 2, or with interleaved 2i and 2i + 1; dimensions past rotary_dim stay.
    """
    half = rotary.shape[-1] // 2
    cos, sin = rotary[:, None, :half], rotary[:, None, half:]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    turning, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined, rest), dim=-1).to(x.dtype)


def append_kv(*operands: Any, **options: Any) -> Tensor:
    """Return the queries of an AppendCall of these operands and options; see run."""
    return _append(AppendCall(*operands, **options))


def run(call: AppendCall, choice: Choice) -> Tensor:
    """Split, add bias, normalise, rotate, write K and V where they have a place; return the queries."""
    return _append(call)


def _append(call: AppendCall) -> Tensor:
    (qkv, rotary, k_cache, v_cache, slots, positions, num_heads, bias, q_norm, k_norm, eps, interleaved, block_table,
     k_scale, v_scale, _) = call.flat  # fmt: skip
    num_blocks, num_kv_heads, block_size, head_dim = v_cache.shape
    if bias is not None:
        qkv = (qkv + bias).to(qkv.dtype)
    heads = qkv.reshape(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = _normed(q, q_norm, eps)
    if k_norm is not None:
        k = _normed(k, k_norm, eps)
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    if rotary is not None:
        q, k = rotate(q, rotary, interleaved=interleaved), rotate(k, rotary, interleaved=interleaved)
    slots, positions = slots.long(), positions.long()
    rows, capacity = (
        (num_blocks, block_size) if block_table is None else (block_table.shape[0], block_table.shape[1] * block_size)
    )
    taken = (positions >= 0) & (positions < capacity) & (slots >= 0) & (slots < rows)
    if block_table is not None:
        columns = torch.where(taken, positions // block_size, 0)
        slots = block_table[torch.where(taken, slots, 0), columns].long() if taken.any() else slots
        taken, positions = taken & (slots >= 0) & (slots < num_blocks), positions % block_size
    _store(k_cache, slots[taken], positions[taken], k[taken], k_scale)
    _store(v_cache, slots[taken], positions[taken], v[taken], v_scale)
    return qkv.new_empty(q.shape).copy_(q)  # never a view of qkv


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm in x's dtype, whatever the weight's: rounded to it before the weight and behind it."""
    unit = rms_norm(x, torch.ones_like(weight, dtype=x.dtype), eps)
    return (unit * weight).to(x.dtype)


def _store(cache: Tensor, blocks: Tensor, places: Tensor, values: Tensor, scale: Tensor | None) -> None:
    """Write values [tokens, kv_heads, head_dim] to cache[blocks, :, places] in the cache's layout and dtype."""
    if cache.dtype in (torch.int8, torch.float8_e4m3fn):
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if scale is not None:
            values = values / scale[:, None]
        is_int8 = cache.dtype is torch.int8
        values = values.round().clamp(-128, 127) if is_int8 else values.clamp(-_FP8_LIMIT, _FP8_LIMIT)
    stored = values.to(cache.dtype)
    if cache.dtype is torch.float8_e4m3fn:
        # PyTorch can't index float8 everywhere; its bytes it can.
        stored, cache = stored.view(torch.uint8), cache.view(torch.uint8)
    rows = key_rows(cache)
    rows[blocks, :, places] = stored.reshape(len(stored), rows.shape[1], *rows.shape[3:])
