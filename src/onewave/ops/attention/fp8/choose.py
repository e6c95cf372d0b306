"""What runs attention in float8: the Hopper kernel, or attention of dequantised copies. See ops/choice.py."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import torch

from onewave.base.device import Device
from onewave.base.errors import UnsupportedError
from onewave.ops.attention.call import AttentionCall, Extras, Packed
from onewave.ops.attention.checks import check_ranks
from onewave.ops.attention.choose import OPTIONS, options_of, packing_of, take_shapes
from onewave.ops.attention.choose import choose as choose_attention
from onewave.ops.attention.fp8.call import Fp8Call, check
from onewave.ops.attention.fp8.plan import COLUMNS, FP8_TILE, KEYS, ROWS, WARPGROUPS, deal
from onewave.ops.attention.hopper.choose import undescribable, why_dealt, work_of
from onewave.ops.attention.hopper.plan import swept
from onewave.ops.attention.masks import Options
from onewave.ops.attention.plan import AttentionChoice, Facts
from onewave.ops.backends import load
from onewave.ops.choice import Asked, because, empty_on_meta

_HOPPER = (9, 0)
_SWEPT_HEAD_DIM = 128
_KNOWN = {
    *OPTIONS, "backend", "max_seqlen_k", "max_seqlen_q", "out_dtype", "q_scale", "k_scale", "v_scale", "return_lse",
    "sequences", "sinks",
}  # fmt: skip


def choose(call: Fp8Call) -> AttentionChoice:
    """Return what runs. Raises UnsupportedError where backend="gluon" does not take the call."""
    if call.backend == "reference":
        return AttentionChoice("reference", "fp8.dequantised", "attention: float32 PyTorch", (because("asked for"),))
    reason = _refusal(call)
    if reason is not None:
        if call.backend == "gluon":
            raise UnsupportedError("attention_fp8 (backend=gluon)", got=reason, next='Use backend="auto".')
        packed = call.packed
        lengths = None if packed is None else (packed.num_sequences, packed.max_seqlen_q, packed.max_seqlen_k)
        has_sinks = call.extras.sinks is not None
        inner = _of_copies(
            call.device, tuple(call.q.shape), tuple(call.k.shape), call.options, lengths, has_sinks, call.with_lse
        )
        first = because("attention of dequantised copies: {}", reason)
        return replace(inner, module="fp8.dequantised", reasons=(first, *inner.reasons))
    packed, q, k = call.packed, call.q, call.k
    if packed is None:
        (batch, num_heads, num_queries, head_dim), tokens, num_keys = q.shape, None, k.shape[2]
    else:
        (tokens, num_heads, head_dim), batch = q.shape, packed.num_sequences
        # Keys of all sequences: their number is all that the host knows.
        num_queries, num_keys = packed.max_seqlen_q, k.shape[0]
    facts = Facts(
        call.name, call.backend, call.device, q.dtype, call.options, batch, num_heads, k.shape[1], num_queries,
        num_keys, head_dim, tokens,
    )  # fmt: skip
    return _on_hopper(facts, with_lse=call.with_lse)


def _refusal(call: Fp8Call) -> str | None:
    """Why the Hopper kernel does not run a call, None if it does."""
    capability = call.device.capability
    if capability is None:
        return "tensors on a CPU"
    if capability != _HOPPER:
        return f"products in float8 need sm_90, and this is sm_{capability[0]}{capability[1]}"
    if call.backend != "gluon" and not swept("float8_e4m3fn", _SWEPT_HEAD_DIM):
        return "its sweep on a GPU has not covered float8"
    missing = None if call.described is not None else _missing()
    return undescribable(call.q, call.k, call.v) if missing is None else missing


@cache
def _missing() -> str | None:
    try:
        load("attention", "fp8.launch")
    except ImportError as error:
        return f"the Hopper kernel needs Triton 3.6's Gluon: {error}"
    return None


@lru_cache(maxsize=1024)
def _of_copies(
    device: Device,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    wanted: Options,
    lengths: tuple[int, int, int] | None,
    has_sinks: bool,
    with_lse: bool,
) -> AttentionChoice:
    """What attention chooses for dequantised copies. lengths: sequences and the longest's queries and keys."""
    # float16 would not hold what legal scales make of float8.
    dtype = torch.float32 if device.capability is None else torch.bfloat16
    q, k = empty_on_meta(q_shape, dtype), empty_on_meta(k_shape, dtype)
    lse = empty_on_meta(q_shape[:-1], torch.float32) if with_lse else None
    extras = Extras(empty_on_meta(q_shape[1:2], torch.float32) if has_sinks else None)
    packed = None
    if lengths is not None:
        starts = empty_on_meta((lengths[0] + 1,), torch.int32)
        packed = Packed(starts, starts, lengths[1], lengths[2])
    return choose_attention(AttentionCall(q, k, k, extras, wanted, packed=packed, lse=lse, described=device))


@lru_cache(maxsize=1024)
def _on_hopper(facts: Facts, *, with_lse: bool) -> AttentionChoice:
    work = work_of(facts)
    if 0 in (facts.batch, facts.num_heads, facts.num_queries, facts.tokens) or work.num_keys <= 0:
        why = because("no query sees a key: nothing is computed")
        return AttentionChoice("gluon", "fp8.launch", "attention: none", (why,))
    plan = deal(work, facts.device.num_sms)
    weights = "exponentials, whose sums the LSE is" if with_lse else "e4m3's bits from scores"
    reasons = (
        because("head_dim {}" if facts.head_dim == COLUMNS else "head_dim {} as {}", facts.head_dim, COLUMNS),
        because("products in float8, weights as {}", weights),
        because("a kernel before it turns the values"),
        because("sm_90: one warp loads through TMA, {} warpgroups of {} queries each multiply", WARPGROUPS, ROWS),
        *why_dealt(plan),
    )
    return AttentionChoice(
        "gluon", "fp8.launch", "attention/fp8/kernel.py: fp8_kernel", reasons, ROWS * WARPGROUPS, KEYS,
        4 * WARPGROUPS + 1, FP8_TILE["K_STAGES"], COLUMNS, tiles=plan.slots, num_programs=plan.programs,
        descriptors=True, schedule=plan,
    )  # fmt: skip


def describe(asked: Asked) -> Fp8Call:
    """A question: q and k; packed if `sequences` is given. dtype: of the output, bf16 where it is float8 itself."""
    asked.allow(_KNOWN)
    packed = asked.has("sequences")
    f8 = torch.float8_e4m3fn
    q, k, v = (empty_on_meta(shape, f8) for shape in take_shapes(asked, packed=packed))
    check_ranks(asked.operator, q, k, v, packed=packed)
    lengths = packing_of(asked, len(q), len(k)) if packed else None
    wanted = options_of(asked, q.shape[-1])
    sinks = empty_on_meta(q.shape[1:2], torch.float32) if asked.has("sinks") else None
    call = Fp8Call(
        q, k, v, Extras(sinks), wanted, asked.options.get("backend", "auto"), lengths, described=asked.device,
        out_dtype=asked.dtype_of("out_dtype", torch.bfloat16 if asked.dtype is f8 else asked.dtype),
        with_lse=bool(asked.options.get("return_lse")),
    )  # fmt: skip
    check(call)
    return call
