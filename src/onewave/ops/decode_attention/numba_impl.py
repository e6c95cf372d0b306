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
from onewave.ops.cpu.team_impl import Job, kernel
from onewave.ops.decode_attention.call import DecodeCall

_MAX_KEYS = 1 << 30
# A single row this short is done before a second thread would have woken up.
_MAX_SERIAL_KEYS = 64


@kernel
def _pairs(table_at: int, first_pair: int, last_pair: int) -> None:
    table = integers(table_at, 19)
    q_at, k_at, v_at, blocks_at, seq_lens_at, out_at = table[1], table[2], table[3], table[4], table[5], table[6]
    rows = table[7]
    num_heads, num_kv_heads, head_dim, stride_block, stride_head = table[8], table[9], table[10], table[11], table[12]
    window, block_size, num_blocks, blocks_a_row = table[13], table[14], table[15], table[16]
    scale = np.float32(doubles(table_at, 1)[0])
    all_blocks, seq_lens = integers(blocks_at, rows * blocks_a_row), integers(seq_lens_at, rows)
    for pair in range(first_pair, last_pair):
        row, head = pair // num_heads, pair % num_heads
        blocks = all_blocks[row * blocks_a_row : (row + 1) * blocks_a_row]
        first = max(0, seq_lens[row] - window)
        end = min(seq_lens[row], blocks_a_row * block_size)
        first_block, end_block = first // block_size, (end + block_size - 1) // block_size
        for nth in range(first_block, end_block):
            if not 0 <= blocks[nth] < num_blocks:
                end = first
        length = end - first
        if length <= 0:
            # Without keys the output is 0; a row of negative length keeps its own.
            if seq_lens[row] >= 0:
                out = floats(out_at + pair * head_dim * 4, head_dim)
                for d in range(head_dim):
                    out[d] = 0.0
            continue
        in_block = head // (num_heads // num_kv_heads) * stride_head
        q, out = floats(q_at + pair * head_dim * 4, head_dim), floats(out_at + pair * head_dim * 4, head_dim)
        weights = np.empty(length, np.float32)
        top = np.float32(-np.inf)
        for nth in range(first_block, end_block):
            begin, stop = max(first, nth * block_size), min(end, (nth + 1) * block_size)
            start = blocks[nth] * stride_block + in_block + (begin - nth * block_size) * head_dim
            keys = floats(k_at + start * 4, (stop - begin) * head_dim)
            for j in range(stop - begin):
                score = np.float32(0.0)
                for d in range(head_dim):
                    score += q[d] * keys[j * head_dim + d]
                weights[begin - first + j] = score * scale
                top = max(top, weights[begin - first + j])
        total = np.float32(0.0)
        for j in range(length):
            weights[j] = exp(weights[j] - top)
            total += weights[j]
        for d in range(head_dim):
            out[d] = 0.0
        for nth in range(first_block, end_block):
            begin, stop = max(first, nth * block_size), min(end, (nth + 1) * block_size)
            start = blocks[nth] * stride_block + in_block + (begin - nth * block_size) * head_dim
            values = floats(v_at + start * 4, (stop - begin) * head_dim)
            for j in range(stop - begin):
                weight = weights[begin - first + j] / total
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

    block_table: [rows, blocks a row]; None: row i lies in block i.
    """
    target = out.contiguous()
    blocks = torch.arange(len(q))[:, None] if block_table is None else block_table
    blocks, seq_lens = blocks.long().contiguous(), seq_lens.long().contiguous()
    attending = job(target, q.contiguous(), (k_cache, v_cache), seq_lens, blocks, window=window, scale=scale)
    alone = len(q) == 1 and int(seq_lens[0]) <= _MAX_SERIAL_KEYS
    (attending._replace(alone=True) if alone else attending).run()
    if target is not out:
        out.copy_(target)


def job(
    out: Tensor,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    seq_lens: Tensor,
    blocks: Tensor,
    *,
    window: int | None,
    scale: float | None = None,
) -> Job:
    """decode_attention of contiguous tensors, with lengths and blocks in int64."""
    rows, num_heads, head_dim = q.shape[0], q.shape[1], q.shape[-1]
    k_cache, _ = caches
    addresses = (t.data_ptr() for t in (q, *caches, blocks, seq_lens, out))
    sizes = (rows, num_heads, k_cache.shape[1], head_dim, k_cache.stride(0), k_cache.stride(1))
    visible = _MAX_KEYS if window is None else min(int(window), _MAX_KEYS)
    arguments = (*addresses, *sizes, visible, k_cache.shape[2], k_cache.shape[0], blocks.shape[1])
    return Job(_pairs, rows * num_heads, arguments, head_dim**-0.5 if scale is None else float(scale))
