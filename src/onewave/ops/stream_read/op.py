"""Read a buffer once, as fast as memory gives it: the read ceiling of a device."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops.stream_read import reference

GRANULE = 16384
"""A CUDA buffer's length is a multiple of this many elements (64 KiB), so that no load needs a mask."""


def stream_read(buffer: Tensor) -> Tensor:
    """Add up every element.

    buffer: int32 [elements], contiguous; on CUDA a multiple of GRANULE elements. Returns int32 partial sums, one for
    each program that read; their sum modulo 2^32 is the sum of the buffer modulo 2^32. Raises ShapeError,
    UnsupportedError.
    """
    if buffer.dtype != torch.int32:
        raise UnsupportedError("stream_read: buffer", got=str(buffer.dtype), allowed="torch.int32")
    if buffer.ndim != 1 or not buffer.is_contiguous():
        raise ShapeError("stream_read: buffer", got=str(tuple(buffer.shape)), allowed="[elements], contiguous")
    if not buffer.is_cuda:
        return reference.stream_read(buffer)
    if len(buffer) == 0 or len(buffer) % GRANULE:
        raise ShapeError("stream_read: elements", got=str(len(buffer)), allowed=f"a multiple of {GRANULE}")
    from onewave.ops.stream_read import triton_impl

    return triton_impl.stream_read(buffer)
