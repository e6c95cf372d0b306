"""append_kv on the CPU in float32: tokens over threads, one head after another."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from onewave.ops.append_kv.call import AppendCall
from onewave.ops.choice import Choice
from onewave.ops.cpu.math_impl import doubles, floats, integers
from onewave.ops.cpu.team_impl import Job, kernel


@kernel
def _tokens(table_at, first, last):
    table = integers(table_at, 19)
    qkv_at, bias_at, q_norm_at, k_norm_at, rotary_at, q_at = table[1], table[2], table[3], table[4], table[5], table[6]
    k_at, v_at, slots_at, positions_at = table[7], table[8], table[9], table[10]
    num_heads, num_kv_heads, head_dim, half = table[11], table[12], table[13], table[14]
    stride_slot, stride_head, num_slots, capacity = table[15], table[16], table[17], table[18]
    eps = doubles(table_at, 1)[0]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    slots, positions = integers(slots_at, last), integers(positions_at, last)
    for token in range(first, last):
        rotary = floats(rotary_at + token * half * 8, 2 * half)
        cache_row = (slots[token] * stride_slot + positions[token] * head_dim) * 4
        # A token without a position, or with one that the cache does not have, has queries and is not stored.
        is_stored = 0 <= positions[token] < capacity and 0 <= slots[token] < num_slots
        num_written = num_heads + 2 * num_kv_heads if is_stored else num_heads
        for head in range(num_written):
            x = floats(qkv_at + (token * width + head * head_dim) * 4, head_dim)
            if bias_at != 0:
                bias = floats(bias_at + head * head_dim * 4, head_dim)
                for i in range(head_dim):
                    x[i] += bias[i]
            if head >= num_heads + num_kv_heads:
                out = floats(v_at + cache_row + (head - num_heads - num_kv_heads) * stride_head * 4, head_dim)
                for i in range(head_dim):
                    out[i] = x[i]
                continue
            norm_at = q_norm_at if head < num_heads else k_norm_at
            if norm_at != 0:
                norm = floats(norm_at, head_dim)
                squares = np.float32(0.0)
                for i in range(head_dim):
                    squares += x[i] * x[i]
                scale = np.float32(1.0 / np.sqrt(squares / head_dim + eps))
                for i in range(head_dim):
                    x[i] = x[i] * scale * norm[i]
            if head < num_heads:
                out = floats(q_at + (token * num_heads + head) * head_dim * 4, head_dim)
            else:
                out = floats(k_at + cache_row + (head - num_heads) * stride_head * 4, head_dim)
            for i in range(half):
                out[i] = x[i] * rotary[i] - x[i + half] * rotary[i + half]
                out[i + half] = x[i + half] * rotary[i] + x[i] * rotary[i + half]
            for i in range(2 * half, head_dim):
                out[i] = x[i]


def run(call: AppendCall, choice: Choice) -> Tensor:
    """Return q; float32, plain caches, half-split rotation, int64 slots and positions.

    qkv is scratch afterwards: bias and norm are applied in place.
    """
    assert call.rotary is not None
    call = replace(
        call,
        qkv=call.qkv.contiguous(),
        rotary=call.rotary.contiguous(),
        slots=call.slots.contiguous(),
        positions=call.positions.contiguous(),
    )
    q = torch.empty((len(call.qkv), call.num_heads, call.k_cache.shape[-1]), dtype=torch.float32)
    job(call, q).run()
    return q


def job(call: AppendCall, q: Tensor) -> Job:
    """A call whose tensors other than the caches are contiguous. q: is written."""
    k_cache, num_heads, rotary = call.k_cache, call.num_heads, call.rotary
    assert rotary is not None
    num_slots, num_kv_heads, capacity, head_dim = k_cache.shape
    stride_slot, stride_head, _, _ = k_cache.stride()
    operands = (call.qkv, *call.vectors, rotary, q, k_cache, call.v_cache, call.slots, call.positions)
    addresses = (0 if each is None else each.data_ptr() for each in operands)
    sizes = (num_heads, num_kv_heads, head_dim, rotary.shape[1] // 2, stride_slot, stride_head, num_slots, capacity)
    return Job(_tokens, len(q), (*addresses, *sizes), call.eps, len(q) < 16)
