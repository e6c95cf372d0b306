"""dequantise_pages in Triton.

All sequences' pages are one list, of which a program takes every `num_programs(1)`-th: of each CHUNK numbers of one KV
head's keys, and as many of its values. So a long prompt has all of the GPU whatever else a pass could hold, and only
programs beyond the list end at once. A page that several sequences share is written by each, with the same bits. Bound:
memory, 3 bytes a number.

constexpr  meaning [unit] (allowed values)
SEQUENCES  sequences, padded (a power of two)
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

# About eight an SM of a large GPU, whose bytes under way keep its memory busy.
_PROGRAMS = 1024
# Eight numbers a thread: so many bytes are loaded at once, and twice as many stored, without passing them on.
_CHUNK, _WARPS = 2048, 8


@triton.jit
def dequantise_pages_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, starts_ptr, k_out_ptr, v_out_ptr, stride_table, page_size,
    head_numbers, num_heads, num_sequences,
    SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, HAS_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """head_numbers: of a page and KV head, page_size * head_dim."""
    after_last(PDL)
    row = tl.arange(0, SEQUENCES)
    here = row < num_sequences
    keys = tl.load(starts_ptr + row + 1, mask=here, other=0) - tl.load(starts_ptr + row, mask=here, other=0)
    ends = tl.cumsum(tl.cdiv(keys, page_size), axis=0)
    head = tl.program_id(0) % num_heads
    at = tl.program_id(0) // num_heads * CHUNK + tl.arange(0, CHUNK)
    inside = at < head_numbers
    k_scale, v_scale = 1.0, 1.0
    if HAS_SCALE:
        k_scale, v_scale = tl.load(k_scale_ptr + head), tl.load(v_scale_ptr + head)
    for nth in range(tl.program_id(1), tl.max(ends, axis=0), tl.num_programs(1)):
        before = ends <= nth
        sequence, begin = tl.sum(before.to(tl.int32), axis=0), tl.max(tl.where(before, ends, 0), axis=0)
        page = tl.load(table_ptr + sequence * stride_table + nth - begin).to(tl.int64)
        first = (page * num_heads + head) * head_numbers
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
    num_heads, head_numbers = k.shape[1], k.shape[2] * k.shape[3]
    of_a_page = num_heads * -(-head_numbers // _CHUNK)
    grid = (of_a_page, max(1, min(sequences * most, _PROGRAMS // of_a_page)))
    launch_kernel(dequantise_pages_kernel, grid,
        k, v, k if k_scale is None else k_scale, v if v_scale is None else v_scale, block_table, cu_seqlens, *out,
        block_table.stride(0), k.shape[2], head_numbers, num_heads, sequences,
        SEQUENCES=triton.next_power_of_2(sequences), CHUNK=_CHUNK, HAS_SCALE=k_scale is not None, num_warps=_WARPS,
        **dependent_launch(k),
    )  # fmt: skip
    return out
