"""Checks attention's arguments before anything runs: ranks, shapes, dtypes, devices and strides."""

from itertools import pairwise

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.attention.call import AttentionCall, Extras, Packed
from onewave.ops.attention.pages import check_pages, check_table
from onewave.ops.library import checks_contents

BACKENDS = ("auto", "triton", "gluon", "mma", "torch", "reference")
_MAX_TOKENS = (1 << 31) - 1
_BIAS_DTYPES = (torch.bool, *checks.HALVES, torch.float32)


def check_ranks(name: str, q: Tensor, k: Tensor, v: Tensor, *, packed: bool) -> None:
    """Check that q, k and v are tensors of three axes if packed, else of four."""
    checks.tensors(name, q=q, k=k, v=v)
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != (3 if packed else 4):
            layout = "tokens, heads, head_dim" if packed else "batch, heads, seq, head_dim"
            raise ShapeError(f"{name}: {label}", got=f"shape {tuple(tensor.shape)}", allowed=f"[{layout}]")


def packing(
    name: str,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    pages: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Packed:
    """Check all but what the tensors hold. cu_seqlens, longest: of queries, of keys. pages: k, v, the block table."""
    cu_seqlens_q, cu_seqlens_k = cu_seqlens
    checks.tensors(name, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for label, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts.ndim != 1 or starts.numel() < 1 or starts.dtype is not torch.int32 or starts.stride(0) != 1:
            raise ShapeError(
                f"{name}: {label}", got=checks.words_of(starts), allowed="contiguous int32 [sequences + 1]"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        got = f"{checks.words_of(cu_seqlens_q)}, {checks.words_of(cu_seqlens_k)}"
        raise ShapeError(f"{name}: cu_seqlens_q, cu_seqlens_k", got=got, allowed="one length")
    if pages is not None:
        check_pages(name, *pages, len(cu_seqlens_k) - 1)
    for label, most in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
        checks.whole(name, label, most, 0, _MAX_TOKENS)
    numbers = checks.as_whole(longest[0], _MAX_TOKENS), checks.as_whole(longest[1], _MAX_TOKENS)
    return Packed(cu_seqlens_q, cu_seqlens_k, *numbers, None if pages is None else pages[2])


def check(call: AttentionCall) -> None:
    """Check a call whose ranks, packing and options are right: shapes, dtypes, devices, strides, backend.

    Raises ShapeError, UnsupportedError, InvalidArgumentError.
    """
    name, q = call.name, call.q
    check_operands(call)
    in_torch = call.backend == "torch" and call.packed is None
    checks.head_dim(name, q.shape[-1], on_cpu=call.on_cpu, least=8 if in_torch else checks.SMALLEST_HEAD_DIM)
    check_kinds(name, q, call.k, call.v, on_cpu=call.on_cpu)
    if call.out is not None:
        checks.tensors(name, out=call.out)
        checks.one_device(name, q, (call.out,))
        checks.out(name, call.out, q.dtype, q.shape)
    checks.one_of(name, "backend", call.backend, BACKENDS)


def check_operands(call: AttentionCall) -> None:
    """Check what does not depend on dtypes: shapes, devices and strides of all inputs."""
    name, q, k, v, packed = call.name, call.q, call.k, call.v, call.packed
    num_heads, num_kv_heads = q.shape[1], k.shape[1 if packed is None or packed.block_table is None else 2]
    if k.shape != v.shape or (packed is None and k.shape[0] != q.shape[0]) or k.shape[-1] != q.shape[-1]:
        got = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ShapeError(f"{name}: q, k, v", got=got, allowed="k and v of one shape, and batch and head_dim of q")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        got = f"{num_heads} query heads, {num_kv_heads} KV heads"
        raise ShapeError(f"{name}: heads", got=got, allowed="a multiple of the KV heads")
    if packed is None:
        batch, scores = q.shape[0], (q.shape[2], k.shape[2])
    else:
        batch, scores = packed.num_sequences, (packed.max_seqlen_q, packed.max_seqlen_k)
    check_extras(name, q, call.extras, batch=batch, scores=scores)
    checks.one_device(name, q, call.tensors)
    for label, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.numel():
            checks.last_axis(name, label, tensor)


def check_kinds(name: str, q: Tensor, *others: Tensor, on_cpu: bool | None = None) -> None:
    """Check q's dtype, and that the others have it. on_cpu: where the call runs, by default q's device.

    Raises UnsupportedError.
    """
    on_cpu = q.device.type == "cpu" if on_cpu is None else on_cpu
    allowed = (*checks.HALVES, torch.float32) if on_cpu else checks.HALVES
    if q.dtype not in allowed:
        advice = "Use attention_fp8." if q.dtype is torch.float8_e4m3fn else "Convert q, k and v."
        got = f"{q.dtype} on {q.device}"
        raise UnsupportedError(f"{name}: dtype", got=got, allowed=checks.names_of(allowed), next=advice)
    if any(tensor.dtype is not q.dtype for tensor in others):
        got = ", ".join(str(tensor.dtype) for tensor in (q, *others))
        raise UnsupportedError(f"{name}: dtypes of q, k, v", got=got, allowed="one dtype", next="Convert them.")


def check_extras(name: str, q: Tensor, extras: Extras, *, batch: int, scores: tuple[int, int]) -> None:
    """sinks, slopes and bias against q. batch: sequences; scores: the (Sq, Sk) that bias broadcasts to."""
    sinks, alibi_slopes, bias = extras
    if sinks is None and alibi_slopes is None and bias is None:
        return
    checks.optional(name, extras._asdict())
    num_heads = q.shape[1]
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.dtype.is_floating_point):
        raise ShapeError(f"{name}: sinks", got=checks.words_of(sinks), allowed=f"a float tensor [{num_heads}]")
    if alibi_slopes is not None:
        checks.form(name, "alibi_slopes", alibi_slopes, (torch.float32,), (num_heads,), (batch, num_heads))
    if bias is not None:
        full = (batch, num_heads, *scores)
        tail = full[4 - bias.ndim :] if bias.ndim <= 4 else ()
        if bias.ndim > 4 or any(n != 1 and n != m for n, m in zip(bias.shape, tail, strict=True)):
            raise ShapeError(
                f"{name}: bias", got=checks.words_of(bias), allowed=f"a shape that broadcasts to {list(full)}"
            )
        checks.dtype(name, "dtype of bias", bias.dtype, _BIAS_DTYPES)


def check_lengths(call: AttentionCall) -> None:
    """On a CPU, and with ONEWAVE_DEBUG=1, read back what cu_seqlens and the block table hold (a synchronisation).

    Check that sequences ascend inside q and k, or their pages. It runs with the operator: while a call is traced
    nothing can be read.
    """
    name, q, k, packed = call.name, call.q, call.k, call.packed
    if packed is None or not (q.is_cpu or checks_contents()):
        return
    # Rows beyond max_seqlen_q stay unwritten, which a caller may want; a debugging one does not.
    max_queries, limit = (packed.max_seqlen_q, "max_seqlen_q") if checks_contents() else (q.shape[0], "the tokens of q")
    max_keys = k.shape[0]
    table = packed.block_table
    if table is not None:
        check_table(name, k, table, (packed.cu_seqlens_q, packed.cu_seqlens_k), call.options)
        max_keys = table.numel() * k.shape[1]
    of_queries: list[int] = packed.cu_seqlens_q.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    _check_starts(f"{name}: cu_seqlens_q", of_queries, max_queries, limit, q.shape[0])
    of_keys: list[int] = packed.cu_seqlens_k.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if table is not None and of_keys[0] > 0:  # where pages hold the keys, only differences count
        max_keys += of_keys[0]
    _check_starts(f"{name}: cu_seqlens_k", of_keys, packed.max_seqlen_k, "max_seqlen_k", max_keys)


def _check_starts(what: str, starts: list[int], longest: int, limit: str, tokens: int) -> None:
    lengths = [b - a for a, b in pairwise(starts)]
    if starts[0] < 0 or starts[-1] > tokens or any(not 0 <= n <= longest for n in lengths):
        allowed = f"from 0 or more to at most {tokens} in steps of 0 to {longest} ({limit})"
        raise InvalidArgumentError(what, got=str(starts[:9])[:120], allowed=allowed)
