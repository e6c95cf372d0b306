"""Chooses what runs attention in float8: the Hopper kernel, or attention of dequantised copies. See ops/choice.py."""

from dataclasses import replace
from functools import lru_cache

import torch

from onewave.base.errors import UnsupportedError
from onewave.ops.attention.call import AttentionCall, Extras
from onewave.ops.attention.checks import check_ranks
from onewave.ops.attention.choose import OPTIONS, facts_of, options_of, packing_of, take_shapes
from onewave.ops.attention.choose import choose as choose_attention
from onewave.ops.attention.fp8.call import Fp8Call, check
from onewave.ops.attention.fp8.plan import COLUMNS, FP8_TILE, KEYS, ROWS, WARPGROUPS, deal
from onewave.ops.attention.hopper.choose import why_dealt, work_of
from onewave.ops.attention.hopper.plan import swept
from onewave.ops.attention.plan import AttentionChoice, Facts
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
    facts = None if call.on_cpu else facts_of(call)
    reason = "tensors on a CPU" if facts is None else _refusal(facts)
    if facts is not None and reason is None:
        # The host knows only the total number of keys of packed sequences.
        facts = facts if call.packed is None else facts._replace(num_keys=call.k.shape[0])
        return _on_hopper(facts, with_lse=call.with_lse)
    if call.backend == "gluon":
        raise UnsupportedError("attention_fp8 (backend=gluon)", got=reason, next='Use backend="auto".')
    inner = _of_copies(call)
    first = because("attention of dequantised copies: {}", reason)
    return replace(inner, module="fp8.dequantised", reasons=(first, *inner.reasons))


def _refusal(facts: Facts) -> str | None:
    """Why the Hopper kernel does not run a call, None if it does."""
    if facts.capability != _HOPPER:
        return "products in float8 need sm_90, and this is sm_{}{}".format(*facts.capability)
    if not facts.asked_for and not swept("float8_e4m3fn", _SWEPT_HEAD_DIM):
        return "its sweep on a GPU has not covered float8"
    if facts.missing is not None:
        return f"the Hopper kernel needs Triton 3.6's Gluon: {facts.missing}"
    return facts.strides


def _of_copies(call: Fp8Call) -> AttentionChoice:
    """Return attention's choice for dequantised copies."""
    # float16 would not hold what legal scales make of float8.
    dtype = torch.float32 if call.on_cpu else torch.bfloat16
    q, k = empty_on_meta(call.q.shape, dtype), empty_on_meta(call.k.shape, dtype)
    lse = q if call.with_lse else None
    return choose_attention(
        AttentionCall(q, k, k, call.extras, call.options, packed=call.packed, lse=lse, described=call.device)
    )


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
