"""explain of the attention operators: their own plans answer, this lays out what they say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onewave.base.device import num_sms
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.append_kv.checks import APPEND_BACKENDS
from onewave.ops.append_kv.op import append_kv
from onewave.ops.attention.masks import is_whole
from onewave.ops.decode_attention.hopper.plan import StreamCall, refusal, stream_tile
from onewave.ops.decode_attention.op import CPU_TAKES, DECODE_BACKENDS, decode_attention
from onewave.ops.decode_attention.triton.plan import plan_decode
from onewave.ops.masked_multihead_attention.op import MMHA_BACKENDS, masked_multihead_attention
from onewave.ops.question import (
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
# Options that may be True, which says that there is one.
_NUMBERS = ("softcap", "out_scale")
_APPEND_LOOPS_TAKE = "float32, plain caches, neox rotation"


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


def check_on_a_card(question: Question, dtype: torch.dtype) -> None:
    """For operators that take tensors without a device for a CPU's. Raises UnsupportedError."""
    if question.cuda and dtype not in _HALVES:
        got = f"{str(dtype).removeprefix('torch.')} on a card"
        raise UnsupportedError(f"{question.operator}: dtype", got=got, allowed="float16, bfloat16")


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
