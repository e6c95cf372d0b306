"""Which backend and kernel run a call of attention: see ops/choice.py."""

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import UnsupportedError
from onewave.ops.attention.call import AttentionCall, Extras, Packed
from onewave.ops.attention.checks import check, check_ranks, packing
from onewave.ops.attention.hopper.choose import plan_hopper, refusal, rows_apart, undescribable, work_of
from onewave.ops.attention.masks import Options, options
from onewave.ops.attention.mma.plan import mma_refusal, plan_mma
from onewave.ops.attention.plan import AttentionChoice, Facts
from onewave.ops.attention.split.plan import plan_split, suits_split
from onewave.ops.attention.triton.plan import plan_portable
from onewave.ops.backends import load
from onewave.ops.choice import Asked, because, empty_on_meta
from onewave.ops.cpu import LANES

_FIRST_WITH_TMA = (9, 0)
_LAUNCHERS = {"mma": "mma.launch", "auto": "hopper.launch", "gluon": "hopper.launch"}
OPTIONS = ("causal", "scale", "window", "softcap", "align")
"""Options that a question has by the operators' names."""
_KNOWN = {*OPTIONS, "sinks", "alibi_slopes", "bias", "return_lse", "out", "descriptors", "backend"}
_KNOWN_PACKED = {*_KNOWN, "sequences", "max_seqlen_q", "max_seqlen_k", "page_size"}


def _torch(backend: str, why: str) -> AttentionChoice:
    if backend == "torch":
        return AttentionChoice("torch", "torch_impl", "attention: scaled_dot_product_attention", (because(why),))
    return AttentionChoice("reference", "reference", "attention: float32 PyTorch", (because(why),))


_ASKED = {backend: _torch(backend, "asked for") for backend in ("torch", "reference")}
_WITH_BIAS = _torch("reference", "keys that a bias hides may hold NaN, which SDPA would spread")
_WITH_EXTRAS = _torch("reference", "softcap, sinks, ALiBi and the LSE are beyond PyTorch's SDPA")
_NO_ROWS = _torch("reference", "nothing to attend to")
_MASKED = _torch("torch", "a mask is built only where the causal flag can't say it")
_WHOLE = _torch("torch", "no mask is needed")
_ON_TEAM = AttentionChoice(
    "cpu", "numba_impl", "attention/cpu/kernel_impl.py: items", (because("packed float32: pages are read in place"),)
)


def choose(call: AttentionCall) -> AttentionChoice:
    """Return what runs. Raises UnsupportedError where an explicit backend does not take the call."""
    if call.on_cpu or call.backend in _ASKED:
        if call.on_cpu and _runs_on_team(call):
            return _ON_TEAM
        choice = _in_pytorch(call)
        paged = call.packed is not None and call.packed.block_table is not None
        return replace(choice, copies_pages=True) if paged else choice
    facts = facts_of(call)
    if facts.page_size is None:
        return _on_gpu(facts)
    return _of_pages(facts, _facts_of_copy(call, facts))


def _runs_on_team(call: AttentionCall) -> bool:
    """Whether our loops run a call on a CPU."""
    q, k, v = call.q, call.k, call.v
    return (
        call.backend == "auto"
        and call.packed is not None
        and q.dtype is torch.float32
        and q.shape[-1] % LANES == 0
        and q.numel() > 0
        and k.stride() == v.stride()
        and all(each is None for each in (call.options.softcap, *call.extras))
    )


def _in_pytorch(call: AttentionCall) -> AttentionChoice:
    """On a CPU, or where PyTorch is asked for."""
    backend, bias, wanted = call.backend, call.extras.bias, call.options
    if backend == "reference":
        return _ASKED[backend]
    num_keys = call.k.shape[2] if call.packed is None else call.packed.max_seqlen_k
    beyond = (call.packed, call.lse, wanted.softcap, call.extras.sinks, call.extras.alibi_slopes)
    extras = any(x is not None for x in beyond)
    if backend == "torch":
        says_bias = bias is None or bias.dtype is torch.bool or (bias.dtype is call.q.dtype and not wanted.hides_keys)
        if extras or num_keys == 0 or call.q.numel() == 0 or not says_bias:
            what = "softcap, sinks, ALiBi, LSE, packed or empty sequences, or a float bias beside a mask"
            raise UnsupportedError(f"{call.name} (backend=torch)", got=what, next='Use backend="auto".')
        return _ASKED[backend]
    if backend != "auto":
        raise UnsupportedError(f"{call.name} (backend={backend})", got="tensors on a CPU", next='Use backend="auto".')
    if bias is not None:
        return _WITH_BIAS
    if extras:
        return _WITH_EXTRAS
    if num_keys == 0 or call.q.shape[-2] == 0:
        return _NO_ROWS
    return _MASKED if wanted.hides_keys else _WHOLE


def facts_of(call: AttentionCall) -> Facts:
    """All that decides which kernel of a GPU runs a call."""
    q, k, v, packed, device = call.q, call.k, call.v, call.packed, call.device
    if packed is None:
        batch, num_heads, num_queries, head_dim = q.shape
        num_kv_heads, num_keys = k.shape[1:3]
        tokens = page_size = None
    else:
        tokens, num_heads, head_dim = q.shape
        batch, num_queries, num_keys = packed.num_sequences, packed.max_seqlen_q, packed.max_seqlen_k
        num_kv_heads = k.shape[-2]
        page_size = None if packed.block_table is None else k.shape[1]
    strides, keys_by_tma = None, k.numel() > 0
    if device.capability is not None and device.capability >= _FIRST_WITH_TMA and call.backend != "mma":
        others = (q,) if call.out is None else (q, call.out)
        if page_size is None:
            strides = undescribable(*others, k, v)
            keys_by_tma &= strides is None or (rows_apart(k) and rows_apart(v))
        else:
            strides = undescribable(*others, pages=(k, v))
    bias = call.extras.bias
    missing = None if call.described is not None or call.backend == "triton" else _missing(_LAUNCHERS[call.backend])
    return Facts(
        call.name, call.backend, device, q.dtype, call.options, batch, num_heads, num_kv_heads, num_queries, num_keys,
        head_dim, tokens, page_size, call.extras.alibi_slopes is not None, None if bias is None else bias.dtype,
        strides, keys_by_tma, missing, call.lse is None and call.extras.sinks is None,
    )  # fmt: skip


def _facts_of_copy(call: AttentionCall, facts: Facts) -> Facts:
    """The facts of a call whose pages are copied into rows."""
    packed, k = call.packed, call.k
    assert packed is not None
    assert packed.block_table is not None
    others = (call.q,) if call.out is None else (call.q, call.out)
    longest = min(packed.max_seqlen_k, packed.block_table.shape[1] * k.shape[1])
    some = packed.num_sequences * longest * len(k) > 0
    return facts._replace(page_size=None, strides=undescribable(*others), keys_by_tma=some)


@cache
def _missing(module: str) -> str | None:
    """Why a launcher can't be imported, None if it can."""
    try:
        load("attention", module)
    except ImportError as error:
        return str(error)
    return None


@lru_cache(maxsize=4096)
def _on_gpu(facts: Facts) -> AttentionChoice:
    backend, none = facts.backend, "attention: none"
    refused = None if backend == "triton" else mma_refusal(facts) if backend == "mma" else refusal(facts)
    if refused is not None and backend != "auto":
        next = 'Use backend="auto" or "triton".'
        raise UnsupportedError(f"{facts.name} (backend={backend})", got=refused, next=next)
    if backend == "auto":
        backend = "gluon" if refused is None else "triton"
    if 0 in (facts.batch, facts.num_heads, facts.num_queries, facts.tokens):
        return AttentionChoice(backend, "empty", none, (because("no queries: no launch"),))
    if backend == "mma":
        return plan_mma(facts)
    if backend == "triton":
        return plan_portable(facts, not_hopper=refused)
    work = work_of(facts)
    if work.num_keys <= 0 and work.sequences is None:
        return AttentionChoice(backend, "empty", none, (because("no query sees a key: zeros are written"),))
    return plan_split(facts) if suits_split(facts) else plan_hopper(facts, work)


@lru_cache(maxsize=1024)
def _of_pages(facts: Facts, copied: Facts) -> AttentionChoice:
    """Pages: the Hopper kernel reads some sizes in place; other kernels read a copy."""
    if facts.backend == "gluon" or (facts.backend == "auto" and refusal(facts) is None):
        return _on_gpu(facts)
    choice = _on_gpu(copied)
    if not choice.num_programs:
        return choice
    why = because("pages of {} keys are copied first", facts.page_size)
    return replace(choice, copies_pages=True, reasons=(*choice.reasons, why))


@lru_cache(maxsize=64)
def reads_pages(device: Device, dtype: torch.dtype, head_dim: int, page_size: int) -> bool:
    """Whether causal attention of packed sequences reads pages of keys where they lie, without a copy."""
    shapes = ((1, 1, head_dim), (page_size, 1, head_dim))
    asked = Asked("attention_varlen", shapes, device, dtype, {"causal": True, "page_size": page_size})
    return not choose(describe(asked)).copies_pages


def describe(asked: Asked) -> AttentionCall:
    """A question: shapes of q and k, of v too where given.

    descriptors=False: strides of k and v that TMA can't address. attention_varlen: as many `sequences`; page_size: of
    its keys, where they lie in pages.
    """
    packed = asked.operator == "attention_varlen"
    asked.allow(_KNOWN_PACKED if packed else _KNOWN)
    q_shape, k_shape, v_shape = take_shapes(asked, packed=packed)
    odd = asked.options.get("descriptors") is False
    q, k, v = empty_on_meta(q_shape, asked.dtype), _keys(k_shape, asked.dtype, odd), _keys(v_shape, asked.dtype, odd)
    check_ranks(asked.operator, q, k, v, packed=packed)
    lengths = None
    if packed:
        pages = None
        if (page_size := asked.options.get("page_size")) is not None:
            longest = asked.number("max_seqlen_k", len(k))
            k, v = (empty_on_meta((-(-len(t) // page_size), page_size, *t.shape[1:]), t.dtype) for t in (k, v))
            pages = k, v, empty_on_meta((asked.number("sequences", 1), -(-longest // page_size)), torch.int32)
        lengths = packing_of(asked, len(q), k_shape[0], pages)
    sinks, slopes = (
        empty_on_meta(q.shape[1:2], torch.float32) if asked.has(name) else None for name in ("sinks", "alibi_slopes")
    )
    wanted = options_of(asked, q.shape[-1])
    backend = asked.options.get("backend", "auto")
    lse = empty_on_meta(q.shape[:-1], torch.float32) if asked.options.get("return_lse") else None
    extras = Extras(sinks, slopes, _bias(asked))
    call = AttentionCall(q, k, v, extras, wanted, backend, lengths, lse=lse, described=asked.device)
    check(call)
    return call


def take_shapes(asked: Asked, *, packed: bool) -> tuple[tuple[int, ...], ...]:
    """Shapes of q, k and v; v's is k's where the question has two."""
    rank = (3,) if packed else (4,)
    shapes = asked.take(rank, rank, *(rank for _ in asked.shapes[2:3]))
    return shapes[0], shapes[1], shapes[-1]


def packing_of(asked: Asked, queries: int, keys: int, pages: tuple[Tensor, Tensor, Tensor] | None = None) -> Packed:
    """The lengths of a question about packed sequences, by default one of all queries and keys."""
    starts = empty_on_meta((asked.number("sequences", 1) + 1,), torch.int32)
    longest = asked.number("max_seqlen_q", queries), asked.number("max_seqlen_k", keys)
    return packing(asked.operator, (starts, starts), longest, pages=pages)


def options_of(asked: Asked, head_dim: int) -> Options:
    """Return the options that a question states beside its tensors."""
    given = asked.given(*OPTIONS)
    if given.get("softcap") is True:
        given["softcap"] = 1.0
    return options(asked.operator, head_dim=head_dim, **given)


def _keys(shape: tuple[int, ...], dtype: torch.dtype, odd: bool) -> Tensor:
    if not odd:
        return empty_on_meta(shape, dtype)
    return empty_on_meta((*shape[:-1], shape[-1] + 1), dtype)[..., : shape[-1]]


def _bias(asked: Asked) -> Tensor | None:
    """One of the dtype that the question names or has; of q's where it only says that there is one."""
    bias = asked.options.get("bias")
    if bias is None:
        return None
    kind: Any = getattr(bias, "dtype", bias)
    if isinstance(kind, str):
        kind = torch.bool if kind == "bool" else asked.dtype_of("bias", asked.dtype)
    return empty_on_meta((1,), kind if isinstance(kind, torch.dtype) else asked.dtype)
