"""Calls of decode attention: split-KV by Triton and Hopper's kernel, plain and with a fused projection (mmha)."""

import mmap
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from kit.calls.call import Call, empty
from onewave.ops.decode_attention.op import decode_attention
from onewave.ops.masked_multihead_attention.op import masked_multihead_attention

_HEADS = (32, 8)
# Linux's MAP_NORESERVE, which Python names from 3.13 on.
_NO_RESERVE = 0x4000


def _cache(
    rows: int, heads: int, keys: int, head_dim: int, padding: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Make a cache of any size: pages of memory that nobody touches are none."""
    shape = (rows, heads, keys, head_dim + padding)
    size = prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)[..., :head_dim]


def plain(
    rows: int = 16, *, head_dim: int = 128, queries: int = 1, heads: tuple[int, int] = _HEADS, capacity: int = 4096,
    cache: torch.dtype = torch.bfloat16, padding: int = 0, page: int = 0, extras: bool = False, **options: Any,
) -> None:  # fmt: skip
    """padding: elements between rows of the cache. page: keys of a page. extras: softcap, sinks and LSE."""
    q = empty(rows, heads[0], queries, head_dim)
    keys, blocks = page or capacity, 64 if page else rows
    k, v = (_cache(blocks, heads[1], keys, head_dim, padding, cache) for _ in range(2))
    lengths = torch.full((rows,), 100, dtype=torch.int64, device="cuda")
    if page:
        options["block_table"] = empty(rows, capacity // page, dtype=torch.int64)
    if cache != torch.bfloat16:
        options |= {"k_scale": empty(heads[1], dtype=torch.float32), "v_scale": empty(heads[1], dtype=torch.float32)}
    if extras:
        options |= {"softcap": 30.0, "sinks": empty(heads[0]), "return_lse": True}
    decode_attention(q, k, v, lengths, **options)


def fused(
    rows: int = 16, *, head_dim: int = 128, mask: torch.dtype | None = None, finished: bool = False,
    capacity: int = 4096, rotates: bool = True, int8: bool = False, **options: Any,
) -> None:  # fmt: skip
    """mask: dtype of the mask, with which come bias, shift and smoothing. int8: the result's, rounded half away from
    zero, of an interleaved rotation. rotates: whether there is one at all."""
    heads, kv_heads = _HEADS
    width = heads + 2 * kv_heads
    k, v = (_cache(rows, kv_heads, capacity, head_dim) for _ in range(2))
    lengths = torch.full((rows,), 100, dtype=torch.int64, device="cuda")
    if mask is not None:
        options |= {"src_mask": empty(rows, 1, 1, capacity, dtype=mask), "bias": empty(width, head_dim)}
        options |= {name: empty(heads, head_dim, dtype=torch.float32) for name in ("out_shift", "out_smooth")}
    if finished:
        options["finished"] = torch.zeros(rows, dtype=torch.bool, device="cuda")
    if rotates:
        options["rotary"] = empty(rows, head_dim, dtype=torch.float32)
    if int8:
        options |= {"out_scale": 0.5, "quant_round": "half_away", "rotary_style": "interleaved"}
    masked_multihead_attention(empty(rows, width, head_dim), k, v, lengths, **options)


def _triton(make: Any = plain, *given: Any, capability: tuple[int, int] = (9, 0), **options: Any) -> Call:
    return Call(partial(make, *given, backend="triton", **options), capability)


def _gluon(make: Any = plain, *given: Any, **options: Any) -> Call:
    return Call(partial(make, *given, backend="gluon", **options))


_FLOAT, _HALF, _BRAIN = torch.float32, torch.float16, torch.bfloat16
TRITON = {
    "1 row": _triton(plain, 1),
    "1 row mmha": _triton(fused, 1),
    "16 rows": _triton(),
    "16 rows D64": _triton(head_dim=64),
    "16 rows D256": _triton(head_dim=256),
    "16 rows 8 queries": _triton(queries=8),
    "16 rows 8 queries int8": _triton(queries=8, cache=torch.int8),
    "16 rows 5 queries D40": _triton(queries=5, head_dim=40),
    "16 rows 8 queries D120 pages of 16": _triton(queries=8, head_dim=120, page=16),
    "16 rows D64 odd": _triton(head_dim=64, padding=1),
    "16 rows 5 queries D64 odd": _triton(queries=5, head_dim=64, padding=1),
    "16 rows 8 queries odd pages of 8 softcap sinks lse": _triton(queries=8, padding=1, page=8, extras=True),
    "300 rows": _triton(plain, 300),
    "1 row H1 D64 K131072": _triton(plain, 1, heads=(1, 1), head_dim=64, capacity=131072),
    "16 rows pages of 16": _triton(page=16),
    "16 rows int8": _triton(cache=torch.int8),
    "16 rows float8": _triton(cache=torch.float8_e4m3fn),
    "16 rows softcap sinks lse": _triton(extras=True),
    "16 rows mmha fp32 mask": _triton(fused, mask=_FLOAT),
    "16 rows mmha bf16 mask": _triton(fused, mask=_BRAIN),
    "16 rows mmha D64 fp16 mask": _triton(fused, head_dim=64, mask=_HALF),
    "1 row mmha bf16 mask": _triton(fused, 1, mask=_BRAIN),
    "16 rows mmha fp32 mask int8 out": _triton(fused, mask=_FLOAT, int8=True),
    "16 rows sm_80": _triton(capability=(8, 0)),
}
GLUON = {
    "1 row": _gluon(plain, 1),
    "16 rows": _gluon(),
    "16 rows D64": _gluon(head_dim=64),
    "128 rows pages of 16": _gluon(plain, 128, capacity=1 << 24, page=16),
    "128 rows": _gluon(plain, 128, capacity=1 << 24),
    "256 rows": _gluon(plain, 256, capacity=1 << 23),
    "256 rows pages of 256": _gluon(plain, 256, capacity=1 << 23, page=256),
    "1 row pages of 16": _gluon(plain, 1, page=16),
    "16 rows pages of 16": _gluon(page=16),
    "16 rows 2 queries softcap sinks lse": _gluon(queries=2, extras=True),
    "16 rows int8": _gluon(cache=torch.int8),
    "16 rows float8": _gluon(cache=torch.float8_e4m3fn),
    "1 row float8": _gluon(plain, 1, cache=torch.float8_e4m3fn),
    "16 rows D64 int8": _gluon(head_dim=64, cache=torch.int8),
    "1 row D64 float8": _gluon(plain, 1, head_dim=64, cache=torch.float8_e4m3fn),
    "256 rows D64 float8 pages of 128": _gluon(plain, 256, head_dim=64, cache=torch.float8_e4m3fn, page=128),
    "16 rows D64 float8 pages of 16": _gluon(head_dim=64, cache=torch.float8_e4m3fn, page=16),
    "256 rows float8 pages of 128": _gluon(plain, 256, cache=torch.float8_e4m3fn, page=128),
    "16 rows mmha fp32 mask finished": _gluon(fused, mask=_FLOAT, finished=True),
    "1 row mmha": _gluon(fused, 1),
    "1 row mmha fp32 mask finished": _gluon(fused, 1, mask=_FLOAT, finished=True),
    "128 rows mmha fp32 mask finished": _gluon(fused, 128, mask=_FLOAT, finished=True, capacity=1 << 24),
    "16 rows mmha fp32 mask finished int8 out": _gluon(fused, mask=_FLOAT, finished=True, int8=True),
}
DECODE: dict[str, Call] = {
    f"decode {kernel} {name}": call
    for kernel, calls in (("triton", TRITON), ("gluon", GLUON))
    for name, call in calls.items()
}
