"""Decode attention: one to eight new tokens a row against the KV cache."""

from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.choice import Kept
from onewave.ops.decode_attention.caches import check_lengths
from onewave.ops.decode_attention.call import SCHEMA, DecodeCall, check
from onewave.ops.decode_attention.choose import choose
from onewave.ops.library import checks_contents, is_watched, refuse_grad, register
from onewave.ops.prepared import prepared

_NAME = "decode_attention"


@prepared
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
    head_dim: a multiple of 8 up to 256, on a CPU any even one.
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
    hopper/plan.py says and gives the same bits), "triton", "cpu" or "reference".

    Returns out like q, and with return_lse also the natural-log sum of exponentials, float32 [rows, heads, queries].
    Sums in float32. A row's bits depend on its own length and cache alone: neither on the batch nor on the capacity,
    but on whether the cache's strides are multiples of 8 elements; others are read one by one, which is slow.
    Nothing is read back to the host, so one captured graph serves every length; ONEWAVE_DEBUG=1 checks lengths and
    block table, with a synchronisation (the reference on a CPU always does). To a CPU's compiled loops keys beyond the
    cache are none, whatever the length says, and a row with a block that does not exist is empty.
    Raises ShapeError, UnsupportedError, InvalidArgumentError.
    Source: Dao et al., Flash-Decoding 2023; Sanovar et al., LeanAttention, arXiv:2405.10480.
    """
    watched = is_watched(q, k_cache, v_cache, seq_lens, block_table, k_scale, v_scale, sinks, out)
    signature = None
    plain = k_scale is None and v_scale is None and softcap is None and sinks is None and split_size is None
    plain = plain and (scale is None or checks.is_finite(scale)) and (window is None or checks.is_whole(window))
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
    checks.optional(_NAME, more)
    checks.tensors(_NAME, q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
    if q.ndim not in (3, 4):
        allowed = "[rows, heads, queries, head_dim] or [rows, heads, head_dim]"
        raise ShapeError(f"{_NAME}: q", got=str(tuple(q.shape)), allowed=allowed)
    queries, target = (t if t is None or t.ndim != 3 else t[:, :, None] for t in (q, out))
    assert queries is not None
    call = DecodeCall(
        queries, k_cache, v_cache, seq_lens, block_table, k_scale, v_scale, sinks, scale, window, softcap, split_size,
        backend, target, wants_lse=return_lse,
    )  # fmt: skip
    shape = check(call, q, out)
    call = call.with_plain_numbers()
    if out is not None:
        refuse_grad(f"{_NAME}: out=", q, k_cache, v_cache, k_scale, v_scale, sinks, out)
    if not watched and checks_contents():
        check_lengths(_NAME, seq_lens, shape.capacity, block_table, v_cache.shape[0], shape.block_size, call.visible)
    elif signature is not None and call.suits_loops:
        _seen.keep(signature, True)
    result, lse = _registered(call) if watched else _run(call)
    result = out if out is not None else result if q.ndim == 4 else result[:, :, 0]
    if not return_lse:
        return result
    assert lse is not None
    return result, lse


# Plain calls that were checked and that the CPU loops take. A layer of a small model takes tens of microseconds on a
# CPU, and all checks together a quarter of that.
_seen: Kept[bool] = Kept()


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


def _run(call: DecodeCall) -> tuple[Tensor, Tensor | None]:
    choice = choose(call)
    return load(_NAME, choice.module).run(call, choice)


def _registered(call: DecodeCall) -> tuple[Tensor, Tensor]:
    if call.out is None:
        return torch.ops.onewave.decode_attention(*call.flat)
    lse = call.new_lse()
    torch.ops.onewave.decode_attention_out(call.out, lse, *call.flat)
    return call.out, lse


def _library_out(out: Tensor, lse: Tensor, *flat: Any) -> None:
    _run(DecodeCall(*flat, out=out, lse=lse))


def _library(q: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    # Zeros, because a row of negative length is left as it is.
    out, lse = torch.zeros(q.shape, dtype=q.dtype, device=q.device), DecodeCall(q, *flat).new_lse()
    _library_out(out, lse, q, *flat)
    return out, lse


def _fake(q: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    call = DecodeCall(q, *flat)
    return call.output(), call.new_lse()


register(_NAME, _library, _fake, schema=f"({SCHEMA}) -> (Tensor, Tensor)")
_OUT = f"(Tensor(a0!) out, Tensor(a1!) lse, {SCHEMA}) -> ()"
register(f"{_NAME}_out", _library_out, lambda *_: None, schema=_OUT, mutates=("out", "lse"))
