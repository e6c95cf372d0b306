"""Prefill attention in float8 (e4m3) with a scale for each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.attention.checks import check_cu_seqlens, check_extras, check_packed, like
from onewave.ops.attention.fp8.plan import FP8_BACKENDS, check_sizes, fp8_refusal
from onewave.ops.attention.masks import Options, Window, options
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.attention.reference import attention as in_torch
from onewave.ops.attention.reference import attention_varlen as in_torch_varlen
from onewave.ops.backends import load
from onewave.ops.library import check_optional, check_tensors, is_watched, register

_NAME = "attention_fp8"
_OUTS = (torch.bfloat16, torch.float16)


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    align: str = "bottom-right",
    out_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """attention(q * q_scale, k * k_scale, v * v_scale), of tensors stored in float8_e4m3fn.

    q: [batch, heads, Sq, head_dim]; k, v: [batch, kv_heads, Sk, head_dim]; or, with cu_seqlens as attention_varlen
    takes them, [tokens, heads, head_dim] and [k_tokens, kv_heads, head_dim]. head_dim: a multiple of 16 up to 128.
    q_scale: float32 [heads], k_scale, v_scale: [kv_heads], greater than 0: what a stored 1 stands for; default 1. The
    other keywords are attention's. Returns out_dtype (bfloat16 or float16) in q's shape and, with return_lse, float32
    [batch, heads, Sq] or [heads, tokens].

    backend: auto, gluon (Hopper's kernel: products in float8, sums and the output in float32; a scratch copy of the
    values), reference (everything in float32). auto is gluon where a sweep on a card has covered it (tuned.json) and
    TMA can address the tensors; elsewhere, and on a CPU, attention of dequantised copies, in float32 on a CPU and in
    bfloat16 on a card.

    Hopper's kernel weighs values by e4m3 numbers, of 128 keys at a time relative to their highest score. Without
    return_lse their bits come straight from scores: within 8 % of what they should be down to 2^-14.75 of that score's
    weight, 0 from 2^-15.7 on. With it they are exponentials rounded to e4m3: within 6 % down to 2^-14, 0 from 2^-18 on;
    that takes about a tenth longer. Scores are taken up to 2^26 as powers of two; beyond, all weights may be 0.
    Raises ShapeError, UnsupportedError, InvalidArgumentError. Sources: Shah et al. 2024, arXiv:2407.08608; Schraudolph
    1999, Neural Computation 11(4).
    """
    packed = cu_seqlens_q is not None
    _check(q, k, v, packed, (q_scale, k_scale, v_scale), out_dtype, backend)
    wanted = options(
        _NAME, head_dim=q.shape[-1], causal=causal, scale=scale, window=window, softcap=softcap, align=align
    )
    if not wanted.scale > 0:
        raise InvalidArgumentError(f"{_NAME}: scale", got=str(wanted.scale), allowed="greater than 0")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise InvalidArgumentError(f"{_NAME}: cu_seqlens_q, cu_seqlens_k", got="one of them", allowed="both or none")
    watched = is_watched(q, k, v, q_scale, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k, sinks)
    sequences = q.shape[0]
    longest = (max_seqlen_q or 0, max_seqlen_k or 0)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        if max_seqlen_q is None or max_seqlen_k is None:
            # Rows beyond the longest sequence's stay unwritten: 0 would be none.
            got = f"{max_seqlen_q}, {max_seqlen_k} with cu_seqlens"
            raise InvalidArgumentError(f"{_NAME}: max_seqlen_q, max_seqlen_k", got=got, allowed="two numbers")
        longest = check_cu_seqlens(_NAME, q, k, cu_seqlens_q, cu_seqlens_k, longest)
        sequences = len(cu_seqlens_q) - 1
    check_extras(_NAME, q, sinks, None, None, batch=sequences, scores=(0, 0))
    scales = (
        _filled(q_scale, q.shape[1], q), _filled(k_scale, k.shape[1], q), _filled(v_scale, k.shape[1], q)
    )  # fmt: skip
    tensors = (q, k, v, *scales, cu_seqlens_q, cu_seqlens_k, *longest, sinks)
    plain = (wanted.scale, wanted.left, wanted.right, wanted.top_left, wanted.softcap, out_dtype, backend, return_lse)
    run = torch.ops.onewave.attention_fp8 if watched else _run
    result, lse = run(*tensors, *plain)
    return (result, lse) if return_lse else result


def _check(
    q: Tensor, k: Tensor, v: Tensor, packed: bool, scales: tuple[Tensor | None, ...], out_dtype: torch.dtype,
    backend: str,
) -> None:  # fmt: skip
    check_tensors(_NAME, q=q, k=k, v=v)
    check_optional(_NAME, dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)))
    if backend not in FP8_BACKENDS:
        raise InvalidArgumentError(f"{_NAME}: backend", got=shown(backend), allowed=", ".join(FP8_BACKENDS))
    if out_dtype not in _OUTS:
        raise UnsupportedError(f"{_NAME}: out_dtype", got=str(out_dtype), allowed="torch.bfloat16, torch.float16")
    rank = 3 if packed else 4
    layout = "tokens, heads, head_dim" if packed else "batch, heads, seq, head_dim"
    shapes = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if any(t.ndim != rank for t in (q, k, v)):
        raise ShapeError(f"{_NAME}: q, k, v", got=shapes, allowed=f"[{layout}] each")
    if k.shape != v.shape or k.shape[-1] != q.shape[-1] or (not packed and k.shape[0] != q.shape[0]):
        raise ShapeError(f"{_NAME}: q, k, v", got=shapes, allowed="k and v of one shape, and batch and head_dim of q")
    check_sizes(q.shape[1], k.shape[1], q.shape[-1])
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype is not torch.float8_e4m3fn:
            raise UnsupportedError(f"{_NAME}: dtype of {label}", got=str(tensor.dtype), allowed="torch.float8_e4m3fn")
        if tensor.device != q.device:
            got = f"{q.device} and {tensor.device}"
            raise UnsupportedError(f"{_NAME}: devices", got=got, allowed="one device for all tensors")
        if tensor.stride(-1) != 1 and tensor.numel() > 0:
            got = f"strides {tensor.stride()}"
            raise ShapeError(f"{_NAME}: {label}", got=got, allowed="a contiguous last axis", next="Call .contiguous().")
    for label, tensor, heads in zip(("q", "k", "v"), scales, (q.shape[1], k.shape[1], k.shape[1]), strict=True):
        if tensor is None:
            continue
        if tensor.shape != (heads,) or tensor.dtype is not torch.float32 or tensor.device != q.device:
            got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise ShapeError(f"{_NAME}: {label}_scale", got=got, allowed=f"float32 [{heads}] on {q.device}")


def _filled(scale: Tensor | None, heads: int, q: Tensor) -> Tensor:
    return torch.ones(heads, dtype=torch.float32, device=q.device) if scale is None else scale.contiguous()


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    top_left: bool,
    softcap: float | None,
    out_dtype: torch.dtype,
    backend: str,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The LSE has no elements unless it is asked for."""
    wanted = Options(scale, left, right, top_left, softcap)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        check_packed(_NAME, q, k, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), wanted)
    reason = _refusal(q, k, v, asked_for=backend == "gluon")
    if backend == "gluon" and reason is not None:
        raise UnsupportedError(f"{_NAME} (backend=gluon)", got=reason, next='Use backend="auto".')
    if backend == "reference" or reason is not None:
        given: dict[str, Any] = {
            "scale": scale, "window": (left, right), "softcap": softcap, "sinks": sinks,
            "align": "top-left" if top_left else "bottom-right",
        }  # fmt: skip
        exact = backend == "reference"
        # float16 would not hold what legal scales make of float8.
        dtype = torch.float32 if exact or q.is_cpu else torch.bfloat16
        q, k, v = (_stored_as(t, s, dtype) for t, s in ((q, q_scale), (k, k_scale), (v, v_scale)))
        if cu_seqlens_q is None or cu_seqlens_k is None:
            result = in_torch(q, k, v, **given) if exact else attention(q, k, v, return_lse=with_lse, **given)
        elif exact:
            result = in_torch_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **given)
        else:
            starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            result = attention_varlen(q, k, v, *starts, return_lse=with_lse, **given)
        out, lse = result if isinstance(result, tuple) else (result, _empty_lse(q, with_lse=False))
        return out.to(out_dtype), lse if with_lse else _empty_lse(q, with_lse=False)
    out = like(q, out_dtype)
    lse = _empty_lse(q, with_lse=with_lse)
    rows = [out, q, k, v]
    row_lse = lse if with_lse else None
    packing: dict[str, Any] = {}
    if cu_seqlens_q is not None:
        rows = [tensor.transpose(0, 1)[None] for tensor in rows]
        row_lse = lse[None] if with_lse else None
        packing = {"starts_q": cu_seqlens_q, "starts_k": cu_seqlens_k, "longest": max_seqlen_q}
    launch = load("attention", "fp8.launch").attention
    dense = None if sinks is None else sinks.contiguous()
    launch(rows[0], row_lse, *rows[1:], (q_scale, k_scale, v_scale), wanted, sinks=dense, **packing)
    return out, lse


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, asked_for: bool) -> str | None:
    """Why Hopper's kernel does not run a call, None if it does. asked_for: by name, which needs no passed sweep."""
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    reason = fp8_refusal(capability, asked_for=asked_for)
    if reason is not None:
        return reason
    try:
        return load("attention", "hopper.launch").undescribable(q, k, v)
    except ImportError as error:
        return f"the Hopper kernel needs Triton 3.6's Gluon: {error}"


def _stored_as(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # [heads] beside [.., heads, seq, head_dim] or [tokens, heads, head_dim].
    shape = (-1, 1, 1) if tensor.ndim == 4 else (-1, 1)
    return (tensor.float() * scale.view(shape)).to(dtype)


def _empty_lse(q: Tensor, *, with_lse: bool) -> Tensor:
    if not with_lse:
        shape: tuple[int, ...] = (0,)
    else:
        shape = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _fake(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    dtype, _, with_lse = others[-3:]
    assert isinstance(dtype, torch.dtype)
    return like(q, dtype), _empty_lse(q, with_lse=bool(with_lse))


register(_NAME, _run, _fake)
