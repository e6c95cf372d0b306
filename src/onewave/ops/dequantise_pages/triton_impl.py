"""dequantise_pages in Triton.

A program takes every `num_programs(1)`-th page of one sequence and one KV head, keys and values: [page_size, head_dim]
bytes that lie together. Programs without a page end at once, so the grid needs no lengths. A page that several
sequences share is written by each, with the same bits. Bound: memory, 3 bytes a number.

constexpr  meaning [unit] (allowed values)
CHUNK      numbers that a program holds of keys, and of values (powers of two)
HAS_SCALE  whether there are scales (False, True)
PDL        whether launches overlap (programmatic dependent launch; False, True)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.dependent_launch import after_last, dependent_launch
from onewave.gpu.launch import launch_kernel

# Programs a sequence and KV head. More give a long prompt more of the GPU, and a pass of few tokens more that end at
# once: 16 sequences x 8 heads x 32 are 4,096.
_MAX_PROGRAMS = 32
_CHUNK = 4096


@triton.jit
def dequantise_pages_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, starts_ptr, k_out_ptr, v_out_ptr, stride_table, page_size,
    head_numbers, CHUNK: tl.constexpr, HAS_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """head_numbers: of a page and KV head, page_size * head_dim."""
    after_last(PDL)
    head, sequence = tl.program_id(0), tl.program_id(2)
    keys = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence)
    k_scale, v_scale = 1.0, 1.0
    if HAS_SCALE:
        k_scale, v_scale = tl.load(k_scale_ptr + head), tl.load(v_scale_ptr + head)
    for nth in range(tl.program_id(1), tl.cdiv(keys, page_size), tl.num_programs(1)):
        page = tl.load(table_ptr + sequence * stride_table + nth).to(tl.int64)
        first = (page * tl.num_programs(0) + head) * head_numbers
        for begin in range(0, head_numbers, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            inside = at < head_numbers
            k = tl.load(k_ptr + first + at, mask=inside).to(tl.float32) * k_scale
            v = tl.load(v_ptr + first + at, mask=inside).to(tl.float32) * v_scale
            tl.store(k_out_ptr + first + at, k.to(k_out_ptr.dtype.element_ty), mask=inside)
            tl.store(v_out_ptr + first + at, v.to(v_out_ptr.dtype.element_ty), mask=inside)


def dequantise_pages(
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor,
    cu_seqlens: Tensor,
    *,
    out: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """See op.dequantise_pages."""
    sequences, most = block_table.shape
    grid = (k.shape[1], min(most, _MAX_PROGRAMS), sequences)
    launch_kernel(dequantise_pages_kernel, grid,
        k, v, k if k_scale is None else k_scale, v if v_scale is None else v_scale, block_table, cu_seqlens, *out,
        block_table.stride(0), k.shape[2], k.shape[2] * k.shape[3],
        CHUNK=_CHUNK, HAS_SCALE=k_scale is not None, **dependent_launch(k),
    )  # fmt: skip
    return out
