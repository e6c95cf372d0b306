"""Launches the split-KV kernel for decode attention and for masked multi-head attention."""

from typing import Any

import torch
from torch import Tensor

from onewave.gpu.dependent_launch import has_dependent_launch
from onewave.gpu.grid import grid_of
from onewave.gpu.launch import launch_kernel
from onewave.gpu.scratch import counters, scratch
from onewave.ops.backends import load
from onewave.ops.decode_attention.call import DecodeCall, Projection
from onewave.ops.decode_attention.choose import DecodeChoice, steps
from onewave.ops.decode_attention.triton.plan import MAX_ROWS_LOOKED_AT, DecodePlan
from onewave.ops.decode_attention.triton.split_kv import split_kv_kernel

LOG2E = 1.4426950408889634
NO_WINDOW = 1 << 30
MAX_REGISTERS = 255
# Keys that one instruction asks for where they lie side by side.
_KEYS_AT_ONCE = 8
_NO_PROJECTION = Projection(max_bound=0.0, min_bound=0.0)
# A tile, and those that are loaded ahead.
_MAX_KEYS_PAST = 1024


def run(call: DecodeCall, choice: DecodeChoice) -> tuple[Tensor, Tensor | None]:
    """Run the kernel that was chosen; return (out, lse). Both kernels give the same bits."""
    out = call.output()
    lse = call.new_lse() if call.wants_lse and call.lse is None else call.lse
    rows, num_heads, num_queries, head_dim = out.shape
    if out.numel() == 0:
        return out, lse
    q, k_cache, v_cache, window, softcap = call.q, call.k_cache, call.v_cache, call.window, call.softcap
    # The kernels count these one after another.
    seq_lens = call.seq_lens.contiguous()
    block_table, k_scale, v_scale, sinks = map(_dense, (call.block_table, call.k_scale, call.v_scale, call.sinks))
    num_kv_heads, block_size, capacity = v_cache.shape[1], v_cache.shape[2], choice.capacity
    plan, streams = choice.plan, choice.streams
    many = rows > MAX_ROWS_LOOKED_AT
    outputs, floats = _partial_floats(plan, rows, num_kv_heads)
    shared = plan.max_splits > 1 and not many  # whether a row may be several programs'
    room = scratch(out.device, floats if shared else 0)
    fused = call.fused is not None
    f = call.fused or _NO_PROJECTION
    mask = None if f.src_mask is None else f.src_mask[:, :, 0]
    finished = None if f.finished is None else f.finished.contiguous().view(torch.uint8)
    half = 0 if f.rotary is None else f.rotary.shape[1] // 2
    stride_q = (0, 0, 0) if fused else q.stride()
    stride_out = out.stride()
    pdl = has_dependent_launch(out)
    tensors: dict[str, Tensor | None] = {
        "q": None if fused else q, "lengths": seq_lens, "finished": finished, "table": block_table, "sinks": sinks,
        "mask": mask, "qkv": q.contiguous() if fused else None, "bias": _contiguous(f.bias),
        "qkv_scale": _contiguous(f.qkv_out_scale), "rotary": _contiguous(f.rotary),
        "shift": _contiguous(f.out_shift), "smooth": _contiguous(f.out_smooth), "out": out, "lse": lse, "part": room,
        "stats": room[outputs:], "counters": counters(out.device, rows * num_kv_heads * plan.tiles) if shared else None,
    }  # fmt: skip
    numbers: dict[str, Any] = {
        "num_queries": num_queries, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
        "capacity": capacity, "block_size": block_size, "max_splits": plan.max_splits, "num_rows": rows,
        "window": NO_WINDOW if window is None else min(window, NO_WINDOW), "half": half,
        "scale_log2": (head_dim**-0.5 if call.scale is None else call.scale) * LOG2E,
        "softcap": 0.0 if softcap is None else softcap * LOG2E,
        "out_scale": 1.0 if f.out_scale is None else f.out_scale,
        "max_bound": f.max_bound, "min_bound": f.min_bound,
        "stride_q_row": stride_q[0], "stride_q_head": stride_q[1], "stride_q_query": stride_q[2],
        "stride_out_row": stride_out[0], "stride_out_head": stride_out[1], "stride_out_query": stride_out[2],
        "stride_mask_row": 0 if mask is None else mask.stride(0),
        "stride_mask_head": 0 if mask is None or mask.shape[1] == 1 else mask.stride(1),
        "stride_table": 0 if block_table is None else block_table.stride(0),
    }  # fmt: skip
    constants: dict[str, Any] = {
        "GROUP": num_heads // num_kv_heads, "TILES": plan.tiles, "SPLIT": plan.split,
        "LOG_SMALLEST": plan.smallest.bit_length() - 1, "LIMITS": plan.limits, "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n, "BLOCK_D": plan.block_d, "BLOCK_H": plan.block_h, "ONE_QUERY": num_queries == 1,
        "HAS_SOFTCAP": softcap is not None, "HAS_SINKS": sinks is not None, "HAS_MASK": mask is not None,
        "HAS_LSE": lse is not None, "FUSED": fused, "HAS_FINISHED": finished is not None,
        "HAS_BIAS": f.bias is not None, "HAS_QKV_SCALE": f.qkv_out_scale is not None, "INTERLEAVED": f.interleaved,
        "IN_EIGHTS": fused and not f.interleaved and half % 8 == 0, "HAS_SHIFT": f.out_shift is not None,
        "HAS_SMOOTH": f.out_smooth is not None, "QUANTISED": out.dtype is torch.int8,
        "HALF_AWAY": f.half_away, "ROWS": plan.rows_looked_at(rows), "MANY": many,
        "WIDE": rows * capacity >= 1 << 31, "UNROLL": plan.unroll if streams else plan.unroll_by_triton, "PDL": pdl,
        # The compiler's: whether a product is rounded before something is added would differ from kernel to kernel.
        "enable_fp_fusion": False,
    }  # fmt: skip
    tensors = {name: seq_lens if tensor is None else tensor for name, tensor in tensors.items()}
    if streams:
        del constants["MANY"], constants["PDL"]
        arguments = {**tensors, **numbers, **constants, "k_scale": k_scale, "v_scale": v_scale}
        load("decode_attention", "hopper.launch").launch_stream(call, choice, arguments)
        return out, lse
    packed = k_cache.ndim == 5
    # Only a program with several rows has one to ask for.
    at_once = keys_at_once(k_cache, v_cache, block_table) if pdl and rows > 1 and not many else 0
    unit = choice.counted_in or 1
    of_k, of_v = steps(k_cache), steps(v_cache)
    strides = {
        "k_block": of_k[0], "k_head": of_k[1], "k_key": of_k[3 if packed else 2], "k_chunk": of_k[2] if packed else 0,
        "v_block": of_v[0], "v_head": of_v[1], "v_key": of_v[2],
    }  # fmt: skip
    grid, axis = grid_of(choice.num_shares, num_kv_heads * plan.tiles)
    launch_kernel(split_kv_kernel, grid,
        **tensors, **constants,
        **numbers | {"head_dim": head_dim // unit},
        **{f"stride_{name}": stride // unit for name, stride in strides.items()},
        k=k_cache, v=v_cache, k_scale=seq_lens if k_scale is None else k_scale,
        v_scale=seq_lens if v_scale is None else v_scale, UNIT=unit, AXIS=axis,
        NUM_STAGES=plan.num_stages, CHUNK=k_cache.shape[-1], PAGING=_paging(plan, block_table, block_size),
        KV_SCALES=k_scale is not None, NARROW=narrow(k_cache, v_cache), TRIGGER=plan.trigger,
        AHEAD=plan.ahead if at_once else 0, AT_ONCE=at_once,
        # Told that it may, ptxas uses more registers, and schedules loads earlier, without leaving any out of them.
        num_warps=plan.num_warps, maxnreg=MAX_REGISTERS, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out, lse


def _dense(tensor: Tensor | None) -> Tensor | None:
    """The same with its last axis contiguous."""
    return tensor if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _partial_floats(plan: DecodePlan, rows: int, num_kv_heads: int) -> tuple[int, int]:
    """Floats of scratch that the partial outputs of `rows` take, and with their maxima and sums.

    Behind the last there is room for as many partials as are loaded at a time.
    """
    partials = rows * num_kv_heads * plan.tiles * plan.max_splits * plan.block_h
    behind = plan.unroll * plan.block_h * plan.block_d
    return partials * plan.block_d, partials * (plan.block_d + 2) + behind


def keys_at_once(k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> int:
    """Keys that one instruction brings into L2, 0 where the cache's form does not allow it."""
    if k_cache.ndim != 4 or not (block_table is None or block_table.shape[1] == 1):
        return 0
    item, head_dim = k_cache.element_size(), k_cache.shape[3]
    for keys in (k_cache, v_cache):
        if keys.data_ptr() % 16 or any(stride * item % 16 for stride in (*keys.stride()[:3], head_dim)):
            return 0
    return _KEYS_AT_ONCE if k_cache.stride(2) == v_cache.stride(2) == head_dim else 1


def narrow(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether 32 bits count the elements of a head in a block, those of a tile that reaches past it included."""
    packed = k_cache.ndim == 5
    k_stride, v_stride = k_cache.stride(3 if packed else 2), v_cache.stride(2)
    max_keys = v_cache.shape[2] + _MAX_KEYS_PAST
    chunks = k_cache.shape[2] * k_cache.stride(2) if packed else 0
    return max(max_keys * k_stride + chunks, max_keys * v_stride) + v_cache.shape[3] < 1 << 31


def _paging(plan: DecodePlan, block_table: Tensor | None, block_size: int) -> int:
    """The kernel's PAGING: how a key's block is found."""
    if block_table is None:
        return 0
    if block_table.shape[1] == 1:
        return 1
    return 2 if block_size % plan.block_n == 0 else 3
