"""How attention runs: backend, kernel and tiles, from shapes and flags alone; for the launch and for explain.

What a row's bits may depend on is decided here: the keys of a tile (block_n), where tiles begin (multiples of block_n
from the row's own first key) and the width depend on head_dim and the card alone. block_m and the packing of heads
change with the shape, and change no bit: rows of a tile never meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from onewave.base.errors import InvalidArgumentError, UnsupportedError, shown
from onewave.ops.attention.hopper.plan import PAGE_SIZES, HopperCall, Schedule, columns_of, config, refusal, schedule
from onewave.ops.attention.masks import Options, Window, options
from onewave.ops.attention.mma.plan import mma_refusal, mma_tile

BACKENDS = ("auto", "triton", "gluon", "mma", "torch", "reference")
_FIRST, _FIRST_WITH_DESCRIPTORS = (8, 0), (9, 0)
# Bytes of shared memory that a program may hold; other cards from sm_80 on have 99 KiB.
_LARGE_SHARED = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
_SMALL_SHARED = 99 << 10
_ITEM_BYTES = 2
_H200_PROCESSORS = 132


@dataclass(frozen=True)
class AttentionPlan:
    """One call. backend: gluon (Hopper's kernel), triton, mma, torch or reference; kernel: what of it runs.

    The rest speaks of our kernels: a tile holds block_m rows (queries x packed_heads) and walks over block_n keys at a
    time; head_dim is computed as `width`, a power of two. programs: the grid, tiles of all heads and sequences.
    descriptors: K and V come through tensor descriptors (TMA), not through pointers.
    """

    backend: str
    kernel: str
    why: str
    block_m: int = 0
    block_n: int = 0
    num_warps: int = 0
    num_stages: int = 0
    width: int = 0
    packed_heads: int = 1
    tiles: int = 0
    programs: int = 0
    descriptors: bool = False


@lru_cache(maxsize=4096)
def plan_attention(
    *,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    num_queries: int,
    head_dim: int,
    hides_keys: bool = False,
    descriptors: bool = True,
    capability: tuple[int, int] = (9, 0),
    wide_bias: bool = False,
    why_not_hopper: str | None = None,
) -> AttentionPlan:
    """Plan the portable kernel. num_queries: of the longest sequence.

    hides_keys: causal or windowed. descriptors: whether the strides of K and V allow them. wide_bias: there is a
    float32 bias. why_not_hopper: why the other kernel does not run, for the reasons. Raises UnsupportedError.
    """
    if capability < _FIRST:
        got = f"sm_{capability[0]}{capability[1]}"
        raise UnsupportedError("attention: card", got=got, allowed="sm_80 and newer", next='Use backend="torch".')
    width = 1 << (head_dim - 1).bit_length()
    most_rows, block_n, warps, stages = _tile(width, capability)
    if _shared_bytes(most_rows, block_n, width, 1) > _shared_limit(capability):
        most_rows = 64
    group = num_heads // num_kv_heads
    packed = group if num_queries < most_rows else 1
    rows = num_queries * packed
    block_m = 64 if rows <= 64 else most_rows
    if block_m == 64:
        warps = 4
    # Numbers of 4 bytes are copied ahead one by one, whatever their strides, each stage but the one in use. Narrower
    # ones could only be copied several together, which the kernel's number of keys, that is not compiled in, forbids.
    bias_bytes = 4 * block_m * block_n if wide_bias else 0
    limit = _shared_limit(capability)
    while stages > 1 and _shared_bytes(block_m, block_n, width, stages) + (stages - 1) * bias_bytes > limit:
        stages -= 1
    tiles = -(-rows // block_m)
    use_descriptors = descriptors and capability >= _FIRST_WITH_DESCRIPTORS
    pointers = (
        f"sm_{capability[0]}{capability[1]} has no descriptors" if descriptors else "their strides forbid descriptors"
    )
    reasons = [
        f"head_dim {head_dim}" + (f" as {width}" if width != head_dim else ""),
        f"{group} heads of a group share a tile, since {num_queries} queries don't fill one"
        if packed > 1
        else f"{block_m} queries of one head a tile",
        f"K and V through {'tensor descriptors' if use_descriptors else 'pointers: ' + pointers}",
    ]
    if hides_keys:
        reasons.append("tiles that no query sees are skipped, longest rows first")
    if why_not_hopper is not None and capability == (9, 0):
        reasons.append(why_not_hopper)
    return AttentionPlan(
        backend="triton",
        kernel="attention_kernel",
        why="; ".join(reasons),
        block_m=block_m,
        block_n=block_n,
        num_warps=warps,
        num_stages=stages,
        width=width,
        packed_heads=packed,
        tiles=tiles,
        programs=tiles * batch * (num_kv_heads if packed > 1 else num_heads),
        descriptors=use_descriptors,
    )


def plan_on_hopper(
    *,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    right: int | None = None,
    left: int | None = None,
    shift: int = 0,
    sequences: int | None = None,
    processors: int = _H200_PROCESSORS,
) -> AttentionPlan:
    """Plan Hopper's kernel for a call that gluon_plan.refusal lets pass; the launch deals its tiles the same way.

    sequences: of a packed batch, whose num_queries count all tokens.
    """
    columns = columns_of(head_dim)
    constants = config(columns)
    dealt = schedule(
        heads=num_heads * (batch if sequences is None else 1), group=num_heads // num_kv_heads, num_queries=num_queries,
        num_keys=num_keys, columns=columns, processors=processors, shift=shift, left=left, right=right,
        sequences=sequences, queue=True,
    )  # fmt: skip
    warpgroups = constants["WARPGROUPS"]
    reasons = (
        f"head_dim {head_dim}" + (f" as {columns}" if columns != head_dim else ""),
        f"sm_90: one warp loads through TMA, {warpgroups} warpgroups of 64 queries each multiply",
        f"as many programs as {dealt.programs} of the card's SMs share the tiles; "
        + order_in_words(dealt, right, packed=sequences is not None),
    )
    return AttentionPlan(
        backend="gluon", kernel="attention_kernel", why="; ".join(reasons), block_m=64 * warpgroups,
        block_n=constants["BN"], num_warps=4 * warpgroups + 1, num_stages=constants["K_STAGES"], width=columns,
        tiles=dealt.slots, programs=dealt.programs, descriptors=True,
    )  # fmt: skip


def order_in_words(plan: Schedule, right: int | None, *, packed: bool) -> str:
    """How a Schedule's tiles are dealt, sorted ones from a queue; for explain."""
    together = f"{plan.section} heads together"
    if plan.order == "sorted":
        return f"a kernel sorts tiles by length first, and whoever is free takes the next; {together}"
    if packed:
        return f"as sequences follow, {together}, every other turn the other way round"
    if right is None:
        return "tiles as long as each other, head by head"
    if plan.order == "table":
        end = f", of the last {plan.section * plan.last} together" if plan.last > 1 else ""
        return f"longest rows of {plan.section} heads first{end}, each to whoever has least to do"
    return f"longest rows of {plan.section} heads first, every other turn the other way round"


def plan_on_mma(
    *, batch: int, num_heads: int, num_kv_heads: int, num_queries: int, head_dim: int, hides_keys: bool = False,
    processors: int = _H200_PROCESSORS, narrow: bool | None = None,
) -> AttentionPlan:  # fmt: skip
    """Plan the m16n8k16 kernel for a call that mma_refusal lets pass. num_queries: of the longest sequence.

    narrow: the tile of few queries and registers; by default where wide ones would leave SMs with less than two.
    """
    group = num_heads // num_kv_heads
    packed = group if num_queries < mma_tile(head_dim).queries else 1
    rows, heads = num_queries * packed, batch * (num_kv_heads if packed > 1 else num_heads)
    if narrow is None:
        narrow = -(-rows // mma_tile(head_dim).queries) * heads < 2 * processors
    tile = mma_tile(head_dim, narrow=narrow)
    tiles = -(-rows // tile.queries)
    reasons = [
        "asked for",
        f"head_dim {head_dim}" + (f" as {tile.width}" if tile.width != head_dim else ""),
        f"{tile.queries} queries a tile" + (", few registers and more programs" if narrow else ""),
        f"at most {tile.registers} registers a thread, {tile.shared_bytes >> 10} KiB of shared memory for K and V",
    ]
    if packed > 1:
        reasons.append(f"{group} heads of a group share a tile, since {num_queries} queries don't fill one")
    if hides_keys:
        reasons.append("tiles that no query sees are skipped")
    return AttentionPlan(
        backend="mma", kernel="mma_kernel", why="; ".join(reasons), block_m=tile.queries, block_n=tile.keys,
        num_warps=tile.warps, num_stages=1, width=tile.width, packed_heads=packed, tiles=tiles, programs=tiles * heads,
    )  # fmt: skip


def _tile(width: int, capability: tuple[int, int]) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a tile."""
    if capability >= _FIRST_WITH_DESCRIPTORS:
        # Four warps and 64 rows where two or three such programs fit an SM: one's softmax runs beside another's
        # products. Chosen by measurement on an H200; a third stage is worth a program less except at 64 columns. Never
        # eight warps: in Triton 3.6 one half doesn't wait for the other's products before it reloads their operands.
        if width <= 64:
            return (64, 128, 4, 2) if width == 64 else (64, 128, 4, 3)
        return (64, 64, 4, 3)
    return (128, 64, 4, 3) if width <= 64 else (128, 64, 8, 2) if width <= 128 else (128, 32, 8, 2)


def _shared_limit(capability: tuple[int, int]) -> int:
    return _LARGE_SHARED.get(capability, _SMALL_SHARED)


def _shared_bytes(block_m: int, block_n: int, width: int, stages: int) -> int:
    """Q once, K and V once a stage, and a little for barriers."""
    return (block_m + 2 * stages * block_n) * width * _ITEM_BYTES + 1024


def explain_attention(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    *,
    causal: bool = False,
    scale: float | None = None,
    window: object = None,
    softcap: object = None,
    sinks: object = None,
    alibi_slopes: object = None,
    bias: str | None = None,
    align: str = "bottom-right",
    return_lse: bool = False,
    device: str = "cuda",
    capability: tuple[int, int] = (9, 0),
    descriptors: bool = True,
    backend: str = "auto",
    dtype: str = "bfloat16",
    packed: bool = False,
    page_size: int | None = None,
    tokens: int | None = None,
) -> AttentionPlan:
    """What attention(q, k, v, ...) would run for q [B, H, Sq, D], k [B, Hkv, Sk, D] on a device of this capability.

    Of softcap to alibi_slopes only whether they are None matters; bias: its dtype ("bool", "float32"). descriptors:
    whether the strides of K and V allow tensor descriptors (multiples of 16 bytes, none of them 0); of Q and the output
    as well for Hopper's kernel. packed: attention_varlen, each sequence with Sq queries, or with as many at most where
    tokens says how many they all have; page_size: of its keys, where block_table is given.
    """
    batch, num_heads, num_queries, head_dim = q_shape
    num_kv_heads, num_keys = k_shape[1], k_shape[2]
    if backend not in BACKENDS:
        raise InvalidArgumentError("attention: backend", got=shown(backend), allowed=", ".join(BACKENDS))
    wanted = options(
        "attention", head_dim=head_dim, causal=causal, scale=scale, window=cast("Window", window), softcap=None,
        align=align,
    )  # fmt: skip
    extras = any(x is not None for x in (softcap, sinks, alibi_slopes)) or return_lse or packed
    if device == "cpu" or backend in ("reference", "torch"):
        sizes = (batch, num_heads, num_queries, num_keys)
        return _in_pytorch(backend, sizes, wanted=wanted, extras=extras, bias=bias, dtype=dtype)
    if backend == "mma":
        why_not = mma_refusal(capability, alibi=alibi_slopes is not None, bias=bias is not None)
        if why_not is not None:
            raise UnsupportedError("attention (backend=mma)", got=why_not, next='Use backend="auto".')
        return plan_on_mma(
            batch=batch, num_heads=num_heads, num_kv_heads=num_kv_heads, num_queries=num_queries, head_dim=head_dim,
            hides_keys=wanted.hides_keys,
        )  # fmt: skip
    strides = None if descriptors else "strides forbid descriptors"
    # Other pages than the kernel reads are copied into rows first, unless it is asked for by name.
    copied = backend == "auto" and page_size not in (None, *PAGE_SIZES)
    call = HopperCall(
        capability, dtype, head_dim, positive_scale=wanted.scale > 0, alibi=alibi_slopes is not None,
        bias=bias is not None, left=wanted.left is not None, packed=packed, page_size=None if copied else page_size,
        strides=strides,
    )  # fmt: skip
    why_not = refusal(call, asked_for=backend == "gluon") if backend != "triton" else None
    if why_not is not None and backend == "gluon":
        raise UnsupportedError("attention (backend=gluon)", got=why_not, next='Use backend="auto".')
    if 0 in (batch, num_heads, num_queries, tokens):
        return AttentionPlan("triton" if why_not or backend == "triton" else "gluon", "none", "no queries: no launch")
    if why_not is None and backend != "triton":
        shift = wanted.shift(num_queries, num_keys)
        # As the launch leaves out keys that no query sees.
        if wanted.right is not None and not packed:
            num_keys = min(num_keys, num_queries + shift + wanted.right)
        if num_keys <= 0 and not packed:
            return AttentionPlan("gluon", "none", "no query sees a key: zeros are written")
        plan = plan_on_hopper(
            batch=batch, num_heads=num_heads, num_kv_heads=num_kv_heads, num_keys=num_keys, head_dim=head_dim,
            num_queries=tokens or (num_queries * batch if packed else num_queries), right=wanted.right,
            left=wanted.left, shift=shift, sequences=batch if packed else None,
        )  # fmt: skip
        return replace(plan, why=f"{plan.why}; pages of {page_size} keys are copied first") if copied else plan
    return plan_attention(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_queries=num_queries,
        head_dim=head_dim,
        hides_keys=wanted.hides_keys,
        descriptors=descriptors,
        capability=capability,
        wide_bias=bias == "float32",
        why_not_hopper=why_not,
    )


def _in_pytorch(
    backend: str, sizes: tuple[int, int, int, int], *, wanted: Options, extras: bool, bias: str | None, dtype: str
) -> AttentionPlan:
    """On a CPU, or where PyTorch is asked for. sizes: batch, heads, queries, keys. extras: as plan_on_torch's."""
    if backend == "reference":
        return AttentionPlan("reference", "float32 PyTorch", "asked for")
    if backend == "torch":
        says_bias = bias in (None, "bool") or (bias == dtype and not wanted.hides_keys)
        if extras or 0 in sizes or not says_bias:
            what = "softcap, sinks, ALiBi, LSE, packed or empty sequences, or a float bias beside a mask"
            raise UnsupportedError("attention (backend=torch)", got=what, next='Use backend="auto".')
        return AttentionPlan("torch", "scaled_dot_product_attention", "asked for")
    if backend != "auto":
        raise UnsupportedError(f"attention (backend={backend})", got="a CPU", next='Use backend="auto".')
    return plan_on_torch(
        num_queries=sizes[2], num_keys=sizes[3], hides_keys=wanted.hides_keys, extras=extras, bias=bias is not None
    )


def plan_on_torch(*, num_queries: int, num_keys: int, hides_keys: bool, extras: bool, bias: bool) -> AttentionPlan:
    """Plan for a CPU. extras: what scaled_dot_product_attention can't say: softcap, sinks, ALiBi, the LSE."""
    if bias:
        return AttentionPlan(
            "reference", "float32 PyTorch", "keys that a bias hides may hold NaN, which SDPA would spread"
        )
    if extras:
        return AttentionPlan(
            "reference", "float32 PyTorch", "softcap, sinks, ALiBi and the LSE are beyond PyTorch's SDPA"
        )
    if num_keys == 0 or num_queries == 0:
        return AttentionPlan("reference", "float32 PyTorch", "nothing to attend to")
    why = "a mask is built only where the causal flag can't say it" if hides_keys else "no mask is needed"
    return AttentionPlan("torch", "scaled_dot_product_attention", why)
