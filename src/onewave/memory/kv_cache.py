"""KV caches: one row of fixed capacity for every sequence that may run at once, or pages and a block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.errors import CapacityError
from onewave.memory.shortage import is_out_of_memory


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

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (k, v) of one layer, each [slots, kv_heads, capacity, head_dim]."""
        return self.k[index], self.v[index]
