"""Launches the split-KV kernel for decode attention and for masked multi-head attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onewave.base.device import capability, num_sms
from onewave.base.errors import UnsupportedError
from onewave.gpu.dependent_launch import has_dependent_launch
from onewave.gpu.launch import launch_kernel
from onewave.gpu.scratch import counters, scratch
from onewave.ops.backends import load
from onewave.ops.decode_attention.hopper.plan import StreamCall, refusal, undescribable
from onewave.ops.decode_attention.triton.plan import MOST_ROWS_LOOKED_AT, DecodePlan, plan_decode
from onewave.ops.decode_attention.triton.split_kv import split_kv_kernel

LOG2E = 1.4426950408889634
NO_WINDOW = 1 << 30
MOST_REGISTERS = 255
_PIECE_BYTES = 16
# Keys that one instruction asks for where they lie side by side.
_KEYS_AT_ONCE = 8
# A tile, and those that are loaded ahead.
_MOST_KEYS_PAST = 1024


@dataclass(frozen=True)
class FusedProjection:
    """The prologue and epilogue of masked multi-head attention; see op.masked_multihead_attention for the shapes.

    qkv: [rows, (heads + 2 kv_heads) * head_dim] contiguous. rotary: [rows, rotary_dim] float32, cosines then sines.
    src_mask: [rows, 1 or heads, keys]. A row of length t has its new token appended at t; negative lengths are skipped,
    and rows for which finished, [rows] bool, is true.
    """

    qkv: Tensor
    num_heads: int
    bias: Tensor | None
    qkv_out_scale: Tensor | None
    rotary: Tensor | None
    interleaved: bool
    finished: Tensor | None
    src_mask: Tensor | None
    out_shift: Tensor | None
    out_smooth: Tensor | None
    out_scale: float | None
    max_bound: float
    min_bound: float
    half_away: bool


def decode_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    split_size: int | None,
    backend: str = "triton",
) -> None:
    """Write out [rows, heads, queries, head_dim] and, if given, lse; see op.decode_attention. backend: see launch."""
    if k_cache.dtype is torch.float8_e4m3fn and k_cache.is_cuda and capability(k_cache.device) < (8, 9):
        raise UnsupportedError("decode_attention: float8 cache", got="a card before sm_89", next="Use an int8 cache.")
    launch(
        out, lse, q, k_cache, v_cache, seq_lens, block_table=block_table, k_scale=k_scale, v_scale=v_scale, scale=scale,
        window=window, softcap=softcap, sinks=sinks, split_size=split_size, fused=None, backend=backend,
    )  # fmt: skip


def launch(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    split_size: int | None,
    fused: FusedProjection | None,
    smallest_split: int | None = None,
    backend: str = "triton",
) -> None:
    """Run the kernel on checked arguments: with q, or with fused, whose seq_lens do not count the new token.

    split_size: keys of every split; smallest_split: of a short row's, see plan.py. backend: "triton", split_kv_impl's
    kernel; "gluon", stream_impl's, which gives the same bits; "auto", the latter where stream_plan.refusal allows it.
    Raises UnsupportedError where "gluon" is asked for and refused.
    """
    rows, num_heads, num_queries, head_dim = out.shape
    if out.numel() == 0:
        return
    # The kernels count these one after another.
    seq_lens = seq_lens.contiguous()
    block_table, k_scale, v_scale, sinks = map(_dense, (block_table, k_scale, v_scale, sinks))
    num_kv_heads, block_size = v_cache.shape[1], v_cache.shape[2]
    capacity = block_size if block_table is None else block_table.shape[1] * block_size
    counted_in = _counted_in(k_cache, v_cache)
    plan = plan_decode(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_queries=num_queries,
        head_dim=head_dim,
        capacity=capacity,
        kv_itemsize=k_cache.element_size(),
        split_size=split_size,
        windowed=window is not None,
        smallest_split=smallest_split,
        in_pieces=counted_in is not None,
    )
    streams = False
    if backend != "triton":
        refused = refusal(_stream_call(out, q, k_cache, v_cache, block_table, k_scale is not None, fused), plan)
        refused = refused or _without_gluon()
        streams = refused is None
        assert counted_in is not None or not streams, "what TMA reads is aligned"
        if backend == "gluon" and refused is not None:
            raise UnsupportedError("decode attention (backend=gluon)", got=refused, next='Use backend="auto".')
    many = rows > MOST_ROWS_LOOKED_AT
    outputs, floats = _partial_floats(plan, rows, num_kv_heads)
    shared = plan.max_splits > 1 and not many  # whether a row may be several programs'
    room = scratch(out.device, floats if shared else 0)
    f = fused
    mask = None if f is None else f.src_mask
    rotary = None if f is None else f.rotary
    finished = None if f is None or f.finished is None else f.finished.view(torch.uint8)
    stride_q = (0, 0, 0) if q is None else q.stride()[:3]
    stride_out = out.stride()
    pdl = has_dependent_launch(out)
    tensors: dict[str, Tensor | None] = {
        "q": q, "lengths": seq_lens, "finished": finished, "table": block_table, "sinks": sinks, "mask": mask,
        "qkv": f and f.qkv, "bias": f and f.bias, "qkv_scale": f and f.qkv_out_scale, "rotary": rotary,
        "shift": f and f.out_shift, "smooth": f and f.out_smooth, "out": out, "lse": lse, "part": room,
        "stats": room[outputs:], "counters": counters(out.device, rows * num_kv_heads * plan.tiles) if shared else None,
    }  # fmt: skip
    numbers: dict[str, Any] = {
        "num_queries": num_queries, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
        "capacity": capacity, "block_size": block_size, "max_splits": plan.max_splits, "num_rows": rows,
        "window": NO_WINDOW if window is None else min(window, NO_WINDOW), "target": plan.target,
        "half": 0 if rotary is None else rotary.shape[1] // 2,
        "scale_log2": (head_dim**-0.5 if scale is None else scale) * LOG2E,
        "softcap": 0.0 if softcap is None else softcap * LOG2E,
        "out_scale": 1.0 if f is None or f.out_scale is None else f.out_scale,
        "max_bound": 0.0 if f is None else f.max_bound, "min_bound": 0.0 if f is None else f.min_bound,
        "stride_q_row": stride_q[0], "stride_q_head": stride_q[1], "stride_q_query": stride_q[2],
        "stride_out_row": stride_out[0], "stride_out_head": stride_out[1], "stride_out_query": stride_out[2],
        "stride_mask_row": 0 if mask is None else mask.stride(0),
        "stride_mask_head": 0 if mask is None or mask.shape[1] == 1 else mask.stride(1),
        "stride_table": 0 if block_table is None else block_table.stride(0),
    }  # fmt: skip
    constants: dict[str, Any] = {
        "GROUP": num_heads // num_kv_heads, "TILES": plan.tiles, "SPLIT": plan.split,
        "LOG_SMALLEST": plan.smallest.bit_length() - 1, "DOUBLINGS": plan.doublings, "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n, "BLOCK_D": plan.block_d, "BLOCK_H": plan.block_h, "ONE_QUERY": num_queries == 1,
        "HAS_SOFTCAP": softcap is not None, "HAS_SINKS": sinks is not None, "HAS_MASK": mask is not None,
        "HAS_LSE": lse is not None, "FUSED": f is not None, "HAS_FINISHED": finished is not None,
        "HAS_BIAS": f is not None and f.bias is not None,
        "HAS_QKV_SCALE": f is not None and f.qkv_out_scale is not None,
        "INTERLEAVED": f is not None and f.interleaved,
        "IN_EIGHTS": f is not None and not f.interleaved and numbers["half"] % 8 == 0,
        "HAS_SHIFT": f is not None and f.out_shift is not None,
        "HAS_SMOOTH": f is not None and f.out_smooth is not None, "QUANTISED": out.dtype is torch.int8,
        "HALF_AWAY": f is not None and f.half_away, "ROWS": plan.rows_looked_at(rows), "MANY": many,
        "WIDE": rows * capacity >= 1 << 31, "UNROLL": plan.unroll if streams else plan.unroll_by_triton, "PDL": pdl,
        # The compiler's: whether a product is rounded before something is added would differ from kernel to kernel.
        "enable_fp_fusion": False,
    }  # fmt: skip
    tensors = {name: seq_lens if tensor is None else tensor for name, tensor in tensors.items()}
    if streams:
        del constants["TILES"], constants["MANY"], constants["PDL"]
        load("decode_attention", "hopper.launch").launch_stream(
            plan, rows, k_cache, v_cache, block_table, {**tensors, **numbers, **constants}
        )
        return
    packed = k_cache.ndim == 5
    # Only a program with several rows has one to ask for.
    at_once = keys_at_once(k_cache, v_cache, block_table) if pdl and rows > 1 and not many else 0
    unit = counted_in or 1
    of_k, of_v = _steps(k_cache), _steps(v_cache)
    strides = {
        "k_block": of_k[0], "k_head": of_k[1], "k_key": of_k[3 if packed else 2], "k_chunk": of_k[2] if packed else 0,
        "v_block": of_v[0], "v_head": of_v[1], "v_key": of_v[2],
    }  # fmt: skip
    launch_kernel(split_kv_kernel, (plan.shares(rows, num_sms(out.device)), num_kv_heads * plan.tiles),
        **{f"{name}_ptr": tensor for name, tensor in tensors.items()}, **constants,
        **numbers | {"head_dim": head_dim // unit},
        **{f"stride_{name}": stride // unit for name, stride in strides.items()},
        k_ptr=k_cache, v_ptr=v_cache, k_scale_ptr=seq_lens if k_scale is None else k_scale,
        v_scale_ptr=seq_lens if v_scale is None else v_scale, UNIT=unit,
        NUM_STAGES=plan.num_stages, CHUNK=k_cache.shape[-1], PAGING=_paging(plan, block_table, block_size),
        KV_SCALES=k_scale is not None, NARROW=narrow(k_cache, v_cache), TRIGGER=plan.trigger,
        AHEAD=plan.ahead if at_once else 0, AT_ONCE=at_once,
        # Told that it may, ptxas uses more registers, and schedules loads earlier, without leaving any out of them.
        num_warps=plan.num_warps, maxnreg=MOST_REGISTERS, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _dense(tensor: Tensor | None) -> Tensor | None:
    """The same with its last axis contiguous."""
    return tensor if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


@cache
def _without_gluon() -> str | None:
    """Why Triton can't compile Hopper's kernel, None if it can."""
    try:
        load("decode_attention", "hopper.launch")
    except ImportError as error:
        return f"needs Triton 3.6's Gluon: {error}"
    return None


def _stream_call(
    out: Tensor,
    q: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor | None,
    scaled: bool,
    fused: FusedProjection | None,
) -> StreamCall:
    """The call as stream_plan sees it."""
    given = fused.qkv if q is None and fused is not None else out if q is None else q
    return StreamCall(
        capability(out.device), len(out), str(given.dtype).removeprefix("torch."),
        str(k_cache.dtype).removeprefix("torch."), k_cache.ndim == 5, v_cache.shape[2],
        block_table is not None and block_table.shape[1] != 1, scaled, undescribable(k_cache, v_cache),
    )  # fmt: skip


def _partial_floats(plan: DecodePlan, rows: int, num_kv_heads: int) -> tuple[int, int]:
    """Floats of scratch that the partial outputs of `rows` take, and with their maxima and sums.

    Behind the last there is room for as many partials as are loaded at a time.
    """
    partials = rows * num_kv_heads * plan.tiles * plan.max_splits * plan.block_h
    behind = plan.unroll * plan.block_h * plan.block_d
    return partials * plan.block_d, partials * (plan.block_d + 2) + behind


def keys_at_once(k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> int:
    """Keys that one instruction brings into the second-level cache, 0 where the cache's form does not allow it."""
    if k_cache.ndim != 4 or not (block_table is None or block_table.shape[1] == 1):
        return 0
    item, head_dim = k_cache.element_size(), k_cache.shape[3]
    for keys in (k_cache, v_cache):
        if keys.data_ptr() % 16 or any(stride * item % 16 for stride in (*keys.stride()[:3], head_dim)):
            return 0
    return _KEYS_AT_ONCE if k_cache.stride(2) == v_cache.stride(2) == head_dim else 1


def _counted_in(k_cache: Tensor, v_cache: Tensor) -> int | None:
    """Elements that the Triton kernel counts head_dim and strides in, so that its compiler knows how they are aligned:
    1 where all are multiples of 16, which Triton sees itself, 8 where they are of 8. None where rows begin anywhere."""
    numbers = (v_cache.shape[3], *_steps(k_cache), *_steps(v_cache))
    if any(n % 8 for n in numbers) or any(keys.data_ptr() % _PIECE_BYTES for keys in (k_cache, v_cache)):
        return None
    return 8 if any(n % 16 for n in numbers) else 1


def _steps(cache: Tensor) -> list[int]:
    """Strides of all axes but the last, 0 of one that is 1 long: then it may be anything, and nobody takes it."""
    return [0 if size == 1 else step for size, step in zip(cache.shape[:-1], cache.stride(), strict=False)]


def narrow(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether 32 bits count the elements of a head in a block, those of a tile that reaches past it included."""
    packed = k_cache.ndim == 5
    k_stride, v_stride = k_cache.stride(3 if packed else 2), v_cache.stride(2)
    most_keys = v_cache.shape[2] + _MOST_KEYS_PAST
    chunks = k_cache.shape[2] * k_cache.stride(2) if packed else 0
    return max(most_keys * k_stride + chunks, most_keys * v_stride) + v_cache.shape[3] < 1 << 31


def _paging(plan: DecodePlan, block_table: Tensor | None, block_size: int) -> int:
    """The kernel's PAGING: how a key's block is found."""
    if block_table is None:
        return 0
    if block_table.shape[1] == 1:
        return 1
    return 2 if block_size % plan.block_n == 0 else 3
