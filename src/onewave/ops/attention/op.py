"""Prefill attention over whole tensors or packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.device import num_sms
from onewave.base.errors import InvalidArgumentError, UnsupportedError, shown
from onewave.ops.attention.checks import check_cu_seqlens, check_extras, check_out, check_packed, check_qkv, like
from onewave.ops.attention.hopper.plan import HopperCall, refusal
from onewave.ops.attention.masks import Options, Window, options, rows_of_sequences
from onewave.ops.attention.mma.plan import mma_refusal
from onewave.ops.attention.pages import check_pages, ragged_from_pages
from onewave.ops.attention.triton.plan import BACKENDS, AttentionPlan, plan_attention, plan_on_mma, plan_on_torch
from onewave.ops.backends import load
from onewave.ops.library import is_watched, refuse_grad, register

_NAME, _VARLEN = "attention", "attention_varlen"
# Which of our kernels, the plan says.
_PLANNED = "planned"


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
    fp32; head_dim a multiple of 8 from 16 (backend="torch": 8) to 256; any strides (0 for expanded axes) with a
    contiguous last axis. Query head h reads KV head h // (heads / kv_heads).

    align: query i stands at key i + Sk - Sq ("bottom-right": the last query at the last key) or at key i ("top-left").
    causal: a query sees no key beyond its place. window: a number of keys, the query's place and those to its left (the
    right is open unless causal), or (left, right) as flash-attn has it: keys place - left .. place + right, -1 or None
    for no limit. scale: default 1/sqrt(head_dim). Scores then take, in this order: softcap * tanh(score / softcap), for
    caps from 1e-6 to 10,000; ALiBi, - slope * |place - key| with alibi_slopes float32 [heads] or [batch, heads]; bias,
    float (added; only -inf hides) or bool (True is seen), broadcastable to [batch, heads, Sq, Sk]. sinks: [heads], a
    logit that carries no value.

    Returns [batch, heads, Sq, head_dim] in q's dtype and order of axes in memory, or out, which is written; with
    return_lse also the natural-log sum of exponentials, float32 [batch, heads, Sq], sinks included. A row that sees no
    key gives 0 and -inf. Sums in float32; P is rounded to v's dtype. On a card a row's bits depend neither on the
    batch nor on the other queries. Keys that no query sees may hold NaN. Our kernels read nothing back on a GPU and
    allocate nothing but the results. backend: auto, triton, gluon (Hopper's kernel), mma (the one of few registers: no
    ALiBi, no bias), torch (PyTorch's SDPA), reference. On a card auto takes Hopper's kernel for what a sweep there has
    covered: by dtype, head_dim, options and strides, never by lengths, and ops.explain tells; never mma. A CPU uses
    SDPA for what it can say.
    Forward only: backward raises UnsupportedError. Raises ShapeError, UnsupportedError, InvalidArgumentError. Source:
    Dao 2023, arXiv:2307.08691.
    """
    check_qkv(_NAME, q, k, v, layout="batch, heads, seq, head_dim", smallest=8 if backend == "torch" else 16)
    scores = (q.shape[2], k.shape[2])
    check_extras(_NAME, q, sinks, alibi_slopes, bias, batch=q.shape[0], scores=scores)
    check_out(_NAME, q, out)
    wanted = options(
        _NAME, head_dim=q.shape[3], causal=causal, scale=scale, window=window, softcap=softcap, align=align
    )
    tensors = (q, k, v, sinks, alibi_slopes, bias)
    if out is not None:
        refuse_grad(f"{_NAME}: out=", *tensors, out)
    plain = (wanted.scale, wanted.left, wanted.right, wanted.top_left, wanted.softcap, _checked_backend(_NAME, backend))
    if is_watched(*tensors, out):
        if out is None:
            result, lse = torch.ops.onewave.attention(*tensors, *plain)
        else:
            result, lse = out, _empty_lse(q)
            torch.ops.onewave.attention_out(out, lse, *tensors, *plain)
        return (result, lse) if return_lse else result
    lse = _empty_lse(q) if return_lse else None
    result = _dense(out, lse, q, k, v, sinks, alibi_slopes, bias, wanted, backend)
    return result if lse is None else (result, lse)


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
    """`attention` of sequences that lie one after another, without padding; on a card bit for bit the same as each
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
    entries of neither. Hopper's kernel reads pages of 16, 32, 64, 128 or 256 keys in place; others get a copy.
    On a CPU, and with ONEWAVE_DEBUG=1, which synchronises, contents of both are checked. Raises ShapeError,
    UnsupportedError, InvalidArgumentError.
    """
    watched = is_watched(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, alibi_slopes, bias, out, block_table)
    flat_k, flat_v = k, v
    if block_table is not None:
        check_pages(_VARLEN, k, v, block_table, cu_seqlens_k)
        # Of their shapes; there may be no page.
        flat_k, flat_v = k[:, 0], v[:, 0]
    check_qkv(_VARLEN, q, flat_k, flat_v, layout="tokens, heads, head_dim")
    longest = check_cu_seqlens(_VARLEN, q, flat_k, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
    check_extras(_VARLEN, q, sinks, alibi_slopes, bias, batch=cu_seqlens_q.shape[0] - 1, scores=longest)
    check_out(_VARLEN, q, out)
    if out is not None:
        refuse_grad(f"{_VARLEN}: out=", q, k, v, sinks, alibi_slopes, bias, out)
    wanted = options(
        _VARLEN, head_dim=q.shape[2], causal=causal, scale=scale, window=window, softcap=softcap, align=align
    )
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, sinks, alibi_slopes, bias)
    backend = _checked_backend(_VARLEN, backend)
    plain = (wanted.scale, wanted.left, wanted.right, wanted.top_left, wanted.softcap, backend, block_table)
    if watched:
        if out is None:
            result, lse = torch.ops.onewave.attention_varlen(*tensors, *plain)
        else:
            result, lse = out, _empty_lse_varlen(q)
            torch.ops.onewave.attention_varlen_out(out, lse, *tensors, *plain)
        return (result, lse) if return_lse else result
    lse = _empty_lse_varlen(q) if return_lse else None
    result = _unwritten(q) if out is None else out
    _ragged(result, lse, *tensors, wanted, backend, block_table)
    return result if lse is None else (result, lse)


def _checked_backend(name: str, backend: str) -> str:
    if backend not in BACKENDS:
        raise InvalidArgumentError(f"{name}: backend", got=shown(backend), allowed=", ".join(BACKENDS))
    return backend


def _choose(
    name: str, q: Tensor, wanted: Options, backend: str, *, extras: bool, bias: Tensor | None, num_keys: int
) -> str:
    """The backend that runs, _PLANNED for one of our kernels; an explicit one is taken or refused.

    extras: sinks, ALiBi, the LSE or packed sequences.
    """
    on_cpu = q.device.type == "cpu"
    if backend == "reference":
        return backend
    can_say = plan_on_torch(
        num_queries=q.shape[-2],
        num_keys=num_keys,
        hides_keys=wanted.hides_keys,
        extras=extras or wanted.softcap is not None,
        bias=bias is not None,
    )
    if backend == "torch":
        says_bias = bias is None or bias.dtype is torch.bool or (bias.dtype is q.dtype and not wanted.hides_keys)
        if extras or wanted.softcap is not None or num_keys == 0 or q.numel() == 0 or not says_bias:
            what = "softcap, sinks, ALiBi, LSE, packed or empty sequences, or a float bias beside a mask"
            raise UnsupportedError(f"{name} (backend=torch)", got=what, next='Use backend="auto".')
        return backend
    if on_cpu:
        if backend != "auto":
            raise UnsupportedError(f"{name} (backend={backend})", got="tensors on a CPU", next='Use backend="auto".')
        return can_say.backend
    return _PLANNED


def _dense(
    out: Tensor | None,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    wanted: Options,
    backend: str,
) -> Tensor:
    """Write out (a new tensor where None) and lse, and return out."""
    extras = any(x is not None for x in (sinks, alibi_slopes, lse))
    chosen = _choose(_NAME, q, wanted, backend, extras=extras, bias=bias, num_keys=k.shape[2])
    if chosen == "torch":
        result = load(_NAME, "torch_impl").attention(q, k, v, wanted, bias)
        # Kept where it lies, if it lies as promised.
        if out is None and result.stride() == like(q, device="meta").stride():
            return result
        return (like(q) if out is None else out).copy_(result)
    out = like(q) if out is None else out
    if chosen == "reference":
        window = (wanted.left, wanted.right)
        result, result_lse = load(_NAME, "reference").attention(
            q, k, v, scale=wanted.scale, window=window, softcap=wanted.softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            bias=bias, align="top-left" if wanted.top_left else "bottom-right",
        )  # fmt: skip
        out.copy_(result)
        if lse is not None:
            lse.copy_(result_lse)
        return out
    sinks = _dense_sinks(sinks)
    if backend == "mma":
        _run_on_mma(out, lse, q, k, v, wanted, sinks=sinks, alibi=alibi_slopes is not None, bias=bias is not None)
        return out
    if _takes_hopper(out, q, k, v, wanted, backend, alibi=alibi_slopes is not None, bias=bias is not None):
        load(_NAME, "hopper.launch").attention(out, lse, q, k, v, wanted, sinks=sinks)
        return out
    plan = _plan_on_card(q, k, v, wanted, bias)
    extra = {"sinks": sinks, "alibi_slopes": alibi_slopes, "bias": bias}
    load(_NAME, "triton.kernel").attention(out, lse, q, k, v, wanted, plan, **extra)
    return out


def _dense_sinks(sinks: Tensor | None) -> Tensor | None:
    """As all kernels count them: one after another."""
    return None if sinks is None else sinks.contiguous()


def _takes_hopper(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, wanted: Options, backend: str, *, alibi: bool, bias: bool,
    packed: bool = False, paged: bool = False,
) -> bool:  # fmt: skip
    """Whether Hopper's kernel runs a call on a card; where it is asked for by name and does not, UnsupportedError."""
    if backend == "triton":
        return False
    capability = torch.cuda.get_device_capability(q.device)
    strides = missing = None
    if capability == (9, 0):
        try:
            find = load(_NAME, "hopper.launch").undescribable
            strides = find(q, out, pages=(k, v)) if paged else find(q, k, v, out)
        except ImportError as error:
            missing = str(error)
    dtype = str(q.dtype).removeprefix("torch.")
    left = wanted.left is not None
    page = k.shape[1] if paged else None
    call = HopperCall(
        capability, dtype, q.shape[-1], wanted.scale > 0, alibi, bias, left, packed, page, strides, missing
    )  # fmt: skip
    reason = refusal(call, asked_for=backend == "gluon")
    if reason is not None and backend == "gluon":
        raise UnsupportedError(f"{_NAME} (backend=gluon)", got=reason, next='Use backend="auto" or "triton".')
    return reason is None


def _run_on_mma(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, wanted: Options, *, sinks: Tensor | None,
    alibi: bool, bias: bool, starts: tuple[Tensor, Tensor, int] | None = None,
) -> None:  # fmt: skip
    """The m16n8k16 kernel, or UnsupportedError. starts: cu_seqlens_q, cu_seqlens_k, max_seqlen_q of a packed batch."""
    missing = launcher = None
    try:
        launcher = load(_NAME, "mma.launch")
    except ImportError as error:
        missing = str(error)
    reason = mma_refusal(torch.cuda.get_device_capability(q.device), alibi=alibi, bias=bias, missing=missing)
    if launcher is None or reason is not None:
        raise UnsupportedError(f"{_NAME} (backend=mma)", got=str(reason), next='Use backend="auto" or "triton".')
    plan = plan_on_mma(
        batch=q.shape[0] if starts is None else starts[0].shape[0] - 1, num_heads=q.shape[1], num_kv_heads=k.shape[1],
        num_queries=q.shape[2] if starts is None else starts[2], head_dim=q.shape[3], hides_keys=wanted.hides_keys,
        processors=num_sms(q.device),
    )  # fmt: skip
    packed = {} if starts is None else {"starts_q": starts[0], "starts_k": starts[1], "longest": starts[2]}
    launcher.attention(out, lse, q, k, v, wanted, plan, sinks=sinks, **packed)


def _plan_on_card(
    q: Tensor, k: Tensor, v: Tensor, wanted: Options, bias: Tensor | None, *, sequences: int | None = None,
    longest: int = 0,
) -> AttentionPlan:  # fmt: skip
    """Of the portable kernel. sequences, longest: of a packed batch, whose tensors have a batch axis of one."""
    return plan_attention(
        batch=q.shape[0] if sequences is None else sequences,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        num_queries=q.shape[2] if sequences is None else longest,
        head_dim=q.shape[3],
        hides_keys=wanted.hides_keys,
        descriptors=load(_NAME, "triton.kernel").allows_descriptors(k, v),
        capability=torch.cuda.get_device_capability(q.device),
        wide_bias=bias is not None and bias.dtype is torch.float32,
    )


def _ragged(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    wanted: Options,
    backend: str,
    block_table: Tensor | None = None,
) -> None:
    longest = (max_seqlen_q, max_seqlen_k)
    check_packed(_VARLEN, q, k, cu_seqlens_q, cu_seqlens_k, longest, wanted, block_table)
    chosen = _choose(_VARLEN, q, wanted, backend, extras=True, bias=bias, num_keys=max_seqlen_k)
    sequences = cu_seqlens_q.shape[0] - 1
    options_given = {"alibi": alibi_slopes is not None, "bias": bias is not None, "packed": True}
    # One sequence after another is one batch row with heads first.
    out_row, q_row = (tensor.transpose(0, 1)[None] for tensor in (out, q))
    row_lse = None if lse is None else lse[None]
    sinks = _dense_sinks(sinks)
    packed = {"sinks": sinks, "starts_q": cu_seqlens_q, "starts_k": cu_seqlens_k}
    if block_table is not None:
        paged = chosen == _PLANNED and backend != "mma" and sequences > 0 and max_seqlen_q > 0
        if paged and _takes_hopper(out_row, q_row, k, v, wanted, backend, **options_given, paged=True):
            load(_NAME, "hopper.launch").attention(
                out_row, row_lse, q_row, k, v, wanted, **packed, longest=max_seqlen_q, block_table=block_table
            )
            return
        k, v, cu_seqlens_k = ragged_from_pages(k, v, block_table, cu_seqlens_k, max_seqlen_k)
    if chosen == "reference":
        window = (wanted.left, wanted.right)
        result, result_lse = load(_NAME, "reference").attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, scale=wanted.scale, window=window, softcap=wanted.softcap, sinks=sinks,
            alibi_slopes=alibi_slopes, bias=bias, align="top-left" if wanted.top_left else "bottom-right",
        )  # fmt: skip
        written = rows_of_sequences(cu_seqlens_q, len(q), max_seqlen_q)
        out.copy_(torch.where(written[:, None, None], result, out))
        if lse is not None:
            lse.copy_(torch.where(written, result_lse, lse))
        return
    if sequences == 0 or max_seqlen_q == 0:
        return
    rows = [out_row, q_row, *(tensor.transpose(0, 1)[None] for tensor in (k, v))]
    if backend == "mma":
        _run_on_mma(
            rows[0], row_lse, rows[1], rows[2], rows[3], wanted, sinks=sinks, alibi=alibi_slopes is not None,
            bias=bias is not None, starts=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q),
        )  # fmt: skip
        return
    if _takes_hopper(rows[0], rows[1], rows[2], rows[3], wanted, backend, **options_given):
        load(_NAME, "hopper.launch").attention(rows[0], row_lse, *rows[1:], wanted, **packed, longest=max_seqlen_q)
        return
    plan = _plan_on_card(rows[1], rows[2], rows[3], wanted, bias, sequences=sequences, longest=max_seqlen_q)
    load(_NAME, "triton.kernel").attention(
        rows[0], row_lse, *rows[1:], wanted, plan, alibi_slopes=alibi_slopes, bias=bias, **packed, longest=max_seqlen_q
    )


def _empty_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _unwritten(q: Tensor) -> Tensor:
    """A result: tokens outside every sequence are 0 on a CPU."""
    return like(q).zero_() if q.is_cpu else like(q)


def _empty_lse_varlen(q: Tensor) -> Tensor:
    return torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _library_out(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    top_left: bool,
    softcap: float | None,
    backend: str,
) -> None:
    wanted = Options(scale, left, right, top_left, softcap)
    _dense(out, lse, q, k, v, sinks, alibi_slopes, bias, wanted, backend)


def _library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    top_left: bool,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    out, lse = like(q), _empty_lse(q)
    _library_out(out, lse, q, k, v, sinks, alibi_slopes, bias, scale, left, right, top_left, softcap, backend)
    return out, lse


def _library_varlen_out(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    top_left: bool,
    softcap: float | None,
    backend: str,
    block_table: Tensor | None = None,
) -> None:
    wanted = Options(scale, left, right, top_left, softcap)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sinks, alibi_slopes, bias)
    _ragged(out, lse, *tensors, wanted, backend, block_table)


def _library_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    top_left: bool,
    softcap: float | None,
    backend: str,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = _unwritten(q), _empty_lse_varlen(q)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sinks, alibi_slopes, bias)
    _ragged(out, lse, *tensors, Options(scale, left, right, top_left, softcap), backend, block_table)
    return out, lse


def _fake(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return like(q), _empty_lse(q)


def _fake_varlen(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return like(q), _empty_lse_varlen(q)


def _fake_out(*_: object, **__: object) -> None:
    return None


register(_NAME, _library, _fake)
register(_VARLEN, _library_varlen, _fake_varlen)
register(f"{_NAME}_out", _library_out, _fake_out, mutates=("out", "lse"))
register(f"{_VARLEN}_out", _library_varlen_out, _fake_out, mutates=("out", "lse"))
