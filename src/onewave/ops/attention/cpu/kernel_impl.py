"""Attention of packed sequences on the CPU in float32; keys lie in rows or in pages, which are read in place.

Mapping: an item is a KV head and 32 of the (query, head) pairs that read it, one SIMD lane each. The last queries come
first: under a causal mask they take longest. An item walks over tiles of 64 keys: scores [key][lane] by a product of 8
keys x 32 lanes in registers, softmax as Flash-attention has it (running maximum and sum, lanes side by side), then
weights times values by a product of 8 lanes x 32 columns, which adds to the output in L1.
Roofline: the fused multiply-adds; keys and values come from L2.

Tiles begin at multiples of 64 keys of the sequence, and a query sums in the order of keys: its bits depend neither on
the other queries nor on how a prompt was cut. Source: Dao 2023, arXiv:2307.08691.
"""

import numpy as np

from onewave.ops.cpu import LANES
from onewave.ops.cpu.math_impl import doubles, exp, floats, integers
from onewave.ops.cpu.team_impl import ordered_kernel
from onewave.ops.cpu.vectors_impl import product

PAIRS = 2 * LANES
"""Pairs of an item. Below, 32 and 128 are it and the bytes of its float32, 64 the keys of a tile."""
FIELDS = 6
"""int64 of a sequence: first query row, queries, first key row, keys, place of the first query, end of its items."""


_score_keys, _score_key = product(2, 8), product(2, 1)
_weigh_pair, _weigh_one = product(2, 8), product(1, 8)


@ordered_kernel
def items(table_at, first_item, last_item):
    table = integers(table_at, 19)
    q_at, k_at, v_at, out_at, pages_at, sequences_at = table[1], table[2], table[3], table[4], table[5], table[6]
    num_sequences, num_heads, num_kv_heads, head_dim = table[7], table[8], table[9], table[10]
    page_bytes, key_bytes, head_bytes, page_size, pages_a_row = table[11], table[12], table[13], table[14], table[15]
    left, right, lse_at = table[16], table[17], table[18]
    scale = np.float32(doubles(table_at, 1)[0])
    sequences, all_pages = integers(sequences_at, num_sequences * 6), integers(pages_at, num_sequences * pages_a_row)
    group = num_heads // num_kv_heads
    room = np.empty(32 * (2 * head_dim + 64) + 16, np.float32)
    room_at = (room.ctypes.data + 63) // 64 * 64
    weights_at, sums_at = room_at + head_dim * 128, room_at + (head_dim + 64) * 128
    queries, weights, sums = floats(room_at, head_dim * 32), floats(weights_at, 64 * 32), floats(sums_at, head_dim * 32)
    lowest, highest = np.empty(32, np.int32), np.empty(32, np.int32)
    top, before, total = np.empty(32, np.float32), np.empty(32, np.float32), np.empty(32, np.float32)
    nth = 0
    for item in range(first_item, last_item):
        while item >= sequences[nth * 6 + 5]:
            nth += 1
        first_query, num_queries, first_key = sequences[nth * 6], sequences[nth * 6 + 1], sequences[nth * 6 + 2]
        num_keys, place = sequences[nth * 6 + 3], sequences[nth * 6 + 4]
        pages = all_pages[nth * pages_a_row : (nth + 1) * pages_a_row]
        later = sequences[nth * 6 + 5] - 1 - item
        kv_head, first_pair = later % num_kv_heads, later // num_kv_heads * 32
        pairs = min(32, num_queries * group - first_pair)
        for lane in range(32):
            pair = first_pair + min(lane, pairs - 1)
            at = place + pair // group
            lowest[lane], highest[lane] = max(0, at - left), min(num_keys - 1, at + right)
            q = floats(
                q_at + ((first_query + pair // group) * num_heads + kv_head * group + pair % group) * head_dim * 4,
                head_dim,
            )
            for d in range(head_dim):
                queries[d * 32 + lane] = q[d] * scale
            top[lane], total[lane] = -np.inf, 0.0
        for i in range(32 * head_dim):
            sums[i] = 0.0
        begin, stop = lowest[0], highest[31] + 1
        in_head = kv_head * head_bytes
        while begin < stop:
            end = min(stop, begin // 64 * 64 + 64)
            count = end - begin
            j = 0
            while j < count:
                row = first_key + begin + j
                keys = k_at + pages[row // page_size] * page_bytes + row % page_size * key_bytes + in_head
                run_end = min(count, j + page_size - row % page_size)
                while j + 8 <= run_end:
                    _score_keys(room_at, keys, weights_at + j * 128, head_dim, 128, 4, key_bytes, 128, 0)
                    keys += 8 * key_bytes
                    j += 8
                while j < run_end:
                    _score_key(room_at, keys, weights_at + j * 128, head_dim, 128, 4, key_bytes, 128, 0)
                    keys += key_bytes
                    j += 1
            if begin < lowest[31] or end - 1 > highest[0]:
                for j in range(count):
                    key = np.int32(begin + j)
                    for lane in range(32):
                        if key < lowest[lane] or key > highest[lane]:
                            weights[j * 32 + lane] = -np.inf
            for lane in range(32):
                before[lane] = top[lane]
            for j in range(count):
                for lane in range(32):
                    score = weights[j * 32 + lane]
                    top[lane] = score if score > top[lane] else top[lane]
            changed = False
            for lane in range(32):
                # A lane that has seen no key takes any finite number, so that no infinity is subtracted from another.
                base = top[lane] if top[lane] > -np.inf else np.float32(0.0)
                changed |= before[lane] != base
                before[lane] = exp(before[lane] - base)
                total[lane] *= before[lane]
            for j in range(count):
                for lane in range(32):
                    score = weights[j * 32 + lane]
                    base = top[lane] if top[lane] > -np.inf else np.float32(0.0)
                    weight = exp(score - base)
                    weight = weight if score > -np.inf else np.float32(0.0)
                    weights[j * 32 + lane] = weight
                    total[lane] += weight
            if changed:
                for lane in range(32):
                    for d in range(head_dim):
                        sums[lane * head_dim + d] *= before[lane]
            j = 0
            while j < count:
                row = first_key + begin + j
                values = v_at + pages[row // page_size] * page_bytes + row % page_size * key_bytes + in_head
                run_end = min(count, j + page_size - row % page_size)
                num, weights_of = run_end - j, weights_at + j * 128
                for lane in range(0, pairs, 8):
                    to = sums_at + lane * head_dim * 4
                    for d in range(0, head_dim - 16, 32):
                        _weigh_pair(values + d * 4, weights_of + lane * 4, to + d * 4, num, key_bytes, 128, 4,
                                    head_dim * 4, 1)  # fmt: skip
                    if head_dim % 32 != 0:
                        d = head_dim - 16
                        _weigh_one(values + d * 4, weights_of + lane * 4, to + d * 4, num, key_bytes, 128, 4,
                                   head_dim * 4, 1)  # fmt: skip
                j = run_end
            begin = end
        for lane in range(pairs):
            pair = first_pair + lane
            out = floats(
                out_at + ((first_query + pair // group) * num_heads + kv_head * group + pair % group) * head_dim * 4,
                head_dim,
            )
            factor = np.float32(1.0) / total[lane] if total[lane] > 0.0 else np.float32(0.0)
            for d in range(head_dim):
                out[d] = sums[lane * head_dim + d] * factor
            if lse_at != 0:
                at = (first_query + pair // group) * num_heads + kv_head * group + pair % group
                floats(lse_at + at * 4, 1)[0] = top[lane] + np.log(total[lane])
    room[0] = 0.0  # Numba frees an array after its last use, also when its address is kept
