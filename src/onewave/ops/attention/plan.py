"""The facts of a call that decide its attention kernel, and the resulting choice."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from onewave.base.device import Device
from onewave.ops.attention.hopper.plan import Schedule
from onewave.ops.attention.masks import Options
from onewave.ops.choice import Choice


class Facts(NamedTuple):
    """All that decides which kernel of a GPU runs a call, and how.

    batch: sequences of a packed batch, whose num_queries and num_keys are the longest's and whose queries are `tokens`
    in all. page_size: of keys in pages. strides: why TMA can't address a tensor, None if it can; keys_by_tma: whether
    it can address k and v. missing: why Triton can't compile Gluon, None if it can. plain: neither sinks nor LSE.
    """

    name: str
    backend: str
    device: Device
    dtype: torch.dtype
    options: Options
    batch: int
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    tokens: int | None = None
    page_size: int | None = None
    alibi: bool = False
    bias: torch.dtype | None = None
    strides: str | None = None
    keys_by_tma: bool = True
    missing: str | None = None
    plain: bool = True

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's."""
        assert self.device.capability is not None
        return self.device.capability

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def asked_for(self) -> bool:
        """Whether a backend is named, which needs no passed sweep."""
        return self.backend != "auto"


@dataclass(frozen=True)
class AttentionChoice(Choice):
    """backend: gluon (the Hopper kernel), triton, mma, torch or reference.

    The rest speaks of our kernels: a tile holds block_m rows (queries x packed_heads) and walks over block_n keys at a
    time; head_dim is computed in `width` columns. tiles: of a head, or of a group of packed heads; num_programs: the
    grid. descriptors: K and V come through tensor descriptors (TMA), not through pointers. max_registers: of a thread.
    copies_pages: pages are copied into rows first. schedule: how the Hopper kernels' tiles are dealt. splits: programs
    that share the key tiles of block_m rows; 1: one goes over all of them.
    """

    block_m: int = 0
    block_n: int = 0
    num_warps: int = 0
    num_stages: int = 0
    width: int = 0
    packed_heads: int = 1
    tiles: int = 0
    num_programs: int = 0
    descriptors: bool = False
    max_registers: int = 0
    copies_pages: bool = False
    schedule: Schedule | None = None
    splits: int = 1

    @property
    def tile(self) -> str | None:
        """Rows, keys, columns, warps and stages."""
        if not self.block_m:
            return None
        tile = f"{self.block_m} query rows x {self.block_n} keys x {self.width}"
        return f"{tile}, {self.num_warps} warps, {self.num_stages} stages"

    @property
    def split(self) -> str | None:
        """How many programs share the keys of a tile's rows."""
        if self.splits > 1:
            return (
                f"{self.splits} programs share the key tiles of {self.block_m} rows; a second kernel sums them in order"
            )
        return "none: a program walks over all keys of its rows" if self.block_m else None

    @property
    def programs(self) -> str | None:
        """The grid, and what it is made of."""
        if not self.block_m:
            return None
        each = f"group of {self.packed_heads} heads" if self.packed_heads > 1 else "head of a sequence"
        return f"{self.num_programs}, {self.tiles} tiles for each {each}"
