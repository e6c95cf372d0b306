"""Decode attention on the CPU in float32: rows and KV heads over threads.

An item is some query heads of one KV head: all of them, unless threads would then be idle. It walks over blocks of keys
in order: scores into a small buffer, their maximum, exponentials, then the weighted sum of values. A block comes from
L2 once for all heads. A head's walk is the same in any batch and beside any head, and so are its bits.
"""

import numpy as np
import torch
from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.cpu.math_impl import doubles, exp, floats, integers  # pyright: ignore[reportUnknownVariableType]
from onewave.ops.cpu.team_impl import Job, kernel, num_threads
from onewave.ops.cpu.vectors_impl import (
    dots,
    prefetch,  # pyright: ignore[reportUnknownVariableType]
    product,
    scale_and_max,  # pyright: ignore[reportUnknownVariableType]
)
from onewave.ops.decode_attention.call import DecodeCall

_MAX_KEYS = 1 << 30
# A single row this short is done before a second thread would have woken up.
_MAX_SERIAL_KEYS = 64


_eight_scores, _one_score = dots(8), dots(1)
_weigh_four, _weigh_one = product(4, 1), product(1, 1)


@kernel
def _items(table_at: int, first_item: int, last_item: int) -> None:
    table = integers(table_at, 19)
    q_at, k_at, v_at, blocks_at, seq_lens_at, out_at = table[1], table[2], table[3], table[4], table[5], table[6]
    rows = table[7]
    num_heads, num_kv_heads, head_dim, stride_block, stride_head = table[8], table[9], table[10], table[11], table[12]
    window, block_size, num_blocks, blocks_a_row, heads = table[13], table[14], table[15], table[16], table[17]
    scale = np.float32(doubles(table_at, 1)[0])
    all_blocks, seq_lens = integers(blocks_at, rows * blocks_a_row), integers(seq_lens_at, rows)
    row_bytes = head_dim * 4
    for item in range(first_item, last_item):
        row, head = item * heads // num_heads, item * heads % num_heads
        q_of, out_of = q_at + item * heads * row_bytes, out_at + item * heads * row_bytes
        blocks = all_blocks[row * blocks_a_row : (row + 1) * blocks_a_row]
        first = max(0, seq_lens[row] - window)
        end = min(seq_lens[row], blocks_a_row * block_size)
        first_block, end_block = first // block_size, (end + block_size - 1) // block_size
        for nth in range(first_block, end_block):
            if not 0 <= blocks[nth] < num_blocks:
                end = first
        length = end - first
        # Without keys the output is 0; a row of negative length keeps its own.
        if length > 0 or seq_lens[row] >= 0:
            out = floats(out_of, heads * head_dim)
            for d in range(heads * head_dim):
                out[d] = 0.0
        if length <= 0:
            continue
        in_block = head // (num_heads // num_kv_heads) * stride_head
        vectors, block_lines = (length + 15) // 16, (block_size * row_bytes + 63) // 64
        weights_bytes = vectors * 64
        room = np.empty(heads * vectors * 16, np.float32)
        room_at = room.ctypes.data
        for nth in range(first_block, end_block):
            begin, stop = max(first, nth * block_size), min(end, (nth + 1) * block_size)
            keys = k_at + (blocks[nth] * stride_block + in_block + (begin - nth * block_size) * head_dim) * 4
            if nth + 2 < end_block:
                # Prefetchers end with a page of memory, and blocks lie anywhere.
                after = (blocks[nth + 2] * stride_block + in_block) * 4
                prefetch(k_at + after, block_lines)
            prefetch(v_at + (blocks[nth] * stride_block + in_block) * 4, block_lines)
            for of in range(heads):
                q, to = q_of + of * row_bytes, room_at + of * weights_bytes + (begin - first) * 4
                j, count = 0, stop - begin
                if head_dim % 16 == 0:
                    while j + 8 <= count:
                        _eight_scores(q, keys + j * row_bytes, to + j * 4, head_dim // 16, row_bytes)
                        j += 8
                    while j < count:
                        _one_score(q, keys + j * row_bytes, to + j * 4, head_dim // 16, row_bytes)
                        j += 1
                scores, query = floats(to, count), floats(q, head_dim)
                while j < count:
                    key, score = floats(keys + j * row_bytes, head_dim), np.float32(0.0)
                    for d in range(head_dim):
                        score += query[d] * key[d]
                    scores[j] = score
                    j += 1
        for of in range(heads):
            weights = floats(room_at + of * weights_bytes, vectors * 16)
            # Padding of the last vector is a score like any other.
            for j in range(length, vectors * 16):
                weights[j] = weights[0]
            top, total = scale_and_max(room_at + of * weights_bytes, vectors, scale), np.float32(0.0)
            for j in range(length):
                weights[j] = exp(weights[j] - top)
                total += weights[j]
            factor = np.float32(1.0) / total
            for j in range(length):
                weights[j] *= factor
        for nth in range(first_block, end_block):
            begin, stop = max(first, nth * block_size), min(end, (nth + 1) * block_size)
            values = v_at + (blocks[nth] * stride_block + in_block + (begin - nth * block_size) * head_dim) * 4
            count = stop - begin
            for of in range(heads):
                at, to, d = room_at + of * weights_bytes + (begin - first) * 4, out_of + of * row_bytes, 0
                while d + 64 <= head_dim:
                    _weigh_four(values + d * 4, at, to + d * 4, count, row_bytes, 4, 0, 0, 1)
                    d += 64
                while d + 16 <= head_dim:
                    _weigh_one(values + d * 4, at, to + d * 4, count, row_bytes, 4, 0, 0, 1)
                    d += 16
                weights, out = floats(at, count), floats(to, head_dim)
                for j in range(count):
                    value = floats(values + j * row_bytes, head_dim)
                    for rest in range(d, head_dim):
                        out[rest] += weights[j] * value[rest]
        room[0] = 0.0  # Numba frees an array after its last use, also when its address is kept


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
    group = heads = num_heads // k_cache.shape[1]
    while group % heads or (heads > 1 and rows * num_heads < heads * num_threads()):
        heads -= 1
    arguments = (*addresses, *sizes, visible, k_cache.shape[2], k_cache.shape[0], blocks.shape[1], heads)
    return Job(_items, rows * num_heads // heads, arguments, head_dim**-0.5 if scale is None else float(scale))
