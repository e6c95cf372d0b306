"""Prefill attention in float8 (e4m3) with a scale for each head."""

from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError
from onewave.ops import checks
from onewave.ops.attention.call import Extras, Packed
from onewave.ops.attention.checks import check_ranks, packing
from onewave.ops.attention.fp8.call import SCHEMA, Fp8Call, check, fp8_call, lse_of
from onewave.ops.attention.fp8.choose import choose
from onewave.ops.attention.masks import Window, options
from onewave.ops.attention.op import answer, run
from onewave.ops.library import register
from onewave.ops.prepared import prepared

_NAME = "attention_fp8"


@prepared
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
    values), reference (everything in float32). auto is gluon where a sweep on a GPU has covered it (tuned.json) and
    TMA can address the tensors; elsewhere, and on a CPU, attention of dequantised copies, in float32 on a CPU and in
    bfloat16 on a GPU.

    Hopper's kernel weighs values by e4m3 numbers, of 128 keys at a time relative to their highest score. Without
    return_lse their bits come straight from scores: within 8 % of what they should be down to 2^-14.75 of that score's
    weight, 0 from 2^-15.7 on. With it they are exponentials rounded to e4m3: within 6 % down to 2^-14, 0 from 2^-18 on;
    that takes about a tenth longer. Scores are taken up to 2^26 as powers of two; beyond, all weights may be 0.
    Raises ShapeError, UnsupportedError, InvalidArgumentError. Sources: Shah et al. 2024, arXiv:2407.08608; Schraudolph
    1999, Neural Computation 11(4).
    """
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    check_ranks(_NAME, q, k, v, packed=cu_seqlens_q is not None)
    wanted = options(
        _NAME, head_dim=q.shape[-1], causal=causal, scale=scale, window=window, softcap=softcap, align=align
    )
    call = Fp8Call(
        q, k, v, Extras(sinks), wanted, backend, _packing(starts, longest), scales=(q_scale, k_scale, v_scale),
        out_dtype=out_dtype, with_lse=return_lse,
    )  # fmt: skip
    check(call)
    return answer(call, return_lse, _run)


def _packing(starts: tuple[Tensor | None, Tensor | None], longest: tuple[int | None, int | None]) -> Packed | None:
    starts_q, starts_k = starts
    if starts_q is None and starts_k is None:
        return None
    checks.together(_NAME, "cu_seqlens_q, cu_seqlens_k", starts_q, starts_k)
    assert starts_q is not None
    assert starts_k is not None
    longest_q, longest_k = longest
    if longest_q is None or longest_k is None:
        # Rows beyond the longest sequence's stay unwritten: 0 would be none.
        got = f"{longest_q}, {longest_k} with cu_seqlens"
        raise InvalidArgumentError(f"{_NAME}: max_seqlen_q, max_seqlen_k", got=got, allowed="two numbers")
    return packing(_NAME, (starts_q, starts_k), (longest_q, longest_k))


def _run(call: Fp8Call) -> Tensor:
    return run(call, choose)


def _library(*flat: Any) -> tuple[Tensor, Tensor]:
    """The LSE has no elements unless it is asked for."""
    q, *_, with_lse = flat
    lse = lse_of(q, with_lse=with_lse)
    return _run(fp8_call(*flat, lse=lse if with_lse else None)), lse


def _fake(*flat: Any) -> tuple[Tensor, Tensor]:
    call = fp8_call(*flat)
    return call.output(), lse_of(call.q, with_lse=call.with_lse)


register(_NAME, _library, _fake, schema=f"({SCHEMA}) -> (Tensor, Tensor)")
