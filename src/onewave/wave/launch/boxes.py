"""TMA descriptors of a launch of the wave kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onewave.wave.plan.layout import BLOCK_KEYS, TILE_BYTES, TileShape


def rows_box(matrix: Tensor, rows: int, *, swizzle: int) -> Any:
    """Describe boxes of `rows` whole rows of a matrix. swizzle: bytes."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle, matrix.element_size() * 8, 2)
    return TensorDescriptor.from_tensor(matrix, [rows, matrix.shape[1]], layout)


def keys_box(cache: Tensor) -> Any:
    """Describe tiles of keys, or of values, of a contiguous cache [layers, slots, kv_heads, capacity, head_dim].

    The cache is rows of 128 bytes. A box has 16 rows of each of 8 groups of 16 keys: with head_dim 128 and 16 bits, 8
    keys of each; 8 rows where a group has no more.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    group, across = 16 * cache.shape[-1], 128 // cache.itemsize
    rows = (cache.numel() - 7 * group) // across  # from which 7 groups more follow
    words = cache.view(torch.int8) if cache.itemsize == 1 else cache
    groups = words.as_strided((8, rows, across), (group, across, 1))
    box = [8, min(16, group // across), across]
    return TensorDescriptor.from_tensor(groups, box, gl.NVMMASharedLayout(128, 8 * cache.itemsize, 3))


def streams_keys(cache: Tensor, shape: TileShape) -> bool:
    """Whether a cache's keys can come through the ring.

    It needs tiles large enough, a whole block of keys, and row numbers within 32 bits.
    """
    holds = BLOCK_KEYS * cache.shape[-1] <= cache.numel() < 1 << 37
    return cache.shape[-1] in (64, 128) and shape.tile_bytes >= TILE_BYTES and holds
