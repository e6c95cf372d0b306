"""KV caches: one row of fixed capacity for every sequence that may run at once, or pages and a block table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onewave.base.errors import CapacityError
from onewave.memory.shortage import is_out_of_memory

KV_PAGE = 256
"""Keys of a page, as which packed prompts read a static cache; its capacity is a multiple."""


@dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of every layer in pages, k and v `[layers, pages, kv_heads, page, head_dim]`.

    block_table: int32 [sequences, pages a sequence] on the device; a sequence's key i lies in page block_table[s, i //
    page], of every layer. The owner of a page is not known here.
    """

    k: Tensor
    v: Tensor
    block_table: Tensor


class StaticKVCache:
    """Keys and values of every layer, `[layers, slots, kv_heads, capacity, head_dim]`.

    Memory is reserved, not cleared: nothing beyond a sequence's length is ever read. Raises CapacityError.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.num_slots, self.capacity = num_slots, capacity
        shape = (num_layers, num_slots, num_kv_heads, capacity, head_dim)
        try:
            self.k = torch.empty(shape, dtype=dtype, device=device)
            self.v = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            gib = 2 * torch.Size(shape).numel() * dtype.itemsize / 2**30
            raise CapacityError(
                f"KV cache for {num_slots} sequences of {capacity} tokens",
                got=f"{gib:.1f} GiB do not fit on {device}",
                next="Lower max_model_len or max_num_seqs.",
            ) from error

    def copy_from(self, other: StaticKVCache) -> None:
        """Take over the tokens of a smaller cache of the same layers and slots."""
        self.k[:, :, :, : other.capacity].copy_(other.k)
        self.v[:, :, :, : other.capacity].copy_(other.v)

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Copy a slot's first tokens to another one, of every layer."""
        for cache in (self.k, self.v):
            cache[:, target, :, :num_tokens].copy_(cache[:, source, :, :num_tokens])

    def pages(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (k, v) of one layer as pages [pages, KV_PAGE, kv_heads, head_dim], views; see page_table."""
        num_slots, heads, capacity, head_dim = self.k.shape[1:]
        size = num_slots * heads * capacity // KV_PAGE - (heads - 1) * capacity // KV_PAGE, KV_PAGE, heads, head_dim
        strides = KV_PAGE * head_dim, head_dim, capacity * head_dim, 1
        k, v = (cache[index].as_strided(size, strides) for cache in (self.k, self.v))
        return k, v

    @cached_property
    def page_table(self) -> Tensor:
        """The pages of each slot, int32 [slots, capacity / KV_PAGE]."""
        num_slots, heads, capacity = self.k.shape[1:4]
        pages = capacity // KV_PAGE
        first = torch.arange(num_slots, dtype=torch.int32, device=self.k.device)[:, None] * (heads * pages)
        return first + torch.arange(pages, dtype=torch.int32, device=self.k.device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (k, v) of one layer, each [slots, kv_heads, capacity, head_dim]."""
        return self.k[index], self.v[index]
