"""Keys and values in pages that a block table names: what is accepted, and the copy for kernels that read no pages."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError
from onewave.ops import checks
from onewave.ops.attention.call import AttentionCall
from onewave.ops.attention.masks import Options


def check_pages(name: str, k: Tensor, v: Tensor, block_table: Tensor, sequences: int) -> None:
    """k, v [pages, page_size, kv_heads, head_dim] and block_table [sequences, pages a sequence]."""
    checks.tensors(name, k=k, v=v, block_table=block_table)
    if k.ndim != 4 or k.shape != v.shape:
        got, allowed = f"shapes {tuple(k.shape)}, {tuple(v.shape)}", "[pages, page_size, kv_heads, head_dim] twice"
        raise ShapeError(f"{name}: k, v with block_table", got=got, allowed=allowed)
    if block_table.ndim != 2 or len(block_table) != sequences or block_table.dtype is not torch.int32:
        allowed = f"int32 [{sequences}, pages a sequence]"
        raise ShapeError(f"{name}: block_table", got=checks.words_of(block_table), allowed=allowed)
    checks.last_axis(name, "block_table", block_table)
    if k.shape[1] < 1:
        raise ShapeError(f"{name}: page_size", got=str(k.shape[1]), allowed="at least 1")


def check_table(name: str, k: Tensor, block_table: Tensor, starts: tuple[Tensor, Tensor], wanted: Options) -> None:
    """Read the table back (a synchronisation) and check that what is looked up exists: pages that a query sees."""
    pages, size = k.shape[:2]
    # NumPy: a CPU checks every call, and small tensors' operations take PyTorch five times as long.
    queries, keys = (np.diff(each.cpu().numpy().astype(np.int64))[:, None] for each in starts)
    most = block_table.shape[1]
    if len(keys) and keys.max() > most * size:
        got, allowed = f"{keys.max()} keys in one sequence", f"at most {most * size}"
        raise InvalidArgumentError(f"{name}: block_table", got=got, allowed=allowed)
    shift = 0 * keys if wanted.top_left else keys - queries
    first = 0 * keys if wanted.left is None else shift - wanted.left
    end = keys if wanted.right is None else np.minimum(keys, queries + shift + wanted.right)
    page = np.arange(most) * size
    used = block_table.cpu().numpy()[(page < end) & (page + size > first) & (queries > 0)]
    wrong = used[(used < 0) | (used >= pages)]
    if len(wrong):
        raise InvalidArgumentError(f"{name}: block_table", got=str(wrong[0]), allowed=f"0 to {pages - 1}")


def with_rows_of_pages(call: AttentionCall) -> AttentionCall:
    """Return the call with keys and values copied out of their pages."""
    packed = call.packed
    if packed is None or packed.block_table is None:
        return call
    k, v, starts = ragged_from_pages(call.k, call.v, packed.block_table, packed.cu_seqlens_k, packed.max_seqlen_k)
    return replace(call, k=k, v=v, packed=replace(packed, cu_seqlens_k=starts, block_table=None))


def ragged_from_pages(
    k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy pages [pages, page_size, kv_heads, head_dim] into one ragged tensor of sequences as long as these cu_seqlens
    say. Returns k, v and their own cu_seqlens, which begin at 0.

    The copy has room for `longest` keys of every sequence: lengths are not known on the host.
    """
    cu_seqlens = cu_seqlens - cu_seqlens[:1]
    rows = len(cu_seqlens) - 1
    longest = min(longest, block_table.shape[1] * k.shape[1])
    if rows * longest * len(k) == 0:
        return k.flatten(0, 1)[:0], v.flatten(0, 1)[:0], cu_seqlens
    token = torch.arange(rows * longest, device=cu_seqlens.device)
    row = torch.searchsorted(cu_seqlens.long(), token, right=True).sub_(1).clamp_(0, max(rows - 1, 0))
    # Tokens past the end get some valid place; what is copied there is not read.
    position = (token - cu_seqlens[row]).clamp_(0, max(longest - 1, 0))
    page = block_table[row, (position // k.shape[1]).clamp(max=block_table.shape[1] - 1)].long()
    page, at = page.clamp_(0, k.shape[0] - 1), position % k.shape[1]
    return k[page, at], v[page, at], cu_seqlens
