"""Everything between the QKV projection and attention: bias, q/k norm, rotary embedding, KV-cache write."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.ops.append_kv.checks import check_arguments, check_contents
from onewave.ops.backends import load
from onewave.ops.library import checks_contents, is_readable, is_watched, register

_NAME = "append_kv"


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

    qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim] bf16|fp16 (float32 on a CPU). rotary: [tokens, rotary_dim]
    float32, cosines then sines of each token's position, or None; pairs are (i, i + rotary_dim / 2) for "neox",
    (2i, 2i + 1) for "interleaved"; dimensions past rotary_dim are not rotated. head_dim: a multiple of 8 up to 256.
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
            signature = _signature(qkv, k_cache, v_cache, slots, positions, num_heads, eps, vectors)
        except AttributeError:
            signature = None  # one of them is None; the checks say which
    is_cpu_case = None if signature is None else _seen.get(signature)
    if is_cpu_case is None:
        check_arguments(
            qkv, rotary, k_cache, v_cache, slots, positions, num_heads, bias, q_norm, k_norm, eps, rotary_style,
            block_table, k_scale, v_scale, backend,
        )  # fmt: skip
        if signature is not None:
            if len(_seen) >= _MOST_SEEN:
                _seen.clear()
            is_cpu_case = _seen[signature] = _is_cpu_case(qkv, k_cache, v_cache, slots, positions, *vectors)
    if (not watched or is_readable(qkv, slots, positions, block_table)) and checks_contents():
        check_contents(slots, positions, v_cache, block_table)
    if is_cpu_case:
        return load(_NAME, "numba_impl").append_kv(
            qkv, rotary, k_cache, v_cache, slots, positions, num_heads=num_heads, bias=bias, q_norm=q_norm,
            k_norm=k_norm, eps=eps,
        )  # fmt: skip
    return (torch.ops.onewave.append_kv if watched else _run)(
        qkv, rotary, k_cache, v_cache, slots, positions, int(num_heads), bias, q_norm, k_norm, float(eps),
        rotary_style == "interleaved", block_table, k_scale, v_scale, backend,
    )  # fmt: skip


# Calls of the plain form that were checked, and whether the CPU loops take them. A layer of a small model takes tens of
# microseconds on a CPU, and all checks together a quarter of that; looking a call up takes a tenth of the checks.
_seen: dict[object, bool] = {}
_MOST_SEEN = 4096


def _signature(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    num_heads: int,
    eps: float,
    vectors: tuple[Tensor | None, ...],
) -> object:
    """All that the checks of a plain call look at. vectors: rotary, bias, q_norm, k_norm."""
    rotary, bias, q_norm, k_norm = vectors
    given = None
    if bias is not None or q_norm is not None or k_norm is not None:
        given = tuple(v if v is None else (v.shape, v.stride(), v.dtype, v.device) for v in vectors[1:])
    return (
        qkv.shape, qkv.dtype, qkv.device, k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device, v_cache.shape,
        v_cache.stride(), v_cache.dtype, v_cache.device, slots.shape, slots.dtype, slots.device, positions.shape,
        positions.dtype, positions.device, num_heads, eps, given,
        None if rotary is None else (rotary.shape, rotary.dtype, rotary.device),
    )  # fmt: skip


def _run(
    qkv: Tensor,
    rotary: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    num_heads: int,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    backend: str,
) -> Tensor:
    vectors = (rotary, bias, q_norm, k_norm)
    extras = interleaved or block_table is not None or k_scale is not None or v_scale is not None
    is_cpu_case = not extras and _is_cpu_case(qkv, k_cache, v_cache, slots, positions, *vectors)
    if backend == "cpu" and not is_cpu_case:
        raise UnsupportedError(
            f"{_NAME} (backend=cpu)", allowed="float32, plain caches, neox rotation", next='Use backend="auto".'
        )
    if is_cpu_case and backend != "reference":
        assert rotary is not None
        return load(_NAME, "numba_impl").append_kv(
            qkv, rotary, k_cache, v_cache, slots, positions, num_heads=num_heads, bias=bias, q_norm=q_norm,
            k_norm=k_norm, eps=eps,
        )  # fmt: skip
    use_triton = qkv.is_cuda and backend != "reference"
    return load(_NAME, "triton_impl" if use_triton else "reference").append_kv(
        qkv, rotary, k_cache, v_cache, slots, positions, num_heads=num_heads, bias=bias, q_norm=q_norm, k_norm=k_norm,
        eps=eps, interleaved=interleaved, block_table=block_table, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


def _is_cpu_case(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rotary: Tensor | None,
    *vectors: Tensor | None,
) -> bool:
    """Whether the compiled CPU loops take it: float32, and no gaps inside a head of either cache."""
    strides = k_cache.stride()
    return (
        qkv.dtype is torch.float32
        and k_cache.dtype is torch.float32
        and rotary is not None
        and qkv.is_cpu
        and len(strides) == 4
        and strides == v_cache.stride()
        and strides[2] == k_cache.shape[3]
        and slots.dtype is torch.int64
        and positions.dtype is torch.int64
        and all(vector is None or (vector.dtype is torch.float32 and vector.is_contiguous()) for vector in vectors)
    )


def _library(
    qkv: Tensor,
    rotary: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    num_heads: int,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    # The schema says that only the caches are written; the CPU loops use qkv as scratch.
    kept = qkv if qkv.is_cuda else qkv.clone()
    return _run(
        kept, rotary, k_cache, v_cache, slots, positions, num_heads, bias, q_norm, k_norm, eps, interleaved,
        block_table, k_scale, v_scale, backend,
    )  # fmt: skip


def _fake(
    qkv: Tensor,
    rotary: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    num_heads: int,
    *_: object,
    **__: object,
) -> Tensor:
    return torch.empty((qkv.shape[0], num_heads, v_cache.shape[3]), dtype=qkv.dtype, device=qkv.device)


register(_NAME, _library, _fake, mutates=("k_cache", "v_cache"))
