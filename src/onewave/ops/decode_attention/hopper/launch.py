"""Launches Hopper's decode kernel: describes a cache's keys and values to TMA."""

from typing import Any

import torch

from onewave.gpu.descriptors import describe
from onewave.gpu.launch import launch_kernel
from onewave.ops.decode_attention.call import DecodeCall
from onewave.ops.decode_attention.choose import DecodeChoice
from onewave.ops.decode_attention.hopper.kernel import stream_kernel
from onewave.ops.decode_attention.hopper.parts import columns_across
from onewave.ops.decode_attention.hopper.plan import stream_tile

_KV = {torch.int8: 1, torch.float8_e4m3fn: 2}


def launch_stream(call: DecodeCall, choice: DecodeChoice, arguments: dict[str, Any]) -> None:
    """Run the kernel on what hopper.plan.refusal allows. arguments: those that split_kv_kernel has, too, by name."""
    plan, k, v, table = choice.plan, call.k_cache, call.v_cache, call.block_table
    paging, page = 0, 0
    if table is not None and table.shape[1] == 1:
        paging = 1
    elif table is not None and v.shape[2] % plan.block_n == 0:
        paging = 2
    elif table is not None:
        paging, page = 3, v.shape[2]
    kv, shares = _KV.get(k.dtype, 0), choice.num_shares
    tile = stream_tile(choice.rows, choice.capacity, shares, k.element_size())
    box = (page, columns_across(kv, plan.block_d)) if page else (plan.block_n, plan.block_d)
    launch_kernel(stream_kernel, (shares, k.shape[1] * plan.tiles),
        describe(k, *box), describe(v, *box), **arguments, k=k, v=v,
        stride_k_block=k.stride(0), stride_k_head=k.stride(1), stride_k_key=k.stride(2),
        stride_v_block=v.stride(0), stride_v_head=v.stride(1), stride_v_key=v.stride(2),
        KV=kv, KV_SCALES=call.k_scale is not None, PAGING=paging, PAGE=page, STAGES=tile.stages,
        FLIGHT=tile.flight, LOADER=tile.loader,
        num_warps=4, maxnreg=tile.registers, launch_pdl=True,
    )  # fmt: skip
