"""What the float8 kernel takes, its tile, and what attention_fp8 runs on given shapes; nothing is run to find out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.attention.hopper.plan import Schedule, schedule, swept
from onewave.ops.attention.masks import Options, Window, options
from onewave.ops.attention.triton.plan import AttentionPlan, explain_attention, order_in_words

FP8_BACKENDS = ("auto", "gluon", "reference")
MOST_HEAD_DIM, FP8_STEP = 128, 16
COLUMNS, KEYS, ROWS, WARPGROUPS = 128, 128, 64, 3
FP8_TILE = {"D": COLUMNS, "BN": KEYS, "K_STAGES": 3, "V_STAGES": 3}
"""Constants of fp8_kernel_impl's kernel."""
_HOPPER = (9, 0)
# A tile's start and end, in key tiles. 1.5, bfloat16's, is no better on average (docs/log/prefill-attention.md).
_TILE_COST = 1.0
_H200_PROCESSORS = 132


def check_sizes(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises ShapeError, UnsupportedError."""
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        got = f"{num_heads} query heads, {num_kv_heads} KV heads"
        raise ShapeError("attention_fp8: heads", got=got, allowed="a multiple of the KV heads")
    if head_dim % FP8_STEP or not 0 < head_dim <= MOST_HEAD_DIM:
        allowed = f"multiples of {FP8_STEP} up to {MOST_HEAD_DIM}"
        raise UnsupportedError("attention_fp8: head_dim", got=str(head_dim), allowed=allowed, next="Use bfloat16.")


def fp8_refusal(capability: tuple[int, int] | None, *, asked_for: bool) -> str | None:
    """Why a card has no products in float8 for a call, None if it has them. capability: None on a CPU.

    asked_for: by name, which needs no passed sweep.
    """
    if capability is None:
        return "tensors on a CPU"
    if capability != _HOPPER:
        return f"products in float8 need sm_90, and this is sm_{capability[0]}{capability[1]}"
    if not asked_for and not swept("float8_e4m3fn", MOST_HEAD_DIM):
        return "its sweep on a card has not covered float8"
    return None


def deal(
    *, heads: int, group: int, num_queries: int, num_keys: int, wanted: Options, shift: int, sequences: int | None,
    processors: int,
) -> Schedule:  # fmt: skip
    """gluon_plan.schedule, of this kernel's tiles. Packed ones are taken in turns: no sorted queue was tried."""
    plan = schedule(
        heads=heads, group=group, num_queries=num_queries, num_keys=num_keys, columns=COLUMNS, processors=processors,
        shift=shift, left=wanted.left, right=wanted.right, sequences=sequences, rows=ROWS * WARPGROUPS,
        tile_cost=_TILE_COST, item_bytes=1,
    )  # fmt: skip
    return replace(plan, order="turns") if plan.order == "sorted" else plan


def explain_fp8(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    *,
    causal: bool = False,
    scale: float | None = None,
    window: object = None,
    softcap: float | None = None,
    sinks: object = None,
    align: str = "bottom-right",
    out_dtype: str = "bfloat16",
    return_lse: bool = False,
    backend: str = "auto",
    capability: tuple[int, int] | None = _HOPPER,
    sequences: int | None = None,
    tokens: int | None = None,
) -> AttentionPlan:
    """What attention_fp8(q, k, v, ...) would run for q [B, H, Sq, D], k [B, Hkv, Sk, D]; capability: None on a CPU.

    sequences: of a packed batch, each with Sq queries and Sk keys, or with as many at most where tokens says how many
    queries they all have; then B is 1.
    """
    batch, num_heads, num_queries, head_dim = q_shape
    num_kv_heads, num_keys = k_shape[1], k_shape[2]
    check_sizes(num_heads, num_kv_heads, head_dim)
    if backend not in FP8_BACKENDS:
        raise InvalidArgumentError("attention_fp8: backend", got=shown(backend), allowed=", ".join(FP8_BACKENDS))
    given: dict[str, Any] = {"causal": causal, "window": cast("Window", window), "align": align}
    wanted = options("attention_fp8", head_dim=head_dim, scale=scale, softcap=softcap, **given)
    if not wanted.scale > 0:
        raise InvalidArgumentError("attention_fp8: scale", got=str(wanted.scale), allowed="greater than 0")
    if backend == "reference":
        return AttentionPlan("reference", "float32 PyTorch", "asked for")
    reason = fp8_refusal(capability, asked_for=backend == "gluon")
    if reason is not None:
        if backend == "gluon":
            raise UnsupportedError("attention_fp8 (backend=gluon)", got=reason, next='Use backend="auto".')
        rows = (sequences or batch, *q_shape[1:]), (sequences or batch, *k_shape[1:])
        found = explain_attention(
            *rows, scale=scale, softcap=softcap, sinks=sinks, return_lse=return_lse, packed=sequences is not None,
            tokens=tokens, device="cpu" if capability is None else "cuda", capability=capability or _HOPPER,
            dtype="float32" if capability is None else "bfloat16", **given,
        )  # fmt: skip
        return replace(found, why=f"attention of dequantised copies: {reason}; {found.why}")
    shift = wanted.shift(num_queries, num_keys)
    if wanted.right is not None and sequences is None:
        num_keys = min(num_keys, num_queries + shift + wanted.right)
    if 0 in (batch, num_heads, num_queries, tokens) or num_keys <= 0 or sequences == 0:
        return AttentionPlan("gluon", "none", "no query sees a key: nothing is computed")
    dealt = deal(
        heads=num_heads * (batch if sequences is None else 1), group=num_heads // num_kv_heads,
        num_queries=tokens or num_queries * (sequences or 1), num_keys=num_keys * (sequences or 1), wanted=wanted,
        shift=shift, sequences=sequences, processors=_H200_PROCESSORS,
    )  # fmt: skip
    weights = "exponentials, whose sums the LSE is" if return_lse else "e4m3's bits from scores"
    order = order_in_words(dealt, wanted.right, packed=sequences is not None)
    why = (
        f"head_dim {head_dim}" + (f" as {COLUMNS}" if head_dim != COLUMNS else ""),
        f"products in float8, weights as {weights}; a kernel before it turns the values",
        f"sm_90: one warp loads through TMA, {WARPGROUPS} warpgroups of {ROWS} queries each multiply",
        f"as many programs as {dealt.programs} of the card's SMs share the tiles; {order}",
    )
    return AttentionPlan(
        backend="gluon", kernel="fp8_kernel", why="; ".join(why), block_m=ROWS * WARPGROUPS, block_n=KEYS,
        num_warps=4 * WARPGROUPS + 1, num_stages=FP8_TILE["K_STAGES"], width=COLUMNS, tiles=dealt.slots,
        programs=dealt.programs, descriptors=True,
    )  # fmt: skip
