"""What `masked_multihead_attention` accepts."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.attention.masks import is_finite, is_whole
from onewave.ops.decode_attention.caches import cache_shape
from onewave.ops.library import check_apart, check_optional, check_tensors, shares_elements

_NAME = "masked_multihead_attention"
_CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_CUDA_DTYPES = (torch.float16, torch.bfloat16)
# Of biases, scales and masks: float8 is neither promoted nor read everywhere.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FLOAT_NAMES = "bfloat16, float16, float32, float64"


def check_arguments(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    seq_lens: Tensor,
    *,
    bias: Tensor | None,
    src_mask: Tensor | None,
    finished: Tensor | None,
    rotary: Tensor | None,
    qkv_out_scale: Tensor | None,
    out_shift: Tensor | None,
    out_smooth: Tensor | None,
    out_scale: float | None,
    max_bound: float,
    min_bound: float,
    steps_per_block: int,
    scale: float | None,
    dtype: torch.dtype | None,
    out: Tensor | None,
) -> tuple[int, torch.dtype]:
    """Check everything that needs no reading of tensors. Returns (query heads, the result's dtype).

    Raises ShapeError, UnsupportedError, InvalidArgumentError.
    """
    optional = {
        "bias": bias, "src_mask": src_mask, "finished": finished, "rotary": rotary, "qkv_out_scale": qkv_out_scale,
        "out_shift": out_shift, "out_smooth": out_smooth, "out": out,
    }  # fmt: skip
    check_optional(_NAME, optional)
    check_tensors(_NAME, qkv=qkv, cache_k=cache_k, cache_v=cache_v, seq_lens=seq_lens)
    others = (cache_k, cache_v, seq_lens, bias, src_mask, finished, rotary, qkv_out_scale, out_shift, out_smooth, out)
    for other in others:
        if other is not None and other.device != qkv.device:
            raise UnsupportedError(f"{_NAME}: devices", got=f"{qkv.device} and {other.device}", allowed="one device")
    if qkv.ndim not in (2, 3, 4) or (qkv.ndim == 4 and qkv.shape[1] != 1):
        allowed = "[rows, W, head_dim], [rows, 1, W, head_dim] or [rows, W * head_dim]"
        raise ShapeError(f"{_NAME}: qkv", got=str(tuple(qkv.shape)), allowed=allowed)
    rows = qkv.shape[0]
    shape = cache_shape(_NAME, cache_k, cache_v, None, rows)
    check_apart(f"{_NAME}: cache_k", cache_k)
    check_apart(f"{_NAME}: cache_v", cache_v)
    num_heads = _num_heads(qkv, shape.num_kv_heads, shape.head_dim)
    _check_dtypes(qkv, cache_v, qkv_out_scale)
    width = num_heads + 2 * shape.num_kv_heads
    if seq_lens.shape != (rows,) or seq_lens.dtype not in (torch.int32, torch.int64):
        got = f"{seq_lens.dtype} {tuple(seq_lens.shape)}"
        raise ShapeError(f"{_NAME}: seq_lens", got=got, allowed=f"int32 or int64 [{rows}]")
    if finished is not None and (finished.shape != (rows,) or finished.dtype is not torch.bool):
        got = f"{finished.dtype} {tuple(finished.shape)}"
        raise ShapeError(f"{_NAME}: finished", got=got, allowed=f"bool [{rows}]")
    for name, tensor, heads in (
        ("bias", bias, width),
        ("qkv_out_scale", qkv_out_scale, width),
        ("out_shift", out_shift, num_heads),
        ("out_smooth", out_smooth, num_heads),
    ):
        if tensor is not None:
            _check_channels(name, tensor, (heads, shape.head_dim))
    if src_mask is not None:
        _check_mask(src_mask, rows, num_heads)
    if rotary is not None:
        _check_rotary(rotary, rows, shape.head_dim)
    _check_numbers(out_scale, max_bound, min_bound, steps_per_block, scale)
    return num_heads, _result_dtype(qkv, cache_v, num_heads, out_scale, dtype, out)


def _num_heads(qkv: Tensor, num_kv_heads: int, head_dim: int) -> int:
    """How many query heads qkv holds besides the cache's key and value heads."""
    if head_dim % 8 or not 16 <= head_dim <= 256:
        raise UnsupportedError(f"{_NAME}: head_dim", got=str(head_dim), allowed="multiples of 8 from 16 to 256")
    width = qkv.shape[1] // head_dim if qkv.ndim == 2 else qkv.shape[-2]
    fits = qkv.shape[1] == width * head_dim if qkv.ndim == 2 else qkv.shape[-1] == head_dim
    num_heads = width - 2 * num_kv_heads
    if not fits or num_heads <= 0 or num_heads % num_kv_heads:
        raise ShapeError(
            f"{_NAME}: qkv",
            got=str(tuple(qkv.shape)),
            allowed=f"a multiple of {num_kv_heads} query heads + {2 * num_kv_heads} for k and v, each of {head_dim}",
        )
    return num_heads


def _check_dtypes(qkv: Tensor, cache_v: Tensor, qkv_out_scale: Tensor | None) -> None:
    allowed = _CUDA_DTYPES if qkv.is_cuda else _CPU_DTYPES
    if cache_v.dtype not in allowed:
        names = ", ".join(str(kind).removeprefix("torch.") for kind in allowed)
        raise UnsupportedError(f"{_NAME}: cache dtype", got=f"{cache_v.dtype} on {qkv.device.type}", allowed=names)
    if qkv.dtype not in (cache_v.dtype, torch.int32):
        raise UnsupportedError(
            f"{_NAME}: dtype of qkv", got=str(qkv.dtype), allowed=f"{cache_v.dtype} as the cache, int32"
        )
    if (qkv.dtype is torch.int32) != (qkv_out_scale is not None):
        raise InvalidArgumentError(
            f"{_NAME}: qkv_out_scale",
            got="None" if qkv_out_scale is None else f"a tensor, with {qkv.dtype} qkv",
            allowed="given with int32 qkv, None otherwise",
        )


def _check_channels(name: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    """A scale, bias or offset of every channel."""
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{_NAME}: {name}", got=str(tuple(tensor.shape)), allowed=str(shape))
    if tensor.dtype not in _FLOATS:
        raise UnsupportedError(f"{_NAME}: dtype of {name}", got=str(tensor.dtype), allowed=_FLOAT_NAMES)


def _check_mask(src_mask: Tensor, rows: int, num_heads: int) -> None:
    if src_mask.ndim != 4 or src_mask.shape[:3] not in ((rows, 1, 1), (rows, num_heads, 1)) or src_mask.shape[3] == 0:
        allowed = f"[{rows}, 1 or {num_heads}, 1, keys]"
        raise ShapeError(f"{_NAME}: src_mask", got=str(tuple(src_mask.shape)), allowed=allowed)
    if src_mask.dtype not in _FLOATS:
        raise UnsupportedError(
            f"{_NAME}: dtype of src_mask", got=str(src_mask.dtype), allowed=f"{_FLOAT_NAMES}, added to the scores"
        )
    if src_mask.stride(3) != 1 and src_mask.shape[3] > 1:
        raise ShapeError(f"{_NAME}: strides of src_mask", got=str(src_mask.stride()), allowed="a contiguous last axis")


def _check_rotary(rotary: Tensor, rows: int, head_dim: int) -> None:
    if rotary.ndim != 2 or rotary.shape[0] != rows or rotary.shape[1] % 2 or rotary.shape[1] > head_dim:
        allowed = f"[{rows}, an even rotary_dim up to {head_dim}]"
        raise ShapeError(f"{_NAME}: rotary", got=str(tuple(rotary.shape)), allowed=allowed)
    if rotary.dtype is not torch.float32:
        raise UnsupportedError(f"{_NAME}: dtype of rotary", got=str(rotary.dtype), allowed="float32")


def _check_numbers(
    out_scale: float | None, max_bound: float, min_bound: float, steps_per_block: int, scale: float | None
) -> None:
    for name, number in (("scale", scale), ("out_scale", out_scale)):
        if number is not None and not is_finite(number):
            raise InvalidArgumentError(f"{_NAME}: {name}", got=shown(number), allowed="a finite number, or None")
    if not (is_finite(min_bound) and is_finite(max_bound) and -128 <= min_bound <= max_bound <= 127):
        raise InvalidArgumentError(
            f"{_NAME}: quant_min_bound, quant_max_bound",
            got=f"{min_bound!r}, {max_bound!r}",
            allowed="in order within int8",
        )
    if not is_whole(steps_per_block) or steps_per_block <= 0:
        allowed = "a whole number greater than 0"
        raise InvalidArgumentError(f"{_NAME}: steps_per_block", got=shown(steps_per_block), allowed=allowed)
    if out_scale is not None and not out_scale > 0:
        raise InvalidArgumentError(f"{_NAME}: out_scale", got=str(out_scale), allowed="greater than 0, or None")


def _result_dtype(
    qkv: Tensor,
    cache_v: Tensor,
    num_heads: int,
    out_scale: float | None,
    dtype: torch.dtype | None,
    out: Tensor | None,
) -> torch.dtype:
    wanted = torch.int8 if out_scale is not None else dtype or (cache_v.dtype if out is None else out.dtype)
    if (out_scale is None and wanted not in _CPU_DTYPES) or dtype not in (None, wanted):
        got = f"{dtype or wanted} with out_scale {out_scale}"
        raise UnsupportedError(f"{_NAME}: dtype", got=got, allowed="int8 with out_scale, a float dtype without")
    if out is not None:
        head_dim = cache_v.shape[3]
        right = (*qkv.shape[:-2], num_heads, head_dim) if qkv.ndim > 2 else (qkv.shape[0], num_heads * head_dim)
        if tuple(out.shape) != right or out.dtype is not wanted or out.stride(-1) != 1 or shares_elements(out):
            raise ShapeError(
                f"{_NAME}: out",
                got=f"{out.dtype} {tuple(out.shape)}, strides {out.stride()}",
                allowed=f"{wanted} {right} with a contiguous last axis, elements of their own",
            )
    return wanted


def check_lengths(seq_lens: Tensor, finished: Tensor | None, capacity: int, src_mask: Tensor | None) -> None:
    """Read the lengths on the host: every row that takes part has room for its token and a mask that reaches it.

    Raises InvalidArgumentError. Waits for the device.
    """
    lengths = seq_lens if finished is None else seq_lens.masked_fill(finished, -1)
    longest = int(lengths.max()) if lengths.numel() else -1
    if longest >= capacity:
        allowed = f"less than {capacity}, the cache's capacity"
        raise InvalidArgumentError(f"{_NAME}: seq_lens", got=str(longest), allowed=allowed)
    if src_mask is not None and longest >= src_mask.shape[3]:
        raise InvalidArgumentError(
            f"{_NAME}: src_mask", got=f"{src_mask.shape[3]} keys", allowed=f"at least {longest + 1}, the longest row's"
        )
