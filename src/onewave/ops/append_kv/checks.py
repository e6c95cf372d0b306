"""What `append_kv` accepts. One cheap question for a call that is right; the reasons only for one that is not."""

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.append_kv.call import AppendCall
from onewave.ops.attention.checks import check_head_dim
from onewave.ops.attention.masks import is_finite, is_whole
from onewave.ops.decode_attention.caches import cache_shape
from onewave.ops.library import check_apart, check_one_device, check_optional, check_rotary, check_tensors

_NAME = "append_kv"
_BACKENDS = ("auto", "triton", "cpu", "reference")
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (*_CUDA_DTYPES, torch.float32, torch.float64)
_INDEX_DTYPES = (torch.int64, torch.int32)
_QUANTISED = (torch.int8, torch.float8_e4m3fn)


def check(call: AppendCall, rotary_style: str) -> None:
    """Raises ShapeError, UnsupportedError, InvalidArgumentError. rotary_style: as the caller gave it."""
    qkv, rotary, k_cache, v_cache, slots, positions = (
        call.qkv, call.rotary, call.k_cache, call.v_cache, call.slots, call.positions
    )  # fmt: skip
    bias, q_norm, k_norm = call.vectors
    num_heads, eps, block_table, k_scale, v_scale = (
        call.num_heads, call.eps, call.block_table, call.k_scale, call.v_scale
    )  # fmt: skip
    vectors = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm, "k_scale": k_scale, "v_scale": v_scale}
    check_optional(_NAME, vectors | {"rotary": rotary, "block_table": block_table})
    check_tensors(_NAME, qkv=qkv, k_cache=k_cache, v_cache=v_cache, slots=slots, positions=positions)
    if not is_whole(num_heads):
        raise InvalidArgumentError(f"{_NAME}: num_heads", got=shown(num_heads), allowed="a whole number")
    if not is_finite(eps) or eps < 0:
        raise InvalidArgumentError(f"{_NAME}: eps", got=shown(eps), allowed="a finite number, at least 0")
    options = (("rotary_style", rotary_style, ("neox", "interleaved")), ("backend", call.backend, _BACKENDS))
    for name, value, choices in options:
        if value not in choices:
            raise InvalidArgumentError(f"{_NAME}: {name}", got=shown(value), allowed=" or ".join(map(repr, choices)))
    if qkv.ndim != 2 or v_cache.ndim != 4:
        raise ShapeError(
            f"{_NAME}: qkv, v_cache",
            got=f"{tuple(qkv.shape)}, {tuple(v_cache.shape)}",
            allowed="[tokens, (heads + 2 * kv_heads) * head_dim], [slots, kv_heads, capacity, head_dim]",
        )
    tokens, width = qkv.shape
    num_blocks, num_kv_heads, block_size, head_dim = v_cache.shape
    is_usual = (
        k_cache.shape == v_cache.shape
        and k_cache.dtype is v_cache.dtype is qkv.dtype
        and k_cache.stride(3) == v_cache.stride(3) == 1
        and block_table is None
    )
    check_apart(f"{_NAME}: k_cache", k_cache)
    check_apart(f"{_NAME}: v_cache", v_cache)
    if not is_usual:
        rows = num_blocks if block_table is None else block_table.shape[0] if block_table.ndim else 0
        cache_shape(_NAME, k_cache, v_cache, block_table, rows)
        if block_table is not None and block_size == 0 and tokens:
            raise ShapeError(f"{_NAME}: block_size", got="0", allowed="at least 1, with block_table")
    _check_heads(call)
    if slots.shape != (tokens,) or positions.shape != (tokens,):
        got = f"{tuple(slots.shape)}, {tuple(positions.shape)}"
        raise ShapeError(f"{_NAME}: slots, positions", got=got, allowed=f"[{tokens}] each")
    if slots.dtype not in _INDEX_DTYPES or positions.dtype not in _INDEX_DTYPES:
        got = f"{slots.dtype}, {positions.dtype}"
        raise UnsupportedError(f"{_NAME}: dtypes of slots, positions", got=got, allowed="int64, int32")
    if rotary is not None:
        check_rotary(_NAME, rotary, tokens, head_dim)
    for (name, tensor), length in zip(vectors.items(), (width, *(head_dim,) * 2, *(num_kv_heads,) * 2), strict=True):
        if tensor is not None:
            _check_vector(name, tensor, length, k_cache)
    check_one_device(
        _NAME, qkv, (rotary, k_cache, v_cache, slots, positions, bias, q_norm, k_norm, block_table, k_scale, v_scale)
    )
    if call.backend in ("triton", "cpu") and call.on_gpu != (call.backend == "triton"):
        raise UnsupportedError(f"{_NAME} (backend={call.backend})", got=call.where, next='Use backend="auto".')


def _check_heads(call: AppendCall) -> None:
    qkv, k_cache, num_heads = call.qkv, call.k_cache, call.num_heads
    num_kv_heads, head_dim = call.v_cache.shape[1], call.v_cache.shape[3]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape[1] != width or num_heads <= 0 or not num_kv_heads or num_heads % num_kv_heads:
        raise ShapeError(
            f"{_NAME}: qkv",
            got=f"{tuple(qkv.shape)} with {num_heads} query heads",
            allowed=f"[tokens, {width}], query heads a multiple of {num_kv_heads}",
        )
    check_head_dim(_NAME, head_dim, on_cpu=not call.on_gpu, least=8)
    if qkv.dtype not in (_CUDA_DTYPES if call.on_gpu else _CPU_DTYPES):
        got = f"{qkv.dtype} on {call.where}"
        raise UnsupportedError(f"{_NAME}: dtype", got=got, allowed="bfloat16, float16 (float32 on a CPU)")
    if k_cache.dtype is not qkv.dtype and k_cache.dtype not in _QUANTISED:
        raise UnsupportedError(
            f"{_NAME}: cache dtype", got=str(k_cache.dtype), allowed=f"{qkv.dtype} as qkv, int8, float8_e4m3fn"
        )


def _check_vector(name: str, tensor: Tensor, length: int, k_cache: Tensor) -> None:
    if tensor.shape != (length,):
        raise ShapeError(f"{_NAME}: {name}", got=str(tuple(tensor.shape)), allowed=f"[{length}]")
    is_scale = name.endswith("scale")
    if tensor.dtype not in ((torch.float32,) if is_scale else _CPU_DTYPES):
        # No float8: PyTorch adds it to nothing.
        allowed = "float32" if is_scale else "bfloat16, float16, float32, float64"
        raise UnsupportedError(f"{_NAME}: dtype of {name}", got=str(tensor.dtype), allowed=allowed)
    if is_scale and k_cache.dtype not in _QUANTISED:
        raise InvalidArgumentError(
            f"{_NAME}: {name}", got=f"with a {k_cache.dtype} cache", allowed="int8, float8_e4m3fn"
        )


def check_contents(call: AppendCall) -> None:
    """Read slots, positions and blocks back and check them. Raises InvalidArgumentError. Waits for the device."""
    slots, positions, v_cache, block_table = call.slots, call.positions, call.v_cache, call.block_table
    taken = positions >= 0
    rows, places = slots[taken].long(), positions[taken].long()
    if not len(rows):
        return
    num_blocks, block_size = v_cache.shape[0], v_cache.shape[2]
    num_rows, per_row = (num_blocks, 1) if block_table is None else block_table.shape
    for name, values, limit in (("slots", rows, num_rows), ("positions", places, per_row * block_size)):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limit:
            got = str(low if low < 0 else high)
            raise InvalidArgumentError(f"{_NAME}: {name}", got=got, allowed=f"0 to {limit - 1}")
    if block_table is not None:
        blocks = block_table[rows, places // block_size]
        low, high = int(blocks.min()), int(blocks.max())
        if low < 0 or high >= num_blocks:
            got = str(low if low < 0 else high)
            raise InvalidArgumentError(f"{_NAME}: block_table", got=got, allowed=f"0 to {num_blocks - 1}")
