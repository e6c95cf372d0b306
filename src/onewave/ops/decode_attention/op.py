"""Decode attention: one to eight new tokens a row against the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.attention.masks import as_whole, check_softcap, is_finite, is_whole
from onewave.ops.backends import load
from onewave.ops.decode_attention.caches import CacheShape, cache_shape, check_lengths
from onewave.ops.decode_attention.triton.plan import MAX_QUERIES
from onewave.ops.library import (
    check_optional,
    check_tensors,
    checks_contents,
    is_watched,
    refuse_grad,
    register,
    shares_elements,
)

_NAME = "decode_attention"
DECODE_BACKENDS = ("auto", "gluon", "triton", "cpu", "reference")
CPU_TAKES = "one query a row, float32, whole rows of an unpacked cache, no extras"


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    split_size: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend a row's newest tokens to all keys its sequence has in the cache, their own included.

    q: [rows, heads, queries, head_dim] bf16|fp16 (float32 on a CPU), 1 to 8 queries; [rows, heads, head_dim] for one.
    head_dim: a multiple of 8 up to 256.
    k_cache, v_cache: [rows, kv_heads, capacity, head_dim], or [blocks, kv_heads, block_size, head_dim] with
    block_table [rows, blocks a row] int32|int64; k may be packed as [.., kv_heads, head_dim / x, capacity, x], x being
    16 bytes (see caches.py). Their dtype is q's, int8, or float8_e4m3fn; k_scale, v_scale: [kv_heads] float32, what a
    stored number stands for (default 1). Any strides with a contiguous last axis.
    seq_lens: [rows] int32|int64 on the device: keys of each row; query i of n sees the first seq_len - (n - 1 - i). A
    row of length 0 gives 0 and -inf. A negative length leaves the row's output as it is.
    scale: default 1/sqrt(head_dim). window: a query sees at most the last `window` of its keys. softcap: scores become
    softcap * tanh(score / softcap), with a softcap from 1e-6 to 10,000. sinks: [heads], logits that take part in the
    softmax and carry no value. Keys that no query sees may hold NaN, and table entries of blocks of such keys alone are
    not looked at.
    split_size: keys of a partial result, rounded up to whole tiles of 64 or 128; default: by the row's length.
    out: written and returned. backend: "auto", or without any falling back "gluon" (Hopper's kernel, which takes what
    stream_plan.refusal says and gives the same bits), "triton", "cpu" or "reference".

    Returns out like q, and with return_lse also the natural-log sum of exponentials, float32 [rows, heads, queries].
    Sums in float32. A row's bits depend on its own length and cache alone: neither on the batch nor on the capacity,
    but on whether the cache's strides are multiples of 8 elements; others are read one by one, which is slow.
    Nothing is read back to the host, so one captured graph serves every length; ONEWAVE_DEBUG=1 checks lengths and
    block table, with a synchronisation (the reference on a CPU always does). To a CPU's compiled loops keys beyond the
    cache are none, whatever the length says, and a row whose block is none is empty.
    Raises ShapeError, UnsupportedError, InvalidArgumentError.
    Source: Dao et al., Flash-Decoding 2023; Sanovar et al., LeanAttention, arXiv:2405.10480.
    """
    watched = is_watched(q, k_cache, v_cache, seq_lens, block_table, k_scale, v_scale, sinks, out)
    signature = None
    plain = k_scale is None and v_scale is None and softcap is None and sinks is None and split_size is None
    plain = plain and (scale is None or is_finite(scale)) and (window is None or is_whole(window))
    if plain and out is None and backend == "auto" and not (return_lse or watched):
        try:
            signature = _signature(q, k_cache, v_cache, seq_lens, block_table, window) if q.is_cpu else None
        except AttributeError:
            signature = None  # one of them is None; the checks say which
    if signature is not None and signature in _seen:
        result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        load(_NAME, "numba_impl").decode_attention(
            result, q, k_cache, v_cache, seq_lens, block_table, window=window, scale=scale
        )
        return result
    more = {"block_table": block_table, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks, "out": out}
    check_optional(_NAME, more)
    check_tensors(_NAME, q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
    if q.ndim not in (3, 4):
        allowed = "[rows, heads, queries, head_dim] or [rows, heads, head_dim]"
        raise ShapeError(f"{_NAME}: q", got=str(tuple(q.shape)), allowed=allowed)
    queries = q if q.ndim == 4 else q[:, :, None]
    shape = _check(queries, k_cache, v_cache, seq_lens, block_table, window, softcap, split_size)
    if scale is not None and not is_finite(scale):
        raise InvalidArgumentError(f"{_NAME}: scale", got=shown(scale), allowed="a finite number, or None")
    # NumPy's numbers, too, and whole ones of any size.
    scale, softcap = (x if x is None else float(x) for x in (scale, softcap))
    window, split_size = (n if n is None else as_whole(n, _MOST_KEYS) for n in (window, split_size))
    if out is not None:
        refuse_grad(f"{_NAME}: out=", q, k_cache, v_cache, k_scale, v_scale, sinks, out)
    extras = return_lse or any(option is not None for option in (softcap, sinks, k_scale, v_scale))
    _check_backend(backend, queries, k_cache, v_cache, block_table, extras=extras)
    _check_extras(shape.num_kv_heads, q, k_scale, v_scale, sinks, out)
    _check_devices(q, k_cache, v_cache, seq_lens, block_table, k_scale, v_scale, sinks, out)
    if not watched and checks_contents():
        visible = None if window is None else window + queries.shape[2] - 1
        check_lengths(_NAME, seq_lens, shape.capacity, block_table, v_cache.shape[0], shape.block_size, visible)
    elif signature is not None and _is_cpu_case(queries, k_cache, v_cache, block_table):
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen.add(signature)
    tensors = (queries, k_cache, v_cache, seq_lens, block_table, k_scale, v_scale, sinks)
    options = (scale, window, softcap, split_size, backend)
    if out is not None:
        target = out if out.ndim == 4 else out[:, :, None]
        lse = _empty_lse(queries) if return_lse or watched else None
        (torch.ops.onewave.decode_attention_out if watched else _run_out)(target, lse, *tensors, *options)
        result = out
    elif watched:
        result, lse = torch.ops.onewave.decode_attention(*tensors, *options)
        result = result if q.ndim == 4 else result[:, :, 0]
    else:
        result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        target = result if q.ndim == 4 else result[:, :, None]
        lse = _empty_lse(queries) if return_lse else None
        _run_out(target, lse, *tensors, *options)
    if not return_lse:
        return result
    assert lse is not None
    return result, lse


# Plain calls that were checked and that the CPU loops take. A layer of a small model takes tens of microseconds on a
# CPU, and all checks together a quarter of that.
_seen: set[object] = set()
_MOST_SEEN = 4096
# Beyond any row.
_MOST_KEYS = 1 << 30


def _signature(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, block_table: Tensor | None, window: int | None
) -> object:
    """All that the checks of a plain call look at."""
    return (
        q.shape, q.stride(), q.dtype, q.device, k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device,
        v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device, seq_lens.shape, seq_lens.dtype,
        seq_lens.device, window,
        None if block_table is None else (block_table.shape, block_table.dtype, block_table.device),
    )  # fmt: skip


def _run_out(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    split_size: int | None,
    backend: str,
) -> None:
    """Write out and lse ([rows, heads, queries, ..]) with the implementation that the call's tensors choose."""
    name = backend
    plain = (softcap, sinks, k_scale, v_scale, lse) == (None,) * 5 and q.shape[2] == 1 and k_cache.ndim == 4
    if backend == "auto" and not q.is_cuda:
        name = "cpu" if plain and _is_cpu_case(q, k_cache, v_cache, block_table) else "reference"
    if name == "cpu":
        load(_NAME, "numba_impl").decode_attention(
            out, q, k_cache, v_cache, seq_lens, block_table, window=window, scale=scale
        )
        return
    options = {
        "block_table": block_table,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if q.is_cuda and name != "reference":
        load(_NAME, "triton.launch").decode_attention(
            out, lse, q, k_cache, v_cache, seq_lens, split_size=split_size, backend=name, **options
        )
        return
    if not q.is_cuda:  # where looking costs little
        capacity = v_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
        visible = None if window is None else window + q.shape[2] - 1
        check_lengths(_NAME, seq_lens, capacity, block_table, v_cache.shape[0], v_cache.shape[2], visible)
    # 16-bit products would round scores, which PyTorch's own attention does not.
    exact = torch.promote_types(q.dtype, torch.float32)
    result, result_lse = load(_NAME, "reference").decode_attention(q.to(exact), k_cache, v_cache, seq_lens, **options)
    kept = (seq_lens >= 0)[:, None, None]
    out.copy_(torch.where(kept[..., None], result, out))
    if lse is not None:
        lse.copy_(torch.where(kept, result_lse, lse))


def _is_cpu_case(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> bool:
    """Whether the compiled CPU loops take it: float32, one query a row, whole rows of the cache, no gaps in a head."""
    return (
        q.dtype is torch.float32
        and q.is_cpu
        and q.shape[2] == 1
        and k_cache.dtype is torch.float32
        and (block_table is None or block_table.shape[1] == 1)
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride(2) == k_cache.shape[3]
    )


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    window: int | None,
    softcap: float | None,
    split_size: int | None,
) -> CacheShape:
    rows, num_heads, num_queries, head_dim = q.shape
    shape = cache_shape(_NAME, k_cache, v_cache, block_table, rows)
    if num_heads % shape.num_kv_heads or head_dim != shape.head_dim or not 1 <= num_queries <= MAX_QUERIES:
        raise ShapeError(
            f"{_NAME}: q",
            got=f"{num_heads} heads, {num_queries} queries, head_dim {head_dim}",
            allowed=f"a multiple of {shape.num_kv_heads} heads, 1 to {MAX_QUERIES} queries, head_dim {shape.head_dim}",
        )
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise UnsupportedError(f"{_NAME}: head_dim", got=str(head_dim), allowed="multiples of 8 up to 256")
    if q.stride(-1) != 1:
        raise ShapeError(f"{_NAME}: q strides", got=str(q.stride()), allowed="a contiguous last axis")
    compute = (
        (torch.float16, torch.bfloat16) if q.is_cuda else (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    )
    if q.dtype not in compute:
        allowed = "float16, bfloat16" + (" (float32 on a CPU)" if q.is_cuda else ", float32")
        raise UnsupportedError(f"{_NAME}: dtype of q", got=str(q.dtype), allowed=allowed)
    if k_cache.dtype not in (q.dtype, torch.int8, torch.float8_e4m3fn):
        raise UnsupportedError(
            f"{_NAME}: cache dtype", got=str(k_cache.dtype), allowed=f"{q.dtype} as q, int8, float8_e4m3fn"
        )
    if seq_lens.shape != (rows,) or seq_lens.dtype not in (torch.int32, torch.int64):
        got = f"{seq_lens.dtype} {tuple(seq_lens.shape)}"
        raise ShapeError(f"{_NAME}: seq_lens", got=got, allowed=f"int32 or int64 [{rows}]")
    for name, value in (("window", window), ("split_size", split_size)):
        if value is not None and not (is_whole(value) and value > 0):
            allowed = "a whole number greater than 0, or None"
            raise InvalidArgumentError(f"{_NAME}: {name}", got=shown(value), allowed=allowed)
    check_softcap(f"{_NAME}: softcap", softcap)
    return shape


def _check_backend(
    backend: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, *, extras: bool
) -> None:
    """extras: softcap, sinks, the cache's scales or the LSE."""
    if backend not in DECODE_BACKENDS:
        raise InvalidArgumentError(f"{_NAME}: backend", got=shown(backend), allowed=", ".join(DECODE_BACKENDS))
    what = f"{q.dtype} on {q.device}"
    if backend == "cpu" and (extras or q.is_cuda or not _is_cpu_case(q, k_cache, v_cache, block_table)):
        what += f", {q.shape[2]} queries a row, a {k_cache.dtype} cache" + (
            ", softcap, sinks, scales or the LSE" if extras else ""
        )
        raise UnsupportedError(f"{_NAME} (backend=cpu)", got=what, allowed=CPU_TAKES, next='Use backend="auto".')
    if backend in ("gluon", "triton") and not q.is_cuda:
        raise UnsupportedError(f"{_NAME} (backend={backend})", got=what, next='Use backend="auto".')


def _check_extras(
    num_kv_heads: int,
    q: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> None:
    if (k_scale is None) != (v_scale is None):
        raise InvalidArgumentError(f"{_NAME}: k_scale, v_scale", got="one of them", allowed="both or none")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (scale.shape != (num_kv_heads,) or scale.dtype is not torch.float32):
            got = f"{scale.dtype} {tuple(scale.shape)}"
            raise ShapeError(f"{_NAME}: {name}", got=got, allowed=f"float32 [{num_kv_heads}]")
    if sinks is not None and (sinks.shape != (q.shape[1],) or not sinks.dtype.is_floating_point):
        got = f"{sinks.dtype} {tuple(sinks.shape)}"
        raise ShapeError(f"{_NAME}: sinks", got=got, allowed=f"a float tensor [{q.shape[1]}]")
    if out is None:
        return
    if out.shape != q.shape or out.dtype is not q.dtype or out.stride(-1) != 1 or shares_elements(out):
        got = f"{out.dtype} {tuple(out.shape)}, strides {out.stride()}"
        allowed = f"{q.dtype} {tuple(q.shape)} with a contiguous last axis, elements of their own"
        raise ShapeError(f"{_NAME}: out", got=got, allowed=allowed)


def _check_devices(q: Tensor, *others: Tensor | None) -> None:
    for other in others:
        if other is not None and other.device != q.device:
            raise UnsupportedError(f"{_NAME}: devices", got=f"{q.device} and {other.device}", allowed="one device")


def _library_out(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    split_size: int | None = None,
    backend: str = "auto",
) -> None:
    _run_out(
        out, lse, q, k_cache, v_cache, seq_lens, block_table, k_scale, v_scale, sinks, scale, window, softcap,
        split_size, backend,
    )  # fmt: skip


def _library(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    split_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    # Zeros, because a row of negative length is left as it is.
    out, lse = torch.zeros(q.shape, dtype=q.dtype, device=q.device), _empty_lse(q)
    _run_out(
        out, lse, q, k_cache, v_cache, seq_lens, block_table, k_scale, v_scale, sinks, scale, window, softcap,
        split_size, backend,
    )  # fmt: skip
    return out, lse


def _empty_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _fake(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), _empty_lse(q)


def _fake_out(*_: object, **__: object) -> None:
    return None


register(_NAME, _library, _fake)
register(f"{_NAME}_out", _library_out, _fake_out, mutates=("out", "lse"))
