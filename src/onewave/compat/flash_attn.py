"""flash-attn 2.x's functions on our kernels: the same names, arguments, defaults and [batch, seq, heads, dim] layout.

`from onewave.compat.flash_attn import flash_attn_func` in place of `from flash_attn import flash_attn_func`. What
differs: the forward pass only (dropout, attention probabilities and backward are refused), results are the same from
run to run whether `deterministic` is set or not, and a row that may attend to nothing has LSE -inf.
"""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.compat.flash_cache import (
    FlashCache,
    NewKeys,
    check_index_dtype,
    check_places,
    checked_angles,
    checked_leftpad,
    lengths_before,
)
from onewave.ops import checks
from onewave.ops.attention.call import Extras
from onewave.ops.attention.checks import check_extras, check_kinds
from onewave.ops.attention.masks import options as check_options
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.decode_attention.call import MAX_QUERIES
from onewave.ops.decode_attention.op import decode_attention
from onewave.ops.library import checks_contents, is_readable, is_watched, register

Window = tuple[int, int]
_Result = tuple[Tensor, Tensor | None]
# Queries of a row that the decode kernel takes at a time where all see the same keys: its memory goes by their number.
_FOLDED = 64


def _options(
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> dict[str, Any]:
    """FlashAttention's way of saying it in ours: None for what is off."""
    if not checks.is_finite(dropout_p) or dropout_p:
        next = "These kernels are for inference."
        raise UnsupportedError("flash_attn: dropout_p", got=shown(dropout_p), allowed="0.0", next=next)
    if return_attn_probs:
        next = "onewave.ops.attention(.., return_lse=True) returns the LSE."
        raise UnsupportedError("flash_attn: return_attn_probs", got="True", allowed="False", next=next)
    checks.switch("flash_attn: causal", causal)
    if not checks.is_finite(softcap):
        raise InvalidArgumentError("flash_attn: softcap", got=shown(softcap), allowed="a finite number, 0 for none")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
        raise InvalidArgumentError("window_size", got=shown(window_size), allowed="(left, right), -1 for no limit")
    if not all(checks.is_whole(size) for size in window_size):
        raise InvalidArgumentError("window_size", got=shown(window_size), allowed="whole numbers, -1 for no limit")
    left, right = (None if size < 0 else size for size in window_size)
    window = None if left is None and (causal or right is None) else (left, 0 if causal else right)
    return {
        "causal": causal, "scale": softmax_scale, "window": window, "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip


_OPTIONS = signature(_options).parameters


def _with_options(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give a function flash-attn's common options, behind its own parameters but before its keyword-only ones.

    It takes what `_options` makes of them as its first argument.
    """
    own = list(signature(function).parameters.values())[1:]
    last = [each.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for each in own if each.kind is Parameter.KEYWORD_ONLY]
    parameters = [*own[: len(own) - len(last)], *_OPTIONS.values(), *last]
    names = [each.name for each in parameters]

    @wraps(function)
    def call(*args: Any, **named: Any) -> Tensor:
        given = dict(zip(names, args, strict=False)) | named
        if len(given) != len(args) + len(named):
            raise TypeError(f"{function.__name__}(): an argument twice, or more than {len(names)}")
        options = _options(**{name: given.pop(name) for name in _OPTIONS if name in given})
        return function(options, **given)

    call.__signature__ = Signature(parameters, return_annotation=Tensor)  # pyright: ignore[reportAttributeAccessIssue]
    return call


@_with_options
def flash_attn_func(options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q [batch, Sq, heads, head_dim] to k, v [batch, Sk, kv_heads, head_dim].

    causal: bottom-right aligned. window_size: (left, right) keys around the query's own position, -1 for all.
    softcap: 0 for none. alibi_slopes: float32 [heads] or [batch, heads]. Returns q's shape and dtype, contiguous.
    Raises ShapeError, UnsupportedError.
    """
    return _dense("flash_attn_func", q, k, v, options)[0]


@_with_options
def flash_attn_kvpacked_func(options: dict[str, Any], q: Tensor, kv: Tensor) -> Tensor:
    """flash_attn_func with kv [batch, Sk, 2, kv_heads, head_dim]."""
    k, v = _unpacked(kv, 2, 5)
    return _dense("flash_attn_kvpacked_func", q, k, v, options)[0]


@_with_options
def flash_attn_qkvpacked_func(options: dict[str, Any], qkv: Tensor) -> Tensor:
    """flash_attn_func with qkv [batch, seq, 3, heads, head_dim]."""
    q, k, v = _unpacked(qkv, 3, 5)
    return _dense("flash_attn_qkvpacked_func", q, k, v, options)[0]


@_with_options
def flash_attn_varlen_func(
    options: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: Tensor | None = None,
) -> Tensor:
    """The same over sequences laid one after another: q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim].

    cu_seqlens: int32 [batch + 1], where each sequence begins. block_table: int32 [batch, pages a sequence], then k, v
    are pages [pages, page_size, kv_heads, head_dim]; see attention_varlen for the kernels that read them in place.
    """
    if block_table is not None:
        checks.tensors("flash_attn_varlen_func", block_table=block_table)
        check_index_dtype("flash_attn_varlen_func: block_table", block_table)
    return _varlen(q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), options, block_table=block_table)[
        0
    ]


@_with_options
def flash_attn_varlen_kvpacked_func(
    options: dict[str, Any],
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """flash_attn_varlen_func with kv [tokens, 2, kv_heads, head_dim]."""
    k, v = _unpacked(kv, 2, 4)
    return _varlen(q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), options)[0]


@_with_options
def flash_attn_varlen_qkvpacked_func(
    options: dict[str, Any], qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """flash_attn_varlen_func with qkv [tokens, 3, heads, head_dim]."""
    q, k, v = _unpacked(qkv, 3, 4)
    return _varlen(q, k, v, (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), options)[0]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotate and append k, v to the cache in place, then attend q [batch, Sq, heads, head_dim] to all keys there.

    k_cache, v_cache: [rows, capacity, kv_heads, head_dim], or [pages, page_size, kv_heads, head_dim] with block_table
    int32 [batch, pages a sequence]. k, v: [batch, new, kv_heads, head_dim]. cache_seqlens: keys before the new ones,
    for all sequences or int32 [batch]; without it the whole cache (and then nothing can be appended).
    cache_batch_idx: int32 [batch], the cache row of each sequence. cache_leftpad: int32 [batch], places at the row's
    beginning that no query sees; the others keep their numbers, for rotation too; not with block_table. rotary_cos,
    rotary_sin: [positions, rotary_dim / 2], for the appended keys and for q, which stands where they do (all at
    cache_seqlens if neither causal nor windowed).
    num_splits: parts to cut the keys in; below 1 it is chosen. Returns out like q, with return_softmax_lse also float32
    [batch, heads, Sq]. Nothing is read back to the host. Up to 8 causal queries, or any number that see everything, 64
    at a time, run on the decode kernel; of other calls, those with neither block_table nor cache_seqlens as a number
    gather the cache into a copy first. A refused call has appended nothing. Lengths, rows and pages are read and
    checked on a CPU, and on a GPU with ONEWAVE_DEBUG=1; where they can't be read (compiled, or vmap without rotation),
    keys without a place are dropped.
    Raises ShapeError, InvalidArgumentError, UnsupportedError.
    """
    name = "flash_attn_with_kvcache"
    checks.tensors(name, q=q, k_cache=k_cache, v_cache=v_cache)
    checks.optional(name, {
        "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad, "block_table": block_table, "alibi_slopes": alibi_slopes,
    })  # fmt: skip
    if q.ndim != 4:
        raise ShapeError(f"{name}: q", got=str(tuple(q.shape)), allowed="[batch, Sq, heads, head_dim]")
    if not checks.is_whole(num_splits):
        raise InvalidArgumentError(f"{name}: num_splits", got=shown(num_splits), allowed="a whole number")
    checks.switch(f"{name}: rotary_interleaved", rotary_interleaved)
    checks.switch(f"{name}: return_softmax_lse", return_softmax_lse)
    cache = FlashCache.of(q.shape[0], k_cache, v_cache, cache_batch_idx, block_table, written=k is not None)
    leftpad = checked_leftpad(cache, q.shape[0], cache_leftpad)
    past = lengths_before(cache, q, k, v, cache_seqlens)
    q = q if q.stride(-1) == 1 else q.contiguous()
    options = _within(cache.capacity, _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes))
    num_new = 0 if k is None else k.shape[1]
    angles = checked_angles(q, k, rotary_cos, rotary_sin)
    _check_attends(name, q, cache, options)
    lengths_and_rows = past, cache_batch_idx, leftpad, block_table
    checks.one_device(name, q, (k, v, k_cache, v_cache, rotary_cos, rotary_sin, alibi_slopes, *lengths_and_rows))
    moves = bool(options["causal"]) or options["window"] is not None
    is_watched(q, k, v, k_cache, v_cache, rotary_cos, rotary_sin)  # refuses what the operators would, but before
    readable = is_readable(q, k_cache, v_cache, *lengths_and_rows)
    if readable and (q.is_cpu or checks_contents()):
        check_places(cache, past, num_new, angles, max(num_new, q.shape[1] if moves else 1), leftpad)
    if k is not None and v is not None:
        q = cache.append(NewKeys(k, v, past, angles, rotary_interleaved, moves, drops=not readable), q)
        if not q.requires_grad and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            q = torch.ops.onewave.follow_new_keys(q, k, v)
    host_length = None if cache_seqlens is None or isinstance(cache_seqlens, Tensor) else int(cache_seqlens) + num_new
    lengths = past + num_new
    if leftpad is not None:
        leftpad = leftpad.clamp(min=0)
        cache, host_length = cache.after(leftpad), None
        lengths = (lengths - leftpad).clamp(min=0).int()
    out, lse = _with_cache(q, cache, lengths, host_length, options, num_splits, return_softmax_lse)
    return out if lse is None else (out, lse)


def _followed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q as a result of the new keys and values, too: they go through the cache, which takes no gradient."""
    return q.clone()


register("follow_new_keys", _followed, _followed)


def _decodes(q: Tensor, options: dict[str, Any]) -> bool:
    """Whether the decode kernel can say it. q: [batch, Sq, heads, head_dim]."""
    num_queries, head_dim = q.shape[1], q.shape[3]
    if options["alibi_slopes"] is not None or num_queries == 0 or head_dim % 8:
        return False
    _, right = options["window"] or (None, None)
    sees_all = not options["causal"] and options["window"] is None
    # The last query of a row stands at its last key, so nothing to the right of it is hidden by any window.
    return sees_all or num_queries == 1 or (num_queries <= MAX_QUERIES and (options["causal"] or right == 0))


def _check_attends(name: str, q: Tensor, cache: FlashCache, wanted: dict[str, Any]) -> None:
    """Refuse what attention itself would refuse, before anything is appended."""
    num_heads, head_dim = q.shape[2:]
    num_kv_heads = cache.k.shape[2]
    if head_dim != cache.k.shape[3] or not 0 < head_dim <= 256 or num_kv_heads == 0 or num_heads % num_kv_heads:
        got = f"{num_heads} heads of {head_dim}"
        allowed = f"a multiple of the cache's {num_kv_heads} heads, of {cache.k.shape[3]}, at most 256"
        raise ShapeError(f"{name}: q", got=got, allowed=allowed)
    check_kinds(name, q)
    kinds = (q.dtype, torch.int8, torch.float8_e4m3fn) if _decodes(q, wanted) else (q.dtype,)
    if cache.k.dtype is not cache.v.dtype or cache.k.dtype not in kinds:
        got, allowed = f"{cache.k.dtype}, {cache.v.dtype}", ", ".join(map(str, kinds))
        raise UnsupportedError(f"{name}: dtypes of k_cache, v_cache", got=got, allowed=f"twice one of {allowed}")
    for label, tensor in (("k_cache", cache.k), ("v_cache", cache.v)):
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            got = f"strides {tensor.stride()}"
            raise ShapeError(f"{name}: {label}", got=got, allowed="a contiguous last axis")
    numbers = {key: wanted[key] for key in ("causal", "scale", "window", "softcap")}
    check_options(name, head_dim=head_dim, align="bottom-right", **numbers)
    extras = Extras(alibi_slopes=wanted["alibi_slopes"])
    check_extras(name, q.transpose(1, 2), extras, batch=q.shape[0], scores=(0, 0))


def _with_cache(
    q: Tensor,
    cache: FlashCache,
    lengths: Tensor,
    host_length: int | None,
    options: dict[str, Any],
    num_splits: int,
    return_lse: bool,
) -> _Result:
    """Choose the kernel. lengths: int32 [batch], the new keys included; host_length: the same where it is a number."""
    num_queries, num_heads = q.shape[1:3]
    if _decodes(q, options):
        split = max(1, -(-cache.capacity // num_splits)) if num_splits > 0 else None
        parts = [_decoded(part, cache, lengths, options, split, return_lse) for part in torch.split(q, _FOLDED, 1)]
        out = torch.cat([out for out, _ in parts], 1) if len(parts) > 1 else parts[0][0]
        return out, torch.cat([lse for _, lse in parts if lse is not None], 2) if return_lse else None
    name, k, v = "flash_attn_with_kvcache", cache.k, cache.v
    if not all(k.shape[:2]):  # no row has a key
        k, v = (each.new_empty(len(q), 0, *each.shape[2:]) for each in (k, v))
        return _dense(name, q, k, v, options, return_lse)
    if host_length is not None and cache.table is None:
        return _dense(name, q, k[:, :host_length], v[:, :host_length], options, return_lse, num_keys=cache.capacity)
    cu_seqlens_q = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * num_queries
    cu_seqlens_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    # A row of the cache is one page.
    table = torch.arange(len(q), device=q.device)[:, None] if cache.table is None else cache.table
    sizes = (cu_seqlens_q, cu_seqlens_k, num_queries, cache.capacity)
    out, lse = _varlen(q.flatten(0, 1), k, v, sizes, options, return_lse, table)
    return out.view(q.shape), None if lse is None else lse.view(num_heads, len(q), num_queries).transpose(0, 1)


def _decoded(
    q: Tensor, cache: FlashCache, lengths: Tensor, options: dict[str, Any], split: int | None, return_lse: bool
) -> _Result:
    """By the decode kernel."""
    batch, num_queries, num_heads, head_dim = q.shape
    left, _ = options["window"] or (None, None)
    # Queries that see the same keys are more heads of one query.
    folded = not options["causal"] and options["window"] is None and num_queries > 1
    heads_first = q.transpose(1, 2)
    queries = heads_first.reshape(batch, num_heads * num_queries, 1, head_dim) if folded else heads_first
    out, lse = _pair(decode_attention(
        queries, cache.k.transpose(1, 2), cache.v.transpose(1, 2), lengths,
        block_table=cache.table, scale=options["scale"], window=None if left is None else left + 1,
        softcap=options["softcap"], split_size=split, return_lse=return_lse,
    ))  # fmt: skip
    out = out.reshape(heads_first.shape).transpose(1, 2).contiguous()
    return out, None if lse is None else lse.reshape(batch, num_heads, num_queries)


def _within(num_keys: int, options: dict[str, Any]) -> dict[str, Any]:
    """Without the sides of the window that reach over all keys, as flash-attn 2 drops them."""
    if options["window"] is None:
        return options
    left, right = (None if side is None or side >= num_keys else side for side in options["window"])
    hides = left is not None or (right is not None and not options["causal"])
    return {**options, "window": (left, right) if hides else None}


def _dense(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    return_lse: bool = False,
    *,
    num_keys: int | None = None,
) -> _Result:
    """num_keys: that there could be, by which a window's sides are dropped."""
    checks.tensors(name, q=q, k=k, v=v)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        got = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ShapeError(f"{name}: q, k, v", got=got, allowed="[batch, seq, heads, head_dim] each")
    _check_head_dims(name, q, k, v)
    head_dim, options = q.shape[-1], _with_scale(q, _within(k.shape[1] if num_keys is None else num_keys, options))
    q, k, v = (_prepared(tensor) for tensor in (q, k, v))
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    if is_watched(q, k, v, options["alibi_slopes"]):
        out, lse = _pair(attention(*heads_first, return_lse=return_lse, **options))
        return out.transpose(1, 2)[..., :head_dim].contiguous(), lse
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _, lse = _pair(attention(*heads_first, out=out.transpose(1, 2), return_lse=return_lse, **options))
    return out[..., :head_dim].contiguous(), lse


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: tuple[Tensor, Tensor, int, int],
    options: dict[str, Any],
    return_lse: bool = False,
    block_table: Tensor | None = None,
) -> _Result:
    checks.tensors("flash_attn_varlen", q=q, k=k, v=v)
    _check_head_dims("flash_attn_varlen", q, k, v)
    if isinstance(sizes[3], int):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
        options = _within(sizes[3], options)
    head_dim, options = q.shape[-1], _with_scale(q, options)
    q, k, v = (_prepared(tensor) for tensor in (q, k, v))
    table = None if block_table is None else block_table.clamp(-1, 2**31 - 1).int()
    out, lse = _pair(attention_varlen(q, k, v, *sizes, return_lse=return_lse, block_table=table, **options))
    return out[..., :head_dim].contiguous(), lse


def _check_head_dims(name: str, *tensors: Tensor) -> None:
    """Before each is padded: afterwards they may be alike."""
    if any(tensor.ndim == 0 or tensor.shape[-1] == 0 or tensor.shape[-1] != tensors[0].shape[-1] for tensor in tensors):
        got = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ShapeError(f"{name}: head_dim of q, k, v", got=got, allowed="one, at least 1")


def _pair(result: Tensor | tuple[Tensor, Tensor]) -> _Result:
    return (result, None) if isinstance(result, Tensor) else result


def _with_scale(q: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The scale of the head_dim that the caller has, before it is padded."""
    return options if options["scale"] is not None else {**options, "scale": q.shape[-1] ** -0.5}


def _prepared(tensor: Tensor) -> Tensor:
    """With a contiguous last axis of a length that the kernels take: a multiple of 8 from 16; zeros change nothing."""
    missing = max(-tensor.shape[-1] % 8, checks.SMALLEST_HEAD_DIM - tensor.shape[-1])
    if missing > 0:
        return torch.nn.functional.pad(tensor, (0, missing))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _unpacked(packed: Tensor, parts: int, ndim: int) -> tuple[Tensor, ...]:
    checks.tensors("flash_attn", packed=packed)
    if packed.ndim != ndim or packed.shape[-3] != parts:
        front = "batch, seq" if ndim == 5 else "tokens"
        raise ShapeError(
            "flash_attn: packed", got=str(tuple(packed.shape)), allowed=f"[{front}, {parts}, heads, head_dim]"
        )
    return packed.unbind(-3)
