"""Masked multi-head attention: one decode step of one layer, from the fused projection to the quantised output."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, UnsupportedError, shown
from onewave.ops.attention.masks import as_whole
from onewave.ops.backends import load
from onewave.ops.library import checks_contents, is_watched, refuse_grad, register
from onewave.ops.masked_multihead_attention.checks import check_arguments, check_lengths

_NAME = "masked_multihead_attention"
_ROUNDINGS = {"half_even": False, "half_away": True}
_STYLES = {"neox": False, "interleaved": True}
MMHA_BACKENDS = ("auto", "gluon", "triton", "reference")


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
    multiple of 8 from 16 to 256.
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
    half_away, interleaved = (
        _choice("quant_round", quant_round, _ROUNDINGS),
        _choice("rotary_style", rotary_style, _STYLES),
    )
    heads, result_dtype = check_arguments(
        qkv, cache_k, cache_v, seq_lens, bias=bias, src_mask=src_mask, finished=finished, rotary=rotary,
        qkv_out_scale=qkv_out_scale, out_shift=out_shift, out_smooth=out_smooth, out_scale=out_scale,
        max_bound=quant_max_bound, min_bound=quant_min_bound, steps_per_block=steps_per_block, scale=scale,
        dtype=dtype, out=out,
    )  # fmt: skip
    _check_backend(backend, qkv)
    head_dim = cache_v.shape[3]
    # [rows, W, head_dim]; the result's view of the same form is made alike.
    x = (
        qkv[:, 0]
        if qkv.ndim == 4
        else qkv.reshape(len(qkv), heads + 2 * cache_v.shape[1], head_dim)
        if qkv.ndim == 2
        else qkv
    )
    tensors = (x, cache_k, cache_v, seq_lens, bias, src_mask, finished, rotary, qkv_out_scale, out_shift, out_smooth)
    # NumPy's numbers, too, and whole ones of any size.
    out_scale, scale = (x if x is None else float(x) for x in (out_scale, scale))
    bounds, steps_per_block = (float(quant_max_bound), float(quant_min_bound)), as_whole(steps_per_block, 1 << 30)
    options = (interleaved, out_scale, half_away, *bounds, steps_per_block, scale, backend)
    watched = is_watched(*tensors, out)
    if not watched and checks_contents():
        check_lengths(seq_lens, finished, cache_v.shape[2], src_mask)
    if out is not None:
        refuse_grad(f"{_NAME}: out=", *tensors, out)
        target = out[:, 0] if out.ndim == 4 else out.view(len(out), heads, head_dim) if out.ndim == 2 else out
        (torch.ops.onewave.masked_multihead_attention_out if watched else _run)(target, *tensors, *options)
        return out
    if watched:
        result = torch.ops.onewave.masked_multihead_attention(*tensors[:4], result_dtype, *tensors[4:], *options)
    else:
        make = torch.empty if finished is None else torch.zeros
        result = make((x.shape[0], heads, head_dim), dtype=result_dtype, device=x.device)
        _run(result, *tensors, *options)
    return result[:, None] if qkv.ndim == 4 else result.flatten(1) if qkv.ndim == 2 else result


def _choice(name: str, value: str, choices: dict[str, bool]) -> bool:
    if not isinstance(value, str) or value not in choices:  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
        raise InvalidArgumentError(f"{_NAME}: {name}", got=shown(value), allowed=" or ".join(map(repr, choices)))
    return choices[value]


def _check_backend(backend: str, qkv: Tensor) -> None:
    if backend not in MMHA_BACKENDS:
        raise InvalidArgumentError(f"{_NAME}: backend", got=shown(backend), allowed=", ".join(MMHA_BACKENDS))
    if backend in ("gluon", "triton") and not qkv.is_cuda:
        raise UnsupportedError(
            f"{_NAME} (backend={backend})", got=str(qkv.device), allowed="cuda", next='Use backend="auto".'
        )


def _run(
    out: Tensor,
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    seq_lens: Tensor,
    bias: Tensor | None,
    src_mask: Tensor | None,
    finished: Tensor | None,
    rotary: Tensor | None,
    qkv_out_scale: Tensor | None,
    out_shift: Tensor | None,
    out_smooth: Tensor | None,
    interleaved: bool,
    out_scale: float | None,
    half_away: bool,
    max_bound: float,
    min_bound: float,
    steps_per_block: int,
    scale: float | None,
    backend: str,
) -> None:
    """Write out [rows, heads, head_dim] and the cache with the implementation for the tensors' device."""
    use_triton = backend in ("gluon", "triton") or (backend == "auto" and qkv.is_cuda)
    if not use_triton:
        # The reference reads lengths on the host in any case, and must not write half a batch before it fails.
        check_lengths(seq_lens, finished, cache_v.shape[2], src_mask)
    load(_NAME, "triton_impl" if use_triton else "reference").masked_multihead_attention(
        out, qkv, cache_k, cache_v, seq_lens, bias=bias, src_mask=src_mask, finished=finished, rotary=rotary,
        interleaved=interleaved, qkv_out_scale=qkv_out_scale, out_shift=out_shift, out_smooth=out_smooth,
        out_scale=out_scale, half_away=half_away, max_bound=max_bound, min_bound=min_bound, scale=scale,
        **({"steps_per_block": steps_per_block, "backend": backend} if use_triton else {}),
    )  # fmt: skip


def _library_out(
    out: Tensor,
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    seq_lens: Tensor,
    bias: Tensor | None,
    src_mask: Tensor | None,
    finished: Tensor | None,
    rotary: Tensor | None,
    qkv_out_scale: Tensor | None,
    out_shift: Tensor | None,
    out_smooth: Tensor | None,
    interleaved: bool = False,
    out_scale: float | None = None,
    half_away: bool = False,
    max_bound: float = 127.0,
    min_bound: float = -127.0,
    steps_per_block: int = 128,
    scale: float | None = None,
    backend: str = "auto",
) -> None:
    _run(
        out, qkv, cache_k, cache_v, seq_lens, bias, src_mask, finished, rotary, qkv_out_scale, out_shift, out_smooth,
        interleaved, out_scale, half_away, max_bound, min_bound, steps_per_block, scale, backend,
    )  # fmt: skip


def _library(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    seq_lens: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    src_mask: Tensor | None,
    finished: Tensor | None,
    rotary: Tensor | None,
    qkv_out_scale: Tensor | None,
    out_shift: Tensor | None,
    out_smooth: Tensor | None,
    interleaved: bool = False,
    out_scale: float | None = None,
    half_away: bool = False,
    max_bound: float = 127.0,
    min_bound: float = -127.0,
    steps_per_block: int = 128,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    # Zeros, because skipped rows are not written.
    out = torch.zeros_like(_fake(qkv, cache_k, cache_v, seq_lens, dtype))
    _run(
        out, qkv, cache_k, cache_v, seq_lens, bias, src_mask, finished, rotary, qkv_out_scale, out_shift, out_smooth,
        interleaved, out_scale, half_away, max_bound, min_bound, steps_per_block, scale, backend,
    )  # fmt: skip
    return out


def _fake_out(*_: object, **__: object) -> None:
    return None


def _fake(
    qkv: Tensor, cache_k: Tensor, cache_v: Tensor, seq_lens: Tensor, dtype: torch.dtype, *_: object, **__: object
) -> Tensor:
    heads = qkv.shape[1] - 2 * cache_v.shape[1]
    return torch.empty((qkv.shape[0], heads, cache_v.shape[3]), dtype=dtype, device=qkv.device)


register(f"{_NAME}_out", _library_out, _fake_out, mutates=("out", "cache_k", "cache_v"))
register(_NAME, _library, _fake, mutates=("cache_k", "cache_v"))
