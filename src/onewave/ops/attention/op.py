"""Prefill attention over whole tensors or packed sequences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onewave.ops.attention.call import (
    DENSE_SCHEMA,
    PACKED_SCHEMA,
    AttentionCall,
    Extras,
    dense_call,
    empty_lse,
    like,
    packed_call,
)
from onewave.ops.attention.checks import check, check_lengths, check_ranks, packing
from onewave.ops.attention.choose import choose
from onewave.ops.attention.masks import Window, options
from onewave.ops.attention.pages import with_rows_of_pages
from onewave.ops.attention.plan import AttentionChoice
from onewave.ops.backends import load
from onewave.ops.library import is_watched, refuse_grad, register
from onewave.ops.prepared import prepared

_NAME, _VARLEN = "attention", "attention_varlen"


@prepared
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    align: str = "bottom-right",
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale + bias) v, over the keys that each query may see.

    q: [batch, heads, Sq, head_dim]; k, v: [batch, kv_heads, Sk, head_dim]; Sq, Sk >= 0; bf16 or fp16, on a CPU also
    fp32; head_dim a multiple of 8 from 16 (backend="torch": 8) to 256, on a CPU any even one from 2; any strides (0 for
    expanded axes) with a contiguous last axis. Query head h reads KV head h // (heads / kv_heads).

    align: query i stands at key i + Sk - Sq ("bottom-right": the last query at the last key) or at key i ("top-left").
    causal: a query sees no key beyond its place. window: a number of keys, the query's place and those to its left (the
    right is open unless causal), or (left, right) as flash-attn has it: keys place - left .. place + right, -1 or None
    for no limit. scale: default 1/sqrt(head_dim). Scores then take, in this order: softcap * tanh(score / softcap), for
    caps from 1e-6 to 10,000; ALiBi, - slope * |place - key| with alibi_slopes float32 [heads] or [batch, heads]; bias,
    float (added; only -inf hides) or bool (True is seen), broadcastable to [batch, heads, Sq, Sk]. sinks: [heads], a
    logit that carries no value.

    Returns [batch, heads, Sq, head_dim] in q's dtype and order of axes in memory, or out, which is written; with
    return_lse also the natural-log sum of exponentials, float32 [batch, heads, Sq], sinks included. A row that sees no
    key gives 0 and -inf. Sums in float32; P is rounded to v's dtype. On a GPU a row's bits depend neither on the
    batch nor on the other queries. Keys that no query sees may hold NaN. Our kernels read nothing back on a GPU and
    allocate nothing but the results. backend: auto, triton, gluon (Hopper's kernel), mma (the one of few registers: no
    ALiBi, no bias), torch (PyTorch's SDPA), reference. On a GPU auto takes Hopper's kernel for what a sweep there has
    covered: by dtype, head_dim, options and strides, never by lengths, and ops.explain tells; never mma. A CPU uses
    SDPA for what it can say.
    Forward only: backward raises UnsupportedError. Raises ShapeError, UnsupportedError, InvalidArgumentError. Source:
    Dao 2023, arXiv:2307.08691.
    """
    check_ranks(_NAME, q, k, v, packed=False)
    wanted = options(
        _NAME, head_dim=q.shape[3], causal=causal, scale=scale, window=window, softcap=softcap, align=align
    )
    call = AttentionCall(q, k, v, Extras(sinks, alibi_slopes, bias), wanted, backend, None, out)
    check(call)
    return answer(call, return_lse)


@prepared
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    align: str = "bottom-right",
    block_table: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of sequences that lie one after another, without padding; on a GPU bit for bit the same as each
    alone by the same kernel.

    q: [tokens, heads, head_dim]; k, v: [k_tokens, kv_heads, head_dim] (tokens before heads, other than `attention`).
    cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1] on q's device, each sequence's first row, and the end of the last.
    max_seqlen_q: at least the longest sequence's queries (rows beyond it stay unwritten); max_seqlen_k: of its keys.
    The keywords are attention's, with Sq and Sk of the row's own sequence; alibi_slopes [heads] or [sequences, heads];
    bias broadcasts to [sequences, heads, max_seqlen_q, max_seqlen_k]. Returns [tokens, heads, head_dim], with
    return_lse also float32 [heads, tokens]. Tokens outside every sequence are not written.
    block_table: int32 [sequences, pages a sequence]; then k and v are pages [pages, page_size, kv_heads, head_dim], key
    i of a sequence stands in row i % page_size of its page block_table[.., i // page_size], and cu_seqlens_k counts as
    if they lay one after another. Pages that no query sees and rows after a sequence's last key are not read, and table
    entries of neither. Hopper's kernel reads pages of 16, 32, 64, 128 or 256 keys in place, a CPU's loops any (float32,
    head_dim a multiple of 16, no softcap, sinks, ALiBi or bias; a row's bits depend on its own sequence alone); others
    get a copy. One sequence of at most 64 tokens over 1,024 keys and more takes two kernels that share its keys among
    the SMs, with the same bits: bf16, head_dim 128, pages of 128, causal alone, and no more than 64 MiB of weights
    (64 tokens of 32 heads: 16,384 keys).
    On a CPU, and with ONEWAVE_DEBUG=1, which synchronises, contents of both are checked. Raises ShapeError,
    UnsupportedError, InvalidArgumentError.
    """
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    pages = None if block_table is None else (k, v, block_table)
    if pages is None:
        check_ranks(_VARLEN, q, k, v, packed=True)
    packed = packing(_VARLEN, starts, longest, pages=pages)
    if pages is not None:
        check_ranks(_VARLEN, q, k[:, 0], v[:, 0], packed=True)
    wanted = options(
        _VARLEN, head_dim=q.shape[2], causal=causal, scale=scale, window=window, softcap=softcap, align=align
    )
    call = AttentionCall(q, k, v, Extras(sinks, alibi_slopes, bias), wanted, backend, packed, out)
    check(call)
    return answer(call, return_lse)


def run(call: AttentionCall, choose: Callable[[Any], AttentionChoice] = choose) -> Tensor:
    """Run what is chosen for a checked call: write and return its output, and its LSE."""
    check_lengths(call)
    choice = choose(call)
    if choice.copies_pages:
        call = with_rows_of_pages(call)
    return load(_NAME, choice.module).run(call, choice)


def answer(call: AttentionCall, return_lse: bool, run: Callable[[Any], Tensor] = run) -> Tensor | tuple[Tensor, Tensor]:
    """Run a checked call, as a registered operator where something watches."""
    out, lse = call.out, None
    if out is not None:
        refuse_grad(f"{call.name}: out=", *call.tensors, out)
    if not is_watched(*call.tensors, out):
        lse = empty_lse(call.q) if return_lse else None
        result = run(call if lse is None else replace(call, lse=lse))
    elif out is None:
        result, lse = getattr(torch.ops.onewave, call.name)(*call.flat)
    else:
        result, lse = out, empty_lse(call.q)
        getattr(torch.ops.onewave, f"{call.name}_out")(out, lse, *call.flat)
    return result if lse is None or not return_lse else (result, lse)


def _fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return like(q), empty_lse(q)


def _register(name: str, schema: str, made: Callable[..., AttentionCall]) -> None:
    """Register an operator and its variant with out=."""

    def library(*flat: Any) -> tuple[Tensor, Tensor]:
        lse = empty_lse(flat[0])
        return run(made(*flat, lse=lse)), lse

    def library_out(out: Tensor, lse: Tensor, *flat: Any) -> None:
        run(made(*flat, out=out, lse=lse))

    register(name, library, _fake, schema=f"({schema}) -> (Tensor, Tensor)")
    written = f"(Tensor(a0!) out, Tensor(a1!) lse, {schema}) -> ()"
    register(f"{name}_out", library_out, lambda *_: None, schema=written, mutates=("out", "lse"))


_register(_NAME, DENSE_SCHEMA, dense_call)
_register(_VARLEN, PACKED_SCHEMA, packed_call)
