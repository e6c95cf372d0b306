"""The packed layout of cached keys, to and from the plain one.

Packed, x = 16 / itemsize elements of a key lie together and the keys of a chunk follow each other, so that a warp whose
threads each own a key reads 16 bytes a thread without gaps. Packing moves elements and changes none.
"""

from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops import checks

_CHUNK_BYTES = 16


def chunk_size(k: Tensor) -> int:
    """x: how many of the tensor's elements are 16 bytes."""
    return _CHUNK_BYTES // k.element_size()


def pack_k(k: Tensor) -> Tensor:
    """Copy keys [rows, kv_heads, capacity, head_dim] into [rows, kv_heads, head_dim / x, capacity, x], bit for bit.

    Any dtype of 1, 2, 4 or 8 bytes, any strides; x = 16 / itemsize must divide head_dim. Raises ShapeError.
    """
    checks.tensors("pack_k", k=k)
    x = chunk_size(k)
    if k.ndim != 4 or k.shape[-1] % x:
        raise ShapeError(
            "pack_k: k", got=str(tuple(k.shape)), allowed=f"[rows, kv_heads, capacity, a multiple of {x} for {k.dtype}]"
        )
    return k.reshape(*k.shape[:3], k.shape[3] // x, x).transpose(2, 3).contiguous()


def unpack_k(packed: Tensor) -> Tensor:
    """Copy packed keys [rows, kv_heads, head_dim / x, capacity, x] back into [rows, kv_heads, capacity, head_dim].

    Raises ShapeError where the last axis is not the dtype's x.
    """
    checks.tensors("unpack_k", packed=packed)
    x = chunk_size(packed)
    if packed.ndim != 5 or packed.shape[-1] != x:
        raise ShapeError(
            "unpack_k: packed",
            got=str(tuple(packed.shape)),
            allowed=f"[rows, kv_heads, head_dim / {x}, capacity, {x}] for {packed.dtype}",
        )
    return packed.transpose(2, 3).flatten(3).contiguous()


def key_rows(k_cache: Tensor) -> Tensor:
    """A view of a cache of either layout whose axes are [rows, kv_heads, capacity, chunks, elements of a chunk].

    Writing to it writes the cache. A plain cache is one chunk.
    """
    return k_cache.transpose(2, 3) if k_cache.ndim == 5 else k_cache.unsqueeze(3)
