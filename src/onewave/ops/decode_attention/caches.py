"""The layouts a KV cache may have, seen as one.

plain   k and v [rows, kv_heads, capacity, head_dim]: row i of a batch is row i of the cache
paged   k and v [blocks, kv_heads, block_size, head_dim] with a block table [rows, blocks a row]: key t of a row lies in
        block table[row, t // block_size] at t % block_size. With one block a row this is a cache of numbered slots.
packed  as either of them, with k [.., kv_heads, head_dim / x, capacity, x], x elements being 16 bytes
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops import checks

KV_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache. capacity: keys a row can have. chunk: elements of a key that lie together in k."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    capacity: int
    chunk: int


def cache_shape(operator: str, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, rows: int) -> CacheShape:
    """Check a cache and its block table for `rows` sequences. Raises ShapeError, UnsupportedError."""
    if v_cache.ndim != 4 or k_cache.ndim not in (4, 5):
        raise ShapeError(
            f"{operator}: k_cache, v_cache",
            got=f"{tuple(k_cache.shape)}, {tuple(v_cache.shape)}",
            allowed="[rows, kv_heads, capacity, head_dim], or k packed as [rows, kv_heads, head_dim / x, capacity, x]",
        )
    blocks, num_kv_heads, block_size, head_dim = v_cache.shape
    if num_kv_heads == 0:
        raise ShapeError(f"{operator}: v_cache", got=str(tuple(v_cache.shape)), allowed="at least one KV head")
    chunk = head_dim if k_cache.ndim == 4 else 16 // k_cache.element_size()
    right = (blocks, num_kv_heads, block_size, head_dim)
    if k_cache.ndim == 5:
        if head_dim % chunk:
            got = f"packed, head_dim {head_dim} in {k_cache.dtype}"
            allowed = f"a head_dim that is a multiple of {chunk}"
            raise ShapeError(f"{operator}: k_cache", got=got, allowed=allowed, next="Use the plain layout.")
        right = (blocks, num_kv_heads, head_dim // chunk, block_size, chunk)
    checks.shape(operator, "k_cache", k_cache, right)
    if k_cache.dtype is not v_cache.dtype or k_cache.dtype not in KV_DTYPES:
        got, allowed = f"{k_cache.dtype}, {v_cache.dtype}", f"twice the same of {checks.names_of(KV_DTYPES)}"
        raise UnsupportedError(f"{operator}: cache dtypes", got=got, allowed=allowed)
    checks.last_axis(operator, "k_cache", k_cache)
    checks.last_axis(operator, "v_cache", v_cache)
    if block_table is None:
        if blocks != rows:
            raise ShapeError(
                f"{operator}: cache rows", got=str(blocks), allowed=str(rows), next="Pass block_table to choose rows."
            )
        return CacheShape(num_kv_heads, head_dim, block_size, block_size, chunk)
    if block_table.ndim != 2 or block_table.shape[0] != rows or block_table.dtype not in checks.WHOLE:
        allowed = f"int32 or int64 [{rows}, blocks a row]"
        raise ShapeError(f"{operator}: block_table", got=checks.words_of(block_table), allowed=allowed)
    return CacheShape(num_kv_heads, head_dim, block_size, block_table.shape[1] * block_size, chunk)


def check_lengths(
    operator: str, seq_lens: Tensor, capacity: int, block_table: Tensor | None, num_blocks: int, block_size: int,
    visible: int | None = None,
) -> None:  # fmt: skip
    """Read lengths and block table on the host and check them. visible: how many of a row's last keys some query
    sees; None: all. Raises InvalidArgumentError. Waits for the device."""
    longest = int(seq_lens.max()) if seq_lens.numel() else 0
    if longest > capacity:
        raise InvalidArgumentError(f"{operator}: seq_lens", got=str(longest), allowed=f"up to {capacity}, the cache's")
    if block_table is None or not block_table.numel():
        return
    start = torch.arange(block_table.shape[1], device=block_table.device) * block_size
    used = start < seq_lens[:, None]
    if visible is not None:
        used &= start + block_size > seq_lens[:, None] - visible
    wrong = used & ((block_table < 0) | (block_table >= num_blocks))
    if wrong.any():
        row, column = (int(index) for index in wrong.nonzero()[0])
        raise InvalidArgumentError(
            f"{operator}: block_table[{row}, {column}]",
            got=str(int(block_table[row, column])),
            allowed=f"0 to {num_blocks - 1}",
        )


def cached_rows(
    k_cache: Tensor, v_cache: Tensor, row: int, first: int, length: int, block_table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of one row from `first` on, each [kv_heads, length - first, head_dim]; gathered where they are
    paged."""
    if k_cache.ndim == 5:
        k_cache = k_cache.transpose(2, 3).flatten(3)
    if block_table is None:
        return k_cache[row, :, first:length], v_cache[row, :, first:length]
    block_size = v_cache.shape[2]
    begin = first // block_size
    blocks = block_table[row, begin : -(-length // block_size)].long()
    keys = slice(first - begin * block_size, length - begin * block_size)
    k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, keys] for cache in (k_cache, v_cache))
    return k, v
