"""Which keys a program of either decode kernel works on, in Triton, and asking for them before they are needed.

c: the kernel's Call (split_kv.py, hopper/parts.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def _over(x, shift, c):
    """x // size for a size of `splits`; x >= 0. A division of unknown numbers would be a hundred cycles."""
    return x // c.SPLIT if c.SPLIT > 0 else x >> shift


@triton.jit
def splits(length, c):
    """(first visible key, keys a split, its logarithm, first split, number of splits) of rows with `length` keys.

    A row without keys has one empty split, which writes its zeros; a negative length has none at all.
    """
    first_key = tl.maximum(length - (c.num_queries - 1) - c.window, 0)
    shift = length * 0 + c.LOG_SMALLEST
    if c.SPLIT == 0:
        for n in tl.static_range(len(c.LIMITS)):
            shift = tl.where((c.LIMITS[n] << shift) < length - first_key, shift + 1, shift)
    size = length * 0 + c.SPLIT if c.SPLIT > 0 else (length * 0 + 1) << shift
    first_split = _over(first_key, shift, c)
    count = tl.maximum(_over(tl.maximum(length, 0) + size - 1, shift, c) - first_split, 1)
    return first_key, size, shift, first_split, tl.where(length < 0, 0, count)


@triton.jit
def row_lengths(row, known, c, EARLY: tl.constexpr = False):
    """Keys of rows, the new token's included and never more than the cache has; -1 for one that is left alone.

    known: whether there is such a row. A finished row is left alone whatever its length. EARLY: whether what is read
    may still be written to, and so must not stay in L1.
    """
    WHERE: tl.constexpr = ".cg" if EARLY else ""
    length = tl.load(c.lengths + row, mask=known, other=-1, cache_modifier=WHERE).to(tl.int32)
    if c.HAS_FINISHED:
        finished = tl.load(c.finished + row, mask=known, other=0, cache_modifier=WHERE)
        length = tl.where(finished != 0, -1, length)
    # A length beyond the cache would read what is not there.
    extra: tl.constexpr = 1 if c.FUSED else 0
    return tl.where(length < 0, -1, tl.minimum(length + extra, c.capacity))


@triton.jit
def row_starts(row, c, EARLY: tl.constexpr = False):
    """(begin, end) of each row in the list of all rows' visible keys; int64 if WIDE, else int32. row: [ROWS], 0 on.

    A row counts from the begin of its first split and at least for one, so that a row without keys has a program.
    EARLY: as row_lengths has it.
    """
    keys = listed_keys(row_lengths(row, row < c.num_rows, c, EARLY), c)
    if c.WIDE:
        keys = keys.to(tl.int64)
    ends = tl.cumsum(keys, axis=0)
    return ends - keys, ends


@triton.jit
def listed_keys(length, c):
    """Places that rows of `length` keys take in the list."""
    _, size, _, first_split, _ = splits(length, c)
    return tl.where(length < 0, 0, tl.maximum(length - first_split * size, 1))


@triton.jit
def part_of_list(share, num_shares, keys):
    """(begin, end) of a share of a list of `keys` keys."""
    # The begin of share s is the quotient s * keys / num_shares, rounded up, without a product past 32 bits.
    each, left = keys // num_shares, keys % num_shares
    begin = share * each + (share * left + num_shares - 1) // num_shares
    end = (share + 1) * each + ((share + 1) * left + num_shares - 1) // num_shares
    return begin, end


@triton.jit
def rows_of_share(share, num_shares, starts, ends):
    """(first row, last row, begin, end) of a share: its rows, and its piece of the list of all keys."""
    begin, end = part_of_list(share, num_shares, tl.max(ends, axis=0))
    first_row = tl.sum((ends <= begin).to(tl.int32), axis=0)
    last_row = tl.sum((starts < end).to(tl.int32), axis=0) - 1
    return first_row, last_row, begin, end


@triton.jit
def start_of_row(row, rows, starts):
    """Where `row` begins in the list. rows: [ROWS], 0 on."""
    return tl.sum(tl.where(rows == row, starts, 0), axis=0)


@triton.jit
def part_of_row(row_at, length, share_begin, share_end, c, MANY: tl.constexpr):
    """The splits of a row of `length` keys, from row_at on in the list, that begin in a share; all of them if MANY.

    Returns (first visible key, keys a split, first split of the row, its last, first split here, last here, first key
    to read here).
    """
    first_key, size, shift, first_split, count = splits(length, c)
    last_split = first_split + count - 1
    if MANY:
        split, last_here = first_split, last_split
    else:
        before, until = tl.maximum(share_begin - row_at, 0), tl.maximum(share_end - row_at, 0)
        split = first_split + _over(before + size - 1, shift, c).to(tl.int32)
        last_here = tl.minimum(first_split + _over(until + size - 1, shift, c).to(tl.int32) - 1, last_split)
    begin = split * size
    # Tiles wholly before the window are skipped; the others stay where the split's begin puts them.
    begin += tl.maximum(first_key - begin, 0) // c.BLOCK_N * c.BLOCK_N
    return first_key, size, first_split, last_split, split, last_here, begin


@triton.jit
def ask_for(k_base, v_base, stride_k, stride_v, first, end, row_bytes, KEYS: tl.constexpr):
    """Start bringing keys and values first .. end - 1 into L2; nothing is waited for.

    k_base, v_base: addresses of key 0, int64; strides and row_bytes: bytes, multiples of 16. KEYS: keys that one
    instruction takes, more than one only where they lie side by side. Every address has to be mapped; what is there may
    still change, because L2 is where all SMs agree.
    """
    threads: tl.constexpr = cuda.num_threads()
    thread = tl.arange(0, threads)
    base, stride = tl.where(thread % 2 == 0, k_base, v_base), tl.where(thread % 2 == 0, stride_k, stride_v)
    for begin in range(first, end, KEYS * (threads // 2)):
        key = begin + thread // 2 * KEYS
        size = tl.minimum(tl.maximum(end - key, 0), KEYS) * row_bytes
        tl.inline_asm_elementwise(
            "{.reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2;"
            " mov.b32 $0, 0;}",
            "=r,l,r",
            [base + key.to(tl.int64) * stride, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
