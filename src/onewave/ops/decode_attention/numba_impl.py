"""Decode attention on the CPU in float32: (row, query head) pairs over threads.

A pair walks its keys in order: scores into a small buffer, their maximum, exponentials, then the weighted sum of
values. The walk is the same in any batch, and so are its bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.cpu.math_impl import doubles, exp, floats, integers  # pyright: ignore[reportUnknownVariableType]
from onewave.ops.cpu.team_impl import kernel
from onewave.ops.cpu.team_impl import run as run_on_team
from onewave.ops.decode_attention.call import DecodeCall

_MAX_KEYS = 1 << 30
# A single row this short is done before a second thread would have woken up.
_MAX_SERIAL_KEYS = 64


@kernel
def _pairs(table_at: int, first_pair: int, last_pair: int) -> None:
    table = integers(table_at, 19)
    q_at, k_at, v_at, slots_at, seq_lens_at, out_at = table[1], table[2], table[3], table[4], table[5], table[6]
    rows = table[7]
    num_heads, num_kv_heads, head_dim, stride_slot, stride_head = table[8], table[9], table[10], table[11], table[12]
    window, capacity, num_slots = table[13], table[14], table[15]
    scale = np.float32(doubles(table_at, 1)[0])
    slots, seq_lens = integers(slots_at, rows), integers(seq_lens_at, rows)
    for pair in range(first_pair, last_pair):
        row, head = pair // num_heads, pair % num_heads
        first = max(0, seq_lens[row] - window)
        length = min(seq_lens[row], capacity) - first
        if length <= 0 or not 0 <= slots[row] < num_slots:
            # Without keys the output is 0; a row of negative length keeps its own.
            if seq_lens[row] >= 0:
                out = floats(out_at + pair * head_dim * 4, head_dim)
                for d in range(head_dim):
                    out[d] = 0.0
            continue
        kv_head = head // (num_heads // num_kv_heads)
        start = (slots[row] * stride_slot + kv_head * stride_head + first * head_dim) * 4
        q, out = floats(q_at + pair * head_dim * 4, head_dim), floats(out_at + pair * head_dim * 4, head_dim)
        keys, values = floats(k_at + start, length * head_dim), floats(v_at + start, length * head_dim)
        weights = np.empty(length, np.float32)
        top = np.float32(-np.inf)
        for j in range(length):
            score = np.float32(0.0)
            for d in range(head_dim):
                score += q[d] * keys[j * head_dim + d]
            weights[j] = score * scale
            top = max(top, weights[j])
        total = np.float32(0.0)
        for j in range(length):
            weights[j] = exp(weights[j] - top)
            total += weights[j]
        for d in range(head_dim):
            out[d] = 0.0
        for j in range(length):
            weight = weights[j] / total
            for d in range(head_dim):
                out[d] += weight * values[j * head_dim + d]


def run(call: DecodeCall, choice: Choice) -> tuple[Tensor, None]:
    """Return (out, None)."""
    out = call.output()
    given = (call.q, call.k_cache, call.v_cache, call.seq_lens, call.block_table)
    decode_attention(out, *given, window=call.window, scale=call.scale)
    return out, None


def decode_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    *,
    window: int | None,
    scale: float | None,
) -> None:
    """Write out, q's shape: [rows, heads, head_dim] or [rows, heads, 1, head_dim]; see op.decode_attention.

    Every row lies in one block of the cache; block_table: [rows, 1].
    """
    rows, num_heads, head_dim = q.shape[0], q.shape[1], q.shape[-1]
    target = out.contiguous()
    slots = torch.arange(rows) if block_table is None else block_table
    q, slots, seq_lens = q.contiguous(), slots.long().contiguous(), seq_lens.long().contiguous()
    addresses = (q, k_cache, v_cache, slots, seq_lens, target)
    sizes = (rows, num_heads, k_cache.shape[1], head_dim, k_cache.stride(0), k_cache.stride(1))
    visible = _MAX_KEYS if window is None else min(int(window), _MAX_KEYS)
    alone = rows == 1 and int(seq_lens[0]) <= _MAX_SERIAL_KEYS
    factor = head_dim**-0.5 if scale is None else float(scale)
    run_on_team(
        _pairs,
        rows * num_heads,
        (*(t.data_ptr() for t in addresses), *sizes, visible, k_cache.shape[2], k_cache.shape[0]),
        factor,
        alone=alone,
    )
    if target is not out:
        out.copy_(target)
