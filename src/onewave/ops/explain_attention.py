"""explain of the attention operators: their own plans answer, this lays out what they say."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onewave.base.device import num_sms
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.append_kv.checks import APPEND_BACKENDS
from onewave.ops.append_kv.op import append_kv
from onewave.ops.attention.fp8.plan import explain_fp8
from onewave.ops.attention.masks import is_whole
from onewave.ops.attention.op import attention as ops_attention
from onewave.ops.attention.op import attention_varlen as ops_attention_varlen
from onewave.ops.attention.triton.plan import AttentionPlan, explain_attention
from onewave.ops.decode_attention.hopper.plan import StreamCall, refusal, stream_tile
from onewave.ops.decode_attention.op import CPU_TAKES, DECODE_BACKENDS, decode_attention
from onewave.ops.decode_attention.triton.plan import plan_decode
from onewave.ops.masked_multihead_attention.op import MMHA_BACKENDS, masked_multihead_attention
from onewave.ops.question import (
    DTYPES,
    SMS_OF_AN_H200,
    Explanation,
    Question,
    backend_of,
    dtype_of,
    elsewhere,
)

# Of which PyTorch still counts the bytes.
_MOST_ELEMENTS = 1 << 59
_HALVES = (torch.float16, torch.bfloat16)
_ATTENTION_OPTIONS = ("causal", "scale", "window", "softcap", "align", "backend")
# Options that may be True, which says that there is one.
_NUMBERS = ("softcap", "out_scale")
_FILES = {
    "fp8_kernel": "fp8/kernel.py",
    "gluon": "hopper/kernel.py",
    "mma": "mma/kernel.py",
    "triton": "triton/kernel.py",
}
_APPEND_LOOPS_TAKE = "float32, plain caches, neox rotation"


def attention(question: Question) -> Explanation:
    q, k, *v = question.take((4,), (4,), *((4,) for _ in question.shapes[2:3]))
    kind = _as_on_a_card(question, torch.float32, torch.bfloat16)
    tensors = on_meta(q, kind), on_meta(k, kind), on_meta(v[0] if v else k, kind)
    ops_attention(*tensors, bias=_bias(question), **_given(question, *_ATTENTION_OPTIONS))
    return _as_planned(question, explain_attention(q, k, **_flags(question)))


def attention_varlen(question: Question) -> Explanation:
    q, k, *v = question.take((3,), (3,), *((3,) for _ in question.shapes[2:3]))
    options = dict(question.options)
    defaults = {"sequences": 1, "max_seqlen_q": q[0], "max_seqlen_k": k[0]}
    given = {name: options.pop(name, None) for name in defaults}
    rows, longest_q, longest_k = (defaults[name] if n is None else int(n) for name, n in given.items())
    kind = _as_on_a_card(question, torch.float32, torch.bfloat16)
    tensors = on_meta(q, kind), on_meta(k, kind), on_meta(v[0] if v else k, kind)
    starts = on_meta((rows + 1,), torch.int32)
    more = _given(question, *_ATTENTION_OPTIONS)
    ops_attention_varlen(*tensors, starts, starts, longest_q, longest_k, bias=_bias(question), **more)
    asked = replace(question, options=options)
    plan = explain_attention((rows, q[1], longest_q, q[2]), (rows, k[1], longest_k, k[2]), **_flags(asked), tokens=q[0])
    return _as_planned(question, plan)


def attention_fp8(question: Question) -> Explanation:
    """dtype: of the output, bf16 where it is float8 itself; packed if sequences is given."""
    options = {name: value for name, value in question.options.items() if name not in ("q_scale", "k_scale", "v_scale")}
    packed, tokens = "sequences" in options, None
    rank = (3,) if packed else (4,)
    q, k, *_ = question.take(rank, rank, *(rank for _ in question.shapes[2:]))
    if packed:
        rows = int(options["sequences"])
        longest_q, longest_k = int(options.pop("max_seqlen_q", q[0])), int(options.pop("max_seqlen_k", k[0]))
        tokens, q, k = q[0], (1, q[1], longest_q, q[2]), (1, k[1], longest_k, k[2])
        options["sequences"] = rows
    known = inspect.signature(explain_fp8).parameters.keys() - {"q_shape", "k_shape", "capability", "tokens"}
    _refuse_odd(question, options, known)
    out = options.pop("out_dtype", "bf16" if question.dtype.itemsize == 1 else question.dtype)
    out = DTYPES.get(out) if isinstance(out, str) else out
    if out not in (torch.bfloat16, torch.float16):
        raise UnsupportedError("attention_fp8: out_dtype", got=str(out), allowed="torch.bfloat16, torch.float16")
    capability = divmod(question.sm or 90, 10) if question.cuda else None
    name = str(out).removeprefix("torch.")
    return _as_planned(question, explain_fp8(q, k, **options, out_dtype=name, capability=capability, tokens=tokens))


def _refuse_odd(question: Question, options: dict[str, Any], known: set[str]) -> None:
    if odd := options.keys() - known:
        allowed = ", ".join(sorted(known))
        raise InvalidArgumentError(f"explain {question.operator}: options", got=", ".join(sorted(odd)), allowed=allowed)


def _flags(question: Question) -> dict[str, Any]:
    """The options of a call as the plan of attention takes them."""
    options = {name: value for name, value in question.options.items() if name != "out"}
    if (bias := _bias(question)) is not None:
        options["bias"] = str(bias.dtype).removeprefix("torch.")
    given = {"q_shape", "k_shape", "device", "capability", "dtype", "packed", "tokens"}
    known = inspect.signature(explain_attention).parameters.keys() - given
    _refuse_odd(question, options, known)
    capability = divmod(question.sm, 10) if question.sm else (9, 0)
    return {
        **options,
        "device": "cuda" if question.cuda else "cpu",
        "capability": capability,
        "dtype": str(question.dtype).removeprefix("torch."),
        "packed": question.operator == "attention_varlen",
    }


def _as_planned(question: Question, plan: AttentionPlan) -> Explanation:
    kernel, tile, programs = f"attention: {plan.kernel}", None, None
    if plan.block_m:
        kernel = f"attention/{_FILES.get(plan.kernel, _FILES[plan.backend])}: {plan.kernel}"
        tile = f"{plan.block_m} query rows x {plan.block_n} keys x {plan.width}"
        tile += f", {plan.num_warps} warps, {plan.num_stages} stages"
        programs = f"{plan.programs}, {plan.tiles} tiles for each head of a sequence"
        if plan.packed_heads > 1:
            programs = f"{plan.programs}, {plan.tiles} tiles for each group of {plan.packed_heads} heads"
    split = "none: a program walks over all keys of its rows" if plan.block_m else None
    reasons = tuple(plan.why.split("; "))
    return Explanation(question.operator, question.text(), plan.backend, kernel, reasons, tile, split, programs)


def decode(question: Question) -> Explanation:
    q, cache = question.take((3, 4), (4, 5))
    options = question.options
    kv_dtype = dtype_of(question, "kv_dtype", question.dtype)
    if question.operator == "decode_attention":
        _check_decode(question, q, cache, kv_dtype)
        check_on_a_card(question, question.dtype)
    if kv_dtype is torch.float8_e4m3fn and question.sm is not None and question.sm < 89:
        raise UnsupportedError("decode_attention: float8 cache", got="a card before sm_89", next="Use an int8 cache.")
    # A packed key is [.., head_dim / x, capacity, x].
    block_size = cache[2] if len(cache) == 4 else cache[3]
    table = options.get("block_table")
    capacity = block_size * (table[1] if table else 1)
    num_queries = q[2] if len(q) == 4 else 1
    plan = plan_decode(
        num_heads=q[1],
        num_kv_heads=cache[1],
        num_queries=num_queries,
        head_dim=q[-1],
        capacity=capacity,
        kv_itemsize=kv_dtype.itemsize,
        split_size=options.get("split_size"),
        windowed=options.get("window") is not None,
        smallest_split=options.get("steps_per_block"),
    )
    backend = backend_of(question, DECODE_BACKENDS)
    extras = any(options.get(name) is not None for name in ("softcap", "sinks", "k_scale", "v_scale"))
    simple = num_queries == 1 and len(cache) == 4 and not extras and not options.get("return_lse")
    whole_rows = table is None or table[1] == 1
    loops = not question.cuda and question.dtype is kv_dtype is torch.float32 and simple and whole_rows
    if backend == "cpu" and not loops:
        raise UnsupportedError("decode_attention (backend=cpu)", got=question.text(), allowed=CPU_TAKES)
    if backend == "auto" and not question.cuda:
        backend = "cpu" if loops else "reference"
    if backend not in ("auto", "gluon", "triton"):
        return elsewhere(question, backend, CPU_TAKES)
    sms = num_sms(torch.device("cuda", 0)) if torch.cuda.is_available() else SMS_OF_AN_H200
    length = min(int(options.get("seq_len", capacity)), capacity)
    split = plan.split or _split_of(length, plan.smallest, plan.doublings, plan.target)
    splits = max(1, -(-length // split))
    capability = divmod(question.sm or 90, 10)
    names = [str(dtype).removeprefix("torch.") for dtype in (question.dtype, kv_dtype)]
    paged = table is not None and table[1] != 1
    cached = (len(cache) == 5, block_size, paged, options.get("k_scale") is not None)
    call = StreamCall((capability[0], capability[1]), q[0], names[0], names[1], *cached)
    refused = refusal(call, plan)
    if backend == "gluon" and refused is not None:
        raise UnsupportedError("decode_attention (backend=gluon)", got=refused, next='Use backend="auto".')
    if backend == "triton" or refused is not None:
        backend, kernel = "triton", "triton/split_kv.py: split_kv_kernel"
        stages, warps = plan.num_stages, f"{plan.num_warps} warps"
        reasons = (plan.why, _pdl(question), *(() if refused is None else (f"not the Hopper kernel: {refused}",)))
    else:
        backend, kernel = "gluon", "hopper/kernel.py: stream_kernel"
        shares, warps = plan.shares(q[0], sms), "4 warps and a loading one"
        stages = stream_tile(q[0], capacity, shares).stages
        how = "a warp of its own streams keys and values by TMA, across rows; the bits are the Triton kernel's"
        reasons = (plan.why, how, _pdl(question))
    return Explanation(
        "decode_attention",
        question.text(),
        backend,
        f"decode_attention/{kernel}",
        reasons,
        tile=f"{plan.block_m} query rows x {plan.block_n} keys x {plan.block_d}, {warps}, {stages} stages",
        split=f"{split} keys, {splits} of a row of {length}",
        programs=f"{plan.shares(q[0], sms)} shares x {cache[1] * plan.tiles}, on {sms} SMs",
    )


def on_meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A shape as an operator's own checks want to see it. Raises ShapeError."""
    if not all(is_whole(size) and size >= 0 for size in shape) or math.prod(shape) > _MOST_ELEMENTS:
        raise ShapeError("explain: shape", got=shown(shape), allowed=f"whole numbers, a product up to {_MOST_ELEMENTS}")
    return torch.empty(shape, dtype=dtype, device="meta")


def _given(question: Question, *names: str) -> dict[str, Any]:
    given = {name: question.options[name] for name in names if name in question.options}
    return {name: 1.0 if value is True and name in _NUMBERS else value for name, value in given.items()}


def _as_on_a_card(question: Question, cpu_only: torch.dtype, taken: torch.dtype) -> torch.dtype:
    """The dtype to check in where an operator takes tensors without a device for a card's: another one for what only a
    CPU has."""
    return taken if question.dtype is cpu_only and not question.cuda else question.dtype


def check_on_a_card(question: Question, dtype: torch.dtype) -> None:
    """For operators that take tensors without a device for a CPU's. Raises UnsupportedError."""
    if question.cuda and dtype not in _HALVES:
        got = f"{str(dtype).removeprefix('torch.')} on a card"
        raise UnsupportedError(f"{question.operator}: dtype", got=got, allowed="float16, bfloat16")


def _bias(question: Question) -> Tensor | None:
    """One of the dtype that the call's names or has; of q's where the question only says that there is one."""
    bias = question.options.get("bias")
    if bias is None:
        return None
    kind: Any = getattr(bias, "dtype", bias)
    if isinstance(kind, str):
        kind = torch.bool if kind == "bool" else dtype_of(question, "bias", question.dtype)
    return on_meta((1,), kind if isinstance(kind, torch.dtype) else question.dtype)


def _block_table(question: Question) -> Tensor | None:
    table: Any = question.options.get("block_table")
    if table is None:
        return None
    try:
        rows, per_row = table
    except (TypeError, ValueError) as error:
        allowed = "its shape, (rows, blocks a row)"
        raise InvalidArgumentError("explain: block_table", got=shown(table), allowed=allowed) from error
    return on_meta((rows, per_row), torch.int32)


def _caches(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values. shape: the keys', plain or packed as [.., head_dim / x, capacity, x]."""
    values = shape if len(shape) == 4 else (shape[0], shape[1], shape[3], shape[2] * shape[4])
    return on_meta(shape, dtype), on_meta(values, dtype)


def _check_decode(question: Question, q: tuple[int, ...], cache: tuple[int, ...], kv_dtype: torch.dtype) -> None:
    """Whether decode_attention takes such a call."""
    options = _given(question, "scale", "window", "softcap", "split_size")
    for name in ("k_scale", "v_scale"):
        options[name] = None if question.options.get(name) is None else on_meta(cache[1:2], torch.float32)
    lengths = on_meta((q[0],), torch.int32)
    caches = _caches(cache, kv_dtype)
    decode_attention(on_meta(q, question.dtype), *caches, lengths, block_table=_block_table(question), **options)


def masked(question: Question) -> Explanation:
    qkv, cache = question.take((2, 3, 4), (4, 5))
    dtype, kv_dtype = question.dtype, dtype_of(question, "kv_dtype", question.dtype)
    scaled = question.options.get("qkv_out_scale") is not None
    if scaled:  # which goes with a projection in int32; the cache is in the type that was named
        dtype = torch.int32
    width, head_dim = _check_masked(question, on_meta(qkv, dtype), _caches(cache, kv_dtype), scaled=scaled)
    if backend_of(question, MMHA_BACKENDS) == "reference" or not question.cuda:
        return elsewhere(question, "reference", None)
    options = {"steps_per_block": 128} | question.options | {"kv_dtype": kv_dtype}
    shapes = ((qkv[0], width - 2 * cache[1], 1, head_dim), cache)
    asked = replace(question, shapes=shapes, options=options, dtype=dtype)
    found = decode(asked)
    why = "decode attention's kernel with a prologue (bias, rotation, append) and an epilogue (smoothing, rounding)"
    return replace(found, operator=question.operator, question=question.text(), why=(why, *found.why))


def _check_masked(question: Question, qkv: Tensor, caches: tuple[Tensor, Tensor], *, scaled: bool) -> tuple[int, int]:
    """Whether masked_multihead_attention takes such a call. Returns its heads, keys' and values' included, and
    head_dim."""
    head_dim = caches[1].shape[3]
    width = qkv.shape[1:].numel() // max(head_dim, 1)
    scale = on_meta((width, head_dim), torch.float32) if scaled else None
    names = ("rotary_style", "out_scale", "quant_round", "quant_max_bound", "quant_min_bound", "scale")
    lengths = on_meta((qkv.shape[0],), torch.int32)
    masked_multihead_attention(qkv, *caches, lengths, qkv_out_scale=scale, **_given(question, *names))
    check_on_a_card(question, caches[1].dtype)
    return width, head_dim


def _split_of(length: int, smallest: int, doublings: int, target: int) -> int:
    """Keys a split of a row: the smallest size that leaves at most `target` splits."""
    for doubling in range(doublings):
        if -(-length // (smallest << doubling)) <= target:
            return smallest << doubling
    return smallest << doublings


def _pdl(question: Question) -> str:
    if question.sm is not None and question.sm >= 90:
        return "the next kernel may be launched early and waits on the device (programmatic dependent launch)"
    return "the next kernel follows in stream order"


def append(question: Question) -> Explanation:
    qkv, cache = question.take((2,), (4, 5))
    options = question.options
    backend = backend_of(question, APPEND_BACKENDS)
    kv_dtype = dtype_of(question, "kv_dtype", question.dtype)
    keys, values = _caches(cache, kv_dtype)
    head_dim = values.shape[3]
    width = qkv[1] // max(head_dim, 1)
    k_scale, v_scale = (
        None if options.get(name) is None else on_meta(cache[1:2], torch.float32) for name in ("k_scale", "v_scale")
    )
    extras = {"block_table": _block_table(question), "k_scale": k_scale, "v_scale": v_scale}
    heads = options.get("num_heads", width - 2 * cache[1])
    places = on_meta(qkv[:1], torch.int64)
    more = _given(question, "eps", "rotary_style")
    append_kv(on_meta(qkv, question.dtype), None, keys, values, places, places, num_heads=heads, **extras, **more)
    check_on_a_card(question, question.dtype)
    # The loops rotate: an explicit None is a call without rotation.
    rotates = options.get("rotary_style", "neox") == "neox" and options.get("rotary", True) is not None
    plain = rotates and len(cache) == 4 and all(extra is None for extra in extras.values())
    loops = plain and backend != "reference" and not question.cuda and question.dtype is kv_dtype is torch.float32
    if backend == "cpu" and not loops:
        advice = 'Use backend="auto".'
        raise UnsupportedError("append_kv (backend=cpu)", got=question.text(), allowed=_APPEND_LOOPS_TAKE, next=advice)
    if backend == "reference" or not question.cuda:
        return elsewhere(question, "cpu" if loops else "reference", _APPEND_LOOPS_TAKE)
    why = "bias, norms, rotation and both stores in one pass over qkv; a head's rotary partners come from L1"
    return Explanation(
        "append_kv",
        question.text(),
        "triton",
        "append_kv/triton_impl.py: append_kv_kernel",
        (why,),
        tile=f"1 head of {head_dim}, 1 warp",
        programs=f"{qkv[0]} tokens x {width} heads of q, k and v",
    )
