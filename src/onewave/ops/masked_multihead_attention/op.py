"""Masked multi-head attention: one decode step of one layer, from the fused projection to the quantised output."""

from typing import Any

import torch
from torch import Tensor

from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.decode_attention.call import Projection
from onewave.ops.library import checks_contents, is_watched, refuse_grad, register
from onewave.ops.masked_multihead_attention.call import (
    SCHEMA,
    MaskedCall,
    as_heads,
    check,
    check_lengths,
    masked_call,
    result_dtype,
)
from onewave.ops.masked_multihead_attention.choose import choose, switches

_NAME = "masked_multihead_attention"


def masked_multihead_attention(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    seq_lens: Tensor,
    *,
    bias: Tensor | None = None,
    src_mask: Tensor | None = None,
    finished: Tensor | None = None,
    rotary: Tensor | None = None,
    rotary_style: str = "neox",
    qkv_out_scale: Tensor | None = None,
    out_shift: Tensor | None = None,
    out_smooth: Tensor | None = None,
    out_scale: float | None = None,
    quant_round: str = "half_even",
    quant_max_bound: float = 127.0,
    quant_min_bound: float = -127.0,
    steps_per_block: int = 128,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Append one token a row to the cache and attend from it to the row's whole history.

    In this order: qkv times qkv_out_scale, plus bias; rotation of q and k; k and v into the cache at position
    seq_lens[row]; softmax(q.k * scale + src_mask) over keys 0 to seq_lens[row]; times v; (o + out_shift) * out_smooth;
    with out_scale clip(round(quant_max_bound * out_scale * o), quant_min_bound, quant_max_bound).

    With W = heads + 2 * kv_heads, the queries of all heads, then the keys, then the values:
    qkv: [rows, W, head_dim], [rows, 1, W, head_dim] or [rows, W * head_dim], in the cache's dtype or int32.
    cache_k, cache_v: [rows, kv_heads, capacity, head_dim] bf16|fp16 (float32 on a CPU), written in place; any strides
    with a contiguous last axis. cache_k may be packed, [rows, kv_heads, head_dim / x, capacity, x], x elements being 16
    bytes. A cache in one tensor [2, rows, kv_heads, capacity, head_dim] is passed as `*cache.unbind(0)`. head_dim: a
    multiple of 8 from 16 to 256, on a CPU any even one from 2.
    seq_lens: [rows] int32|int64, the history's length without the new token, less than capacity. A row whose length is
    negative, or that is true in finished ([rows] bool), is skipped: its cache stays, and so does its part of out.
    bias: [W, head_dim]. qkv_out_scale: [W, head_dim] float32, with int32 qkv only, and required by it.
    src_mask: [rows, 1 or heads, 1, keys], floats added to the scaled scores; at least as many keys as the longest row
    has with its new token. A head whose mask is -inf everywhere gives 0.
    rotary: [rows, rotary_dim] float32, cosines then sines of each row's position; pairs are (i, i + rotary_dim / 2) for
    "neox", (2i, 2i + 1) for "interleaved"; dimensions past rotary_dim are not rotated.
    out_shift, out_smooth: [heads, head_dim]. quant_round: "half_even" or "half_away" (from zero).
    steps_per_block: keys of a partial result of a short row, history // steps_per_block + 1 of them a head, rounded up
    to a power of two and at least a tile of 64 or 128; a long row takes several blocks together, so that few partial
    results have to be merged. It changes rounding alone, and a CPU has no use for it.
    scale: default 1/sqrt(head_dim). dtype: of the result, default the cache's; int8 where out_scale is given. backend:
    as decode_attention's, without "cpu".

    Returns out: [rows, heads, head_dim], with qkv's extra axis or flattened as qkv was. Without `out`, skipped rows are
    0 where finished is given and unspecified after a negative length. Sums in float32; q, k and v are rounded to the
    cache's dtype once, after the rotation, the result once. ONEWAVE_DEBUG=1 checks the lengths on a GPU, too.
    Raises ShapeError, UnsupportedError, InvalidArgumentError. Source: NVIDIA FasterTransformer's decoder attention.
    """
    half_away, interleaved = switches(quant_round, rotary_style)
    optional = {
        "bias": bias, "src_mask": src_mask, "finished": finished, "rotary": rotary, "qkv_out_scale": qkv_out_scale,
        "out_shift": out_shift, "out_smooth": out_smooth, "out": out,
    }  # fmt: skip
    checks.optional(_NAME, optional)
    checks.tensors(_NAME, qkv=qkv, cache_k=cache_k, cache_v=cache_v, seq_lens=seq_lens)
    checks.one_device(_NAME, qkv, (cache_k, cache_v, seq_lens, *optional.values()))
    x = as_heads(qkv, cache_k, cache_v)
    call = MaskedCall(
        x, cache_k, cache_v, seq_lens,
        Projection(
            bias, src_mask, finished, rotary, qkv_out_scale, out_shift, out_smooth, interleaved, out_scale, half_away,
            quant_max_bound, quant_min_bound,
        ),
        steps_per_block, scale, backend,
    )  # fmt: skip
    check(call)
    kind = result_dtype(call, qkv, dtype, out)
    heads, head_dim = call.num_heads, cache_v.shape[3]
    watched = is_watched(*call.tensors, out)
    if not watched and checks_contents():
        check_lengths(call)
    if out is not None:
        refuse_grad(f"{_NAME}: out=", *call.tensors, out)
        result = out[:, 0] if out.ndim == 4 else out.view(len(out), heads, head_dim) if out.ndim == 2 else out
    elif watched:
        result = None
    else:
        make = torch.empty if finished is None else torch.zeros
        result = make((x.shape[0], heads, head_dim), dtype=kind, device=x.device)
    call = _with_plain_numbers(call, result)
    result = _registered(call, kind) if watched else _run(call)
    if out is not None:
        return out
    return result[:, None] if qkv.ndim == 4 else result.flatten(1) if qkv.ndim == 2 else result


def _with_plain_numbers(call: MaskedCall, out: Tensor | None) -> MaskedCall:
    """The call that writes out, with Python's numbers: options may be NumPy's, and whole ones of any size."""
    fused = call.fused
    numbers = (fused.out_scale, call.scale)
    out_scale, scale = (x if x is None else float(x) for x in numbers)
    fused = fused._replace(out_scale=out_scale, max_bound=float(fused.max_bound), min_bound=float(fused.min_bound))
    steps = checks.as_whole(call.steps_per_block, 1 << 30)
    return MaskedCall(call.qkv, call.cache_k, call.cache_v, call.seq_lens, fused, steps, scale, call.backend, out)


def _run(call: MaskedCall) -> Tensor:
    """Write call.out and the cache with the implementation for the tensors' device."""
    assert call.out is not None
    choice = choose(call)
    if choice.backend == "reference":
        load(_NAME, choice.module).run(call, choice)
    else:  # decode attention's kernels, their prologue and epilogue switched on
        load("decode_attention", choice.module).run(call.decode, choice)
    return call.out


def _registered(call: MaskedCall, dtype: torch.dtype) -> Tensor:
    operands = (call.qkv, call.cache_k, call.cache_v, call.seq_lens)
    if call.out is None:
        return torch.ops.onewave.masked_multihead_attention(*operands, dtype, *call.flat)
    torch.ops.onewave.masked_multihead_attention_out(call.out, *operands, *call.flat)
    return call.out


def _library_out(out: Tensor, *flat: Any) -> None:
    _run(masked_call(*flat, out=out))


def _library(qkv: Tensor, cache_k: Tensor, cache_v: Tensor, seq_lens: Tensor, dtype: torch.dtype, *flat: Any) -> Tensor:
    # Zeros, because skipped rows are not written.
    out = torch.zeros_like(_fake(qkv, cache_k, cache_v, seq_lens, dtype))
    _library_out(out, qkv, cache_k, cache_v, seq_lens, *flat)
    return out


def _fake(
    qkv: Tensor, cache_k: Tensor, cache_v: Tensor, seq_lens: Tensor, dtype: torch.dtype, *_: object, **__: object
) -> Tensor:
    heads = qkv.shape[1] - 2 * cache_v.shape[1]
    return torch.empty((qkv.shape[0], heads, cache_v.shape[3]), dtype=dtype, device=qkv.device)


_OUT = f"(Tensor(a0!) out, Tensor qkv, Tensor(a2!) cache_k, Tensor(a3!) cache_v, Tensor seq_lens, {SCHEMA}) -> ()"
_NEW = f"(Tensor qkv, Tensor(a1!) cache_k, Tensor(a2!) cache_v, Tensor seq_lens, ScalarType dtype, {SCHEMA}) -> Tensor"
register(f"{_NAME}_out", _library_out, lambda *_: None, schema=_OUT, mutates=("out", "cache_k", "cache_v"))
register(_NAME, _library, _fake, schema=_NEW, mutates=("cache_k", "cache_v"))
