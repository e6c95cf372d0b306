"""Launches stream_impl's kernel: describes a cache's keys and values to TMA, and says how many programs share them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onewave.base.device import num_sms
from onewave.gpu.descriptors import describe
from onewave.gpu.launch import launch_kernel
from onewave.ops.decode_attention.hopper.kernel import stream_kernel
from onewave.ops.decode_attention.hopper.plan import stream_tile
from onewave.ops.decode_attention.triton.plan import DecodePlan

# Columns in which swizzled shared memory repeats.
_ACROSS = 64


def launch_stream(
    plan: DecodePlan, rows: int, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, arguments: dict[str, Any]
) -> None:
    """Run the kernel on what stream_plan.refusal allows. arguments: those that split_kv_kernel has, too, by name."""
    paging, page = 0, 0
    if block_table is not None and block_table.shape[1] == 1:
        paging = 1
    elif block_table is not None and v_cache.shape[2] % plan.block_n == 0:
        paging = 2
    elif block_table is not None:
        paging, page = 3, v_cache.shape[2]
    shares = plan.shares(rows, num_sms(k_cache.device))
    tile = stream_tile(rows, arguments["capacity"], shares)
    box = (page, _ACROSS) if page else (plan.block_n, plan.block_d)
    launch_kernel(stream_kernel, (shares, k_cache.shape[1]),
        describe(k_cache, *box), describe(v_cache, *box), **arguments, k=k_cache, v=v_cache,
        stride_k_block=k_cache.stride(0), stride_k_head=k_cache.stride(1), stride_k_key=k_cache.stride(2),
        stride_v_block=v_cache.stride(0), stride_v_head=v_cache.stride(1), stride_v_key=v_cache.stride(2),
        PAGING=paging, PAGE=page, STAGES=tile.stages, FLIGHT=tile.flight, LOADER=tile.loader,
        num_warps=4, maxnreg=tile.registers, launch_pdl=True,
    )  # fmt: skip
