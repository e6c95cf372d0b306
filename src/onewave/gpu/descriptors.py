"""Descriptions of tensors for TMA, as Gluon kernels take them.

An axis of a descriptor has one stride, and its bounds are the tensor's. Packed sequences, whose rows end where the next
sequence's begin, get two axes more: see attention/hopper/kernel.py.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Bounds of a packed sequence's descriptor: see attention/hopper/kernel.py.
_RAGGED_END, RAGGED_ANY = 1 << 30, 0x7FFF0000


@lru_cache(maxsize=16)
def _layout(rank: int, bits: int, swizzle: int = 128) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def describable(tensor: Tensor) -> Tensor:
    """Return a matrix, or a copy of it that TMA can address: rows at multiples of 16 bytes."""
    fits = tensor.stride(1) == 1 and tensor.stride(0) * tensor.element_size() % 16 == 0
    fits = fits and tensor.stride(0) >= tensor.shape[1] and tensor.data_ptr() % 16 == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def describe_matrix(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of [rows, columns] of 1 or 2 bytes, in boxes of rows x columns; zeros beyond its bounds.

    The caller has checked that the tensor and its rows begin at multiples of 16 bytes. columns: 64 or 128 bytes.
    """
    described = copy(_described_matrix(tensor.shape, tensor.stride(0), tensor.dtype, rows, columns))
    described.base = tensor
    return described


@lru_cache(maxsize=1024)
def _described_matrix(
    sizes: tuple[int, ...], step: int, dtype: torch.dtype, rows: int, columns: int
) -> TensorDescriptor:
    """As _described, of a matrix."""
    layout = _layout(2, 8 * dtype.itemsize, dtype.itemsize * columns)
    return TensorDescriptor(torch.empty(1, dtype=dtype, device="cpu"), list(sizes), [step, 1], [rows, columns], layout)


def describe(tensor: Tensor, rows: int, columns: int, packed: bool = False) -> TensorDescriptor:
    """Descriptor of [batch, heads, rows, head_dim], in boxes of rows x columns of one head; zeros beyond its bounds.

    The caller has checked that the tensor begins at a multiple of 16 bytes; this does not check again.
    """
    described = copy(_described(tensor.shape, tensor.stride(), tensor.dtype, rows, columns, packed))
    described.base = tensor
    return described


@lru_cache(maxsize=1024)
def _described(
    sizes: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int, packed: bool
) -> TensorDescriptor:
    """The descriptor of such a tensor, but of no memory of its own: Triton looks at a descriptor for longer than it
    takes to copy one."""
    shape = list(sizes)
    # An axis of one element may have any stride; the descriptor wants an aligned one.
    strides = [columns if n == 1 else step for n, step in zip(shape, steps, strict=True)]
    strides[3] = 1
    if packed:
        row = strides[2]
        shape = [RAGGED_ANY, RAGGED_ANY, shape[1], _RAGGED_END, shape[3]]
        strides = [(1 << 34) - row, row, strides[1], row, 1]
    rank = len(shape)
    layout = _layout(rank, 8 * dtype.itemsize, min(128, dtype.itemsize * columns))
    stand_in = torch.empty(1, dtype=dtype, device="cpu")
    return TensorDescriptor(stand_in, shape, strides, [1] * (rank - 2) + [rows, columns], layout)


def describe_pages(tensor: Tensor, max_rows: int, columns: int = 64) -> TensorDescriptor:
    """Descriptor of pages [pages, page_size, kv_heads, head_dim], in boxes of a page, at most max_rows, x columns.

    Axes as of packed sequences: what is one's first row there is a page's here.
    """
    _, page_size, kv_heads, head_dim = tensor.shape
    row, head = tensor.stride(1), tensor.stride(2) if kv_heads > 1 else 8
    shape = [RAGGED_ANY, RAGGED_ANY, kv_heads, _RAGGED_END, head_dim]
    strides = [(1 << 34) - row, row, head, row, 1]
    box = [1, 1, 1, min(page_size, max_rows), columns]
    return TensorDescriptor(tensor, shape, strides, box, _layout(5, 16, 2 * columns))
