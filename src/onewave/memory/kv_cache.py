"""KV caches: keys and values in blocks, and the block table that says which sequence has which.

Owners of blocks are block_pool.py's to know.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from onewave.base.errors import CapacityError
from onewave.memory.host import available_bytes
from onewave.memory.shortage import is_out_of_memory

GPU_BLOCK_SIZE = 128
"""Tokens of a KV block on a GPU: what attention's kernels read at a time, the wave's as well. Larger blocks share fewer
prefixes, smaller ones make those kernels ask for keys in pieces."""
CPU_BLOCK_SIZE = 16
"""The same on a CPU, whose loops read blocks of any size alike."""


# Shares of the memory that is free once the model has loaded: the rest is for prompts and for what else runs there.
_GPU_SHARE, _CPU_SHARE = 1 / 2, 1 / 4
# A CPU's caches are this large at most unless one sequence needs more: whatever is cached stays in memory.
_CPU_BYTES = 1 << 30
# Runs of entries of a block table that are copied there one by one. More take a transfer and a kernel, as long as six.
_COPIED_RUNS = 6


def block_size_on(device: torch.device) -> int:
    """Return the tokens of a KV block on a device."""
    return CPU_BLOCK_SIZE if device.type == "cpu" else GPU_BLOCK_SIZE


def default_cache_bytes(device: torch.device, *, one_sequence: int, beside: int = 0) -> int:
    """Return how much memory a cache may take where nothing was said. one_sequence: bytes of the longest. beside: bytes
    that have to stay free, for the activations of a pass."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return min(int(free * _GPU_SHARE), free - beside)
    bound, room = max(_CPU_BYTES, one_sequence), available_bytes()
    return bound if room is None else min(bound, int(room * _CPU_SHARE), room - beside)


@dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored. k_scale, v_scale: float32 [layers, kv_heads], what a stored number of 8 bits is
    multiplied by; None with wider dtypes."""

    dtype: torch.dtype
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [blocks, kv_heads, block_size, head_dim]. Scales: [kv_heads], of KVFormat."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def rows(self, blocks: Tensor | int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a sequence's keys and values, each [1, kv_heads, length, head_dim] in `dtype`.

        blocks: the numbers of its blocks, or of its one block. A view where neither several blocks nor 8 bits need a
        copy. Rounds a stored number times its scale once.
        """
        return (
            _rows(self.k, self.k_scale, blocks, length, dtype),
            _rows(self.v, self.v_scale, blocks, length, dtype),
        )


def _rows(cache: Tensor, scale: Tensor | None, blocks: Tensor | int, length: int, dtype: torch.dtype) -> Tensor:
    if isinstance(blocks, int):
        found = cache[blocks, None, :, :length]
    else:
        # PyTorch can't index float8 everywhere; its bytes it can.
        words = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        found = words[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length].view(cache.dtype)
    return found if scale is None else (found.float() * scale[:, None, None]).to(dtype)


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of a cache. num_blocks: of each layer; num_slots, blocks_a_row: of the block table."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    num_slots: int
    blocks_a_row: int


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, k and v `[layers, blocks, kv_heads, block_size, head_dim]`.

    block_table: int32 [rows, blocks a row] on the device; key i of the sequence in row s lies in block
    block_table[s, i // block_size] of every layer. None: row s is block s, and a block is as long as a sequence.
    k_scale, v_scale: of KVFormat. wide: room for one layer's keys and for its values in 16 bits, where prompts read
    stored ones of 8.
    All have their addresses for good: captured graphs and the wave read them.
    """

    k: Tensor
    v: Tensor
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    wide: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.k.nbytes + self.v.nbytes

    @classmethod
    def reserve(
        cls, sizes: CacheSizes, form: KVFormat, *, device: torch.device, wide_dtype: torch.dtype | None = None
    ) -> "KVCache":
        """Reserve a cache whose table is all zeros: block 0 everywhere. wide_dtype: of `wide`; None: without.

        Its memory is not cleared: nothing beyond a sequence's length is ever read. Raises CapacityError.
        """
        shape = (sizes.num_layers, sizes.num_blocks, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
        try:
            k, v = (torch.empty(shape, dtype=form.dtype, device=device) for _ in range(2))
            wide = None
            if wide_dtype is not None:
                wide = torch.empty_like(k[0], dtype=wide_dtype), torch.empty_like(k[0], dtype=wide_dtype)
            table = torch.zeros(sizes.num_slots, sizes.blocks_a_row, dtype=torch.int32, device=device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            gib = 2 * torch.Size(shape).numel() * form.dtype.itemsize / 2**30
            raise CapacityError(
                f"KV cache of {sizes.num_blocks * sizes.block_size} tokens",
                got=f"{gib:.1f} GiB do not fit on {device}",
                next="Lower max_model_len, max_num_seqs or kv_cache_memory_bytes.",
            ) from error
        return cls(k, v, table, form.k_scale, form.v_scale, wide)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.k.shape[3]

    @property
    def num_slots(self) -> int:
        """Sequences that have a row."""
        return self.k.shape[1] if self.block_table is None else self.block_table.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have."""
        return self.block_size * (1 if self.block_table is None else self.block_table.shape[1])

    def narrowed(self, blocks_a_row: int) -> "KVCache":
        """Return the same cache for sequences of so many blocks, for kernels planned by how long one may be."""
        return self if self.block_table is None else replace(self, block_table=self.block_table[:, :blocks_a_row])

    def layer(self, index: int) -> LayerCache:
        """Return one layer's part."""
        scales = (None if scale is None else scale[index] for scale in (self.k_scale, self.v_scale))
        return LayerCache(self.k[index], self.v[index], *scales)

    def table_of(self, rows: Tensor) -> Tensor:
        """Return the blocks of some sequences, [rows, blocks a row]. rows: int64 [rows]."""
        return rows[:, None] if self.block_table is None else self.block_table[rows]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, of every layer, in stream order. pairs: (from, to)."""
        for source, target in pairs:
            for cache in (self.k, self.v):
                cache[:, target].copy_(cache[:, source])

    def set_blocks(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Write (row, place in the row, block) into the block table, in stream order. entries: some."""
        table = self.block_table
        assert table is not None
        runs: list[tuple[int, int, list[int]]] = []
        last, blocks = (-1, -1), list[int]()
        for row, at, block in entries:
            if row != last[0] or at != last[1] + 1:
                blocks = list[int]()
                runs.append((row, at, blocks))
            blocks.append(block)
            last = row, at
        # From pageable memory the driver copies before it returns, so the source may go.
        if len(runs) <= _COPIED_RUNS:
            for row, first, blocks in runs:
                row_part = table[row, first : first + len(blocks)]
                row_part.copy_(torch.tensor(blocks, dtype=table.dtype), non_blocking=True)
            return
        words = torch.tensor([(row * table.shape[1] + at, block) for row, at, block in entries], dtype=torch.int64)
        at, blocks = words.to(table.device, non_blocking=True).T
        table.view(-1).scatter_(0, at, blocks.int())
