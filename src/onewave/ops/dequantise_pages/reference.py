"""The reference of `dequantise_pages`, in plain PyTorch."""

import torch
from torch import Tensor


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
    """See op.dequantise_pages; reads the lengths on the host."""
    used = -(-cu_seqlens.diff().cpu() // k.shape[2])
    pages = torch.cat([row[:count] for row, count in zip(block_table.cpu(), used.tolist(), strict=True)]).long()
    for cache, scale, target in zip((k, v), (k_scale, v_scale), out, strict=True):
        # PyTorch can't index float8 everywhere; its bytes it can.
        found = cache.view(torch.uint8)[pages].view(cache.dtype).float()
        target[pages] = (found if scale is None else found * scale[:, None, None]).to(target.dtype)
    return out
