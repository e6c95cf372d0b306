"""Cached keys and values of 8 bits in 16 bits, where they lie: for attention kernels that read 16 bits alone."""

from __future__ import annotations

from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops import checks
from onewave.ops.dequantise_pages import reference


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
    """Write the pages that sequences use to the same pages of `out`, each number times its head's scale; return `out`.

    k, v: int8|float8_e4m3fn [pages, kv_heads, page_size, head_dim], contiguous. k_scale, v_scale: float32 [kv_heads];
    None: 1. block_table: int32 [sequences, pages a sequence], rows contiguous. cu_seqlens: int32 [sequences + 1], a
    sequence's keys, as if all lay one after another. out: keys and values like k, of 16 bits or more. Pages of no
    sequence stay as they are; of a sequence's last page all is written. A product is rounded once. Reads nothing
    back to the host. Raises ShapeError.
    """
    checks.tensors("dequantise_pages", k=k, v=v, block_table=block_table, cu_seqlens=cu_seqlens)
    shapes = [tuple(t.shape) for t in (k, v, *out)]
    if len(set(shapes)) != 1 or not all(t.is_contiguous() for t in (k, v, *out)):
        raise ShapeError("dequantise_pages: k, v, out", got=str(shapes), allowed="one shape, contiguous")
    if not k.is_cuda:
        return reference.dequantise_pages(k, v, k_scale, v_scale, block_table, cu_seqlens, out=out)
    from onewave.ops.dequantise_pages import triton_impl

    return triton_impl.dequantise_pages(k, v, k_scale, v_scale, block_table, cu_seqlens, out=out)
