"""Everything between the QKV projection and attention: bias, q/k norm, rotary embedding, KV-cache write."""

from typing import Any

import torch
from torch import Tensor

from onewave.ops.append_kv.call import SCHEMA, AppendCall, check, check_contents
from onewave.ops.append_kv.choose import choose
from onewave.ops.backends import load
from onewave.ops.choice import Choice, Kept
from onewave.ops.library import checks_contents, is_readable, is_watched, register
from onewave.ops.prepared import prepared

_NAME = "append_kv"


@prepared
def append_kv(
    qkv: Tensor,
    rotary: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    rotary_style: str = "neox",
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Add bias, normalise and rotate q and k, write k and v into the cache, return q.

    qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim] bf16|fp16 (float32 on a CPU); head_dim a multiple of 8 up
    to 256, on a CPU any even one. rotary: [tokens, rotary_dim] float32, cosines then sines of each token's position, or
    None; pairs are (i, i + rotary_dim / 2) for "neox", (2i, 2i + 1) for "interleaved"; dimensions past rotary_dim are
    not rotated.
    k_cache, v_cache: [slots, num_kv_heads, capacity, head_dim], any strides with a contiguous last axis; k may be
    packed, [slots, num_kv_heads, head_dim / x, capacity, x], x elements being 16 bytes. Their dtype is qkv's, int8 or
    float8_e4m3fn: then x / scale is stored, rounded half to even and saturated at the dtype's range; k_scale, v_scale:
    [num_kv_heads] float32, default 1.
    slots, positions: [tokens] int64|int32: token i goes to cache[slots[i], :, positions[i]]. With block_table, [rows,
    blocks a row] int32|int64, the caches are [blocks, num_kv_heads, block_size, head_dim] and token i goes to block
    block_table[slots[i], positions[i] // block_size]. A token of negative position is not stored; on a CPU none whose
    slot, position or block does not exist.
    bias: [qkv.shape[1]]. q_norm, k_norm: [head_dim], applied before the rotation (Qwen3).

    Returns q: [tokens, num_heads, head_dim]. The sum with bias and the norms are rounded to qkv's dtype as separate
    operations would; rotation is in float32, rounded once. qkv may be overwritten. ONEWAVE_DEBUG=1 checks slots,
    positions and block table, with a synchronisation. Raises ShapeError, UnsupportedError, InvalidArgumentError.
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    vectors = (rotary, bias, q_norm, k_norm)
    watched = is_watched(qkv, rotary, k_cache, v_cache, bias, q_norm, k_norm, k_scale, v_scale)
    plain = block_table is None and k_scale is None and v_scale is None and rotary_style == "neox" and backend == "auto"
    signature = None
    if plain and not watched and type(num_heads) is int and type(eps) is float:  # 4.0 and 4 would be one
        try:
            signature = _signature(qkv, k_cache, v_cache, slots, positions, (num_heads, eps), vectors)
        except AttributeError:
            signature = None  # one of them is None; the checks say which
    choice = None if signature is None else _seen.get(signature)
    if choice is not None:
        call = AppendCall.of(
            qkv=qkv, rotary=rotary, k_cache=k_cache, v_cache=v_cache, slots=slots, positions=positions,
            num_heads=num_heads, bias=bias, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
    else:
        call = AppendCall(
            qkv, rotary, k_cache, v_cache, slots, positions, num_heads, bias, q_norm, k_norm, eps,
            rotary_style == "interleaved", block_table, k_scale, v_scale, backend,
        )  # fmt: skip
        check(call, rotary_style)
        if signature is None:
            call = AppendCall(*call.flat)  # with Python's numbers: they may be NumPy's
        if not watched:
            choice = choose(call)
        if signature is not None and choice is not None:
            _seen.keep(signature, choice)
    if (not watched or is_readable(qkv, slots, positions, block_table)) and checks_contents():
        check_contents(call)
    if choice is None:
        return torch.ops.onewave.append_kv(*call.flat)
    return load(_NAME, choice.module).run(call, choice)


# Choices for calls of the plain form that were checked. A layer of a small model takes tens of microseconds on a CPU,
# and all checks together a quarter of that; looking a call up takes a tenth of the checks.
_seen: Kept[Choice] = Kept()


def _signature(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    numbers: tuple[int, float],
    vectors: tuple[Tensor | None, ...],
) -> object:
    """All that the checks of a plain call look at. numbers: num_heads, eps. vectors: rotary, bias, q_norm, k_norm."""
    rotary, bias, q_norm, k_norm = vectors
    given = None
    if bias is not None or q_norm is not None or k_norm is not None:
        given = tuple(v if v is None else (v.shape, v.stride(), v.dtype, v.device) for v in vectors[1:])
    return (
        qkv.shape, qkv.dtype, qkv.device, k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device, v_cache.shape,
        v_cache.stride(), v_cache.dtype, v_cache.device, slots.shape, slots.dtype, slots.device, positions.shape,
        positions.dtype, positions.device, numbers, given,
        None if rotary is None else (rotary.shape, rotary.dtype, rotary.device),
    )  # fmt: skip


def _library(qkv: Tensor, *flat: Any) -> Tensor:
    # The schema says that only the caches are written; the CPU loops use qkv as scratch.
    call = AppendCall(qkv if qkv.is_cuda else qkv.clone(), *flat)
    choice = choose(call)
    return load(_NAME, choice.module).run(call, choice)


def _fake(qkv: Tensor, *flat: Any) -> Tensor:
    call = AppendCall(qkv, *flat)
    return torch.empty((qkv.shape[0], call.num_heads, call.v_cache.shape[3]), dtype=qkv.dtype, device=qkv.device)


register(_NAME, _library, _fake, schema=SCHEMA, mutates=("k_cache", "v_cache"))
