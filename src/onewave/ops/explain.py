"""Which kernel an operator runs on given shapes, with which tile and split, and why. Nothing is run to find out.

    >>> print(explain("decode_attention", (1, 32, 1, 128), (1, 8, 4096, 128), device="cuda:sm_90", dtype="bf16"))

Each operator's own plan answers; this file only reads the question and lays out the answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from operator import index
from typing import Any

import torch

from onewave.base.device import CPU, H200_SMS, Device, num_sms
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops import explain_attention
from onewave.ops.attention import choose as attention
from onewave.ops.attention.fp8 import choose as attention_fp8
from onewave.ops.choice import Asked, Choice
from onewave.ops.explain_attention import check_on_a_card, on_meta
from onewave.ops.ffn.chain.plan import ChainSizes, plan_chain
from onewave.ops.ffn.measured import fastest, table_lines
from onewave.ops.ffn.op import ffn, of_the_wave
from onewave.ops.ffn.op import suits as ffn_suits
from onewave.ops.ffn.wave.plan import FFNSizes, has_plan, keeps_compact, plan_ffn, workers_for
from onewave.ops.linear.op import linear
from onewave.ops.merge_attention import choose as merge_attention
from onewave.ops.question import DTYPES, SMS_OF_AN_H200, Explanation, Question, check_numbers, dtype_of, elsewhere
from onewave.ops.rms_norm.op import rms_norm
from onewave.ops.swiglu.op import swiglu
from onewave.wave.plan.layout import MAX_ROWS

Shape = Sequence[int]

_LINEAR_TILE_TOKENS = 64
# What a call says by its tensors, beside the options that are its own.
_MORE_OPTIONS = {
    "append_kv": ("kv_dtype",),
    "attention": ("descriptors",),
    "attention_fp8": ("sequences",),
    "attention_varlen": ("descriptors", "page_size", "sequences"),
    "decode_attention": ("kv_dtype", "seq_len"),
    "ffn": ("gated", "workers"),
    "masked_multihead_attention": ("kv_dtype", "seq_len"),
}


def explain(
    op: str | Callable[..., Any],
    *shapes: Shape,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "bf16",
    **options: Any,
) -> Explanation:
    """Say what `op` would do with tensors of these shapes.

    op: an operator of onewave.ops or its name. shapes: of its main tensors, in order:
        attention q, k (descriptors=False: strides that TMA can't describe; bias="bool": its dtype, by default q's);
        attention_varlen q, k (and sequences=3, max_seqlen_q=500, max_seqlen_k=500, page_size=64); attention_fp8 as
        either (dtype: of the output)
        decode_attention q, k_cache (paged: block_table=(rows, blocks); quantised: kv_dtype="int8"; one row's length:
        seq_len=1000); masked_multihead_attention qkv, cache_k; append_kv qkv, k_cache
        merge_attention the stacked outs; linear x, weight; ffn x, w_up, w_down (gated=True, workers=132);
        rms_norm, add_rms_norm and swiglu x
    device: "cpu", "cuda", or a card that need not be there, such as "cuda:sm_90"; default: this machine's. dtype:
    "bf16", "fp16", "fp32". options: the call's own. Raises InvalidArgumentError, ShapeError, UnsupportedError.
    """
    name = (op if isinstance(op, str) else getattr(op, "__name__", repr(op))).replace("-", "_")
    known_operators = _CHOICES.keys() | _EXPLAINERS.keys()
    if name not in known_operators:
        raise InvalidArgumentError("explain: operator", got=shown(name), allowed=", ".join(sorted(known_operators)))
    cuda, sm, card = _device(device)
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype if isinstance(dtype, torch.dtype) else None  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
    if kind is None:
        raise UnsupportedError("explain: dtype", got=shown(dtype), allowed=", ".join(DTYPES))
    sizes = tuple(_sizes(shape) for shape in shapes)
    parameters = signature(getattr(import_module("onewave.ops"), name)).parameters
    more = _MORE_OPTIONS.get(name, ())
    known = [*parameters, *more]
    for option in options:
        if option not in known:
            raise InvalidArgumentError(f"explain {name}: option", got=shown(option), allowed=", ".join(known))
    check_numbers(name, options)
    # None is what such a call has without them; elsewhere, as for rotary and activation, it means something.
    absent = {*more, *(option for option, parameter in parameters.items() if parameter.default is None)}
    given = {option: value for option, value in options.items() if value is not None or option not in absent}
    if name in _CHOICES:
        return _explained(Asked(name, sizes, _described(cuda, sm, card), kind, given))
    return _EXPLAINERS[name](Question(name, sizes, cuda, sm, card, kind, given))


def _explained(asked: Asked) -> Explanation:
    describe, choose = _CHOICES[asked.operator]
    choice = choose(describe(asked))
    reasons = tuple(map(str, choice.reasons))
    return Explanation(
        asked.operator, str(asked), choice.backend, choice.kernel, reasons, choice.tile, choice.split, choice.programs
    )


def _described(cuda: bool, sm: int | None, card: str | None) -> Device:
    """The device that was asked about: a GPU of which nothing is known is an H200."""
    if not cuda:
        return CPU
    major, minor = divmod(sm or 90, 10)
    return Device((major, minor), H200_SMS if card is None else num_sms(torch.device("cuda")), card)


def _sizes(shape: Shape) -> tuple[int, ...]:
    allowed = "whole numbers from 0, such as (1, 32, 4096, 128)"
    try:
        sizes = tuple(index(size) for size in shape)
    except TypeError as error:
        raise ShapeError("explain: shape", got=shown(shape), allowed=allowed) from error
    if any(size < 0 for size in sizes):
        raise ShapeError("explain: shape", got=shown(shape), allowed=allowed)
    return sizes


def _device(device: str | torch.device | None) -> tuple[bool, int | None, str | None]:
    """Whether it is a card, its compute capability and its name."""
    text = "cuda" if torch.cuda.is_available() else "cpu"
    text = text if device is None else str(device)
    found = re.fullmatch(r"cpu|cuda(?::(?:sm_?(\d{2,3})|\d+))?", text)
    if not found:
        raise InvalidArgumentError("explain: device", got=shown(text), allowed="cpu, cuda, cuda:N, cuda:sm_90")
    if text == "cpu":
        return False, None, None
    if found[1]:
        return True, int(found[1]), None
    if not torch.cuda.is_available():
        return True, None, None
    there = None if text == "cuda" else text
    major, minor = torch.cuda.get_device_capability(there)
    return True, 10 * major + minor, torch.cuda.get_device_name(there)


def _linear(question: Question) -> Explanation:
    x, weight = question.take((2,), (2,))
    out = dtype_of(question, "out_dtype", question.dtype)
    named = None if "out_dtype" not in question.options else out
    linear(on_meta(x, question.dtype), on_meta(weight, question.dtype), out_dtype=named)
    if not question.cuda:
        return Explanation(
            "linear", question.text(), "torch", "torch.nn.functional.linear", ("dense weights on a CPU",)
        )
    low = question.dtype in (torch.float16, torch.bfloat16)
    if low and x[0] == 1:
        block_n, block_k = (4, 1024) if weight[1] <= 2048 else (2, 2048)
        why = "one token: memory bound, a program sums whole rows of the weights in registers"
        return Explanation(
            "linear", question.text(), "triton", "linear/triton_impl.py: row_kernel", (why,),
            tile=f"{block_n} rows x {block_k}, 4 warps", programs=str(-(-weight[0] // block_n)),
        )  # fmt: skip
    if low and out is not question.dtype and x[0] <= _LINEAR_TILE_TOKENS:
        why = f"few tokens whose products stay in {str(out).removeprefix('torch.')}, which PyTorch's matmul would round"
        return Explanation(
            "linear", question.text(), "triton", "linear/triton_impl.py: tile_kernel", (why,), tile="128 rows x 128"
        )
    why = "several tokens: PyTorch's matmul (cuBLAS) is the better kernel"
    return Explanation("linear", question.text(), "torch", "torch.nn.functional.linear", (why,))


def _ffn(question: Question) -> Explanation:
    """x, w_up, w_down; options as ffn's, and workers and gated."""
    x, up, down = question.take((1, 2, 3), (2,), (2,))
    rows = math.prod(x[:-1])
    options = question.options
    choices = {name: options[name] for name in ("activation", "order", "policy", "backend") if name in options}
    ffn(*(on_meta(shape, question.dtype) for shape in (x, up, down)), **choices)
    check_on_a_card(question, question.dtype)
    backend, order, policy = (options.get(name, "auto") for name in ("backend", "order", "policy"))
    suits = question.cuda and question.sm in (None, 90) and question.dtype in (torch.float16, torch.bfloat16)
    gated, dtype = bool(options.get("gated", False)), str(question.dtype).removeprefix("torch.")
    sizes = (up[1], up[0], down[0], gated)
    known = table_lines(*sizes, dtype, card=question.card)
    if backend in ("wave", "chain", "streams"):
        fits = suits and rows >= 1 and (backend != "wave" or rows <= MAX_ROWS)
        if not fits:
            allowed = f"1 to {MAX_ROWS} rows on sm_90" if backend == "wave" else "1 or more rows on sm_90"
            raise UnsupportedError(f"ffn (backend={backend})", got=question.text(), allowed=allowed)
    else:
        asked = backend == "auto" and suits and rows >= 1
        backend = fastest(rows, *sizes, dtype, card=question.card) if asked else "torch"
        if not ffn_suits(backend, order, policy):
            backend, known = "torch", (f"{backend} has no such order or policy", *known)
        elif backend == "wave" and (order, policy) != ("auto", "auto"):
            padded, how = _wave_plan(question, rows, sizes)
            if not has_plan(padded, **how):
                backend, known = "torch", (f"wave has no plan for so many rows in order {how['order']}", *known)
    if backend == "torch":
        reasons = known if suits else ("both products in one launch need 16-bit types on sm_90",)
        return Explanation("ffn", question.text(), "torch", "ffn/reference.py: products one by one", reasons)
    if backend != "wave":
        return _many_rows(question, ChainSizes(rows, *sizes), backend, known)
    padded, how = _wave_plan(question, rows, sizes)
    order, policy, workers, compact = (how[name] for name in ("order", "policy", "workers", "compact"))
    made = plan_ffn(padded, **how)
    shape = made.programs[0].shape
    lanes = [[int(count) for count in program.lanes[:, 0]] for program in made.programs]
    tiles = [sum(counts) for counts in zip(*lanes, strict=True)]
    tasks = sum(table.num_tasks for table in made.tables)
    why = (
        f"few rows: bound by reading the weights, which one launch streams without a pause; order {order}, {policy}",
        f"{tasks} tasks, proved; {max(tiles)} weight tiles on the busiest worker, {sum(tiles) / workers:.1f} a worker",
        f"packs the weights at the first call{_in_bits(compact)} and keeps the copy; auto does so for as many blocks "
        "as it keeps copies of",
        *known,
    )
    split = f"K in {made.splits[0]} and {made.splits[1]}"
    return Explanation(
        "ffn", question.text(), "wave", "wave/kernel/kernel.py: wave_kernel", why,
        tile=f"{shape.rows} rows x {shape.cols}, ring of {shape.ring}", split=split, programs=str(workers),
    )  # fmt: skip


def _wave_plan(question: Question, rows: int, sizes: tuple[int, int, int, bool]) -> tuple[FFNSizes, dict[str, Any]]:
    """The sizes and options that a wave for so many rows is planned with."""
    options = question.options
    order, policy = of_the_wave(options.get("order", "auto"), options.get("policy", "auto"))
    padded = FFNSizes(1 << (rows - 1).bit_length(), *sizes)
    compact = keeps_compact(question.dtype, padded.batch, order, policy)
    chosen = workers_for(padded, order=order, available=SMS_OF_AN_H200, compact=compact)
    workers = int(options.get("workers", chosen))
    return padded, {"workers": workers, "order": order, "policy": policy, "compact": compact}


def _in_bits(compact: bool) -> str:
    return ", in thirteen bits each without loss," if compact else ""


def _many_rows(question: Question, sizes: ChainSizes, backend: str, known: tuple[str, ...]) -> Explanation:
    options = question.options
    workers = int(options.get("workers", SMS_OF_AN_H200))
    made = plan_chain(
        sizes,
        workers=workers,
        order=options.get("order", "auto"),
        policy=options.get("policy", "auto"),
        streams=backend == "streams",
    )
    tile, steps = made.tile, int(made.records[:, 4].sum())
    launches = "two launches side by side" if backend == "streams" else "one launch"
    why = (
        f"{launches}, {len(made.totals)} semaphores; order {made.order}, {made.policy}; hidden tensor of "
        f"{' x '.join(map(str, made.graph.tensors['H'].grid))} tiles",
        f"{len(made.records)} tasks, proved; the last ends {made.predicted * workers / steps - 1:.0%} after the mean",
        *known,
    )
    return Explanation(
        "ffn", question.text(), backend, "ffn/chain/kernel.py: chain_kernel", why,
        tile=f"{tile.rows} rows x {tile.columns}, ring of {tile.stages}", split=f"K in 1 and {tile.splits}",
        programs=" + ".join(str(len(lanes)) for lanes in made.lanes),
    )  # fmt: skip


def _by_row(question: Question) -> Explanation:
    x = question.shapes[0] if question.shapes else ()
    if not x:
        raise ShapeError(f"explain {question.operator}: shapes", got="none", allowed="x's")
    folder = "rms_norm" if "rms_norm" in question.operator else question.operator
    rows_of_x = on_meta(x, question.dtype)
    if folder == "swiglu":
        swiglu(rows_of_x)
    else:
        rms_norm(rows_of_x, on_meta(x[-1:], question.dtype), question.options.get("eps", 1e-6))
    if question.cuda and question.dtype is torch.float64:
        got, allowed = "float64 on a card", "bfloat16, float16 or float32"
        raise UnsupportedError(f"{question.operator}: dtype", got=got, allowed=allowed)
    if not question.cuda:
        backend = "cpu" if question.dtype is torch.float32 else "reference"
        return elsewhere(question, backend, "float32")
    rows = 1
    for size in x[:-1]:
        rows *= size
    if folder == "swiglu":
        pieces = -(-x[-1] // 2 // 512)
        why, tile, programs = "elementwise, memory bound", "512 elements, 4 warps", f"{rows} x {pieces}"
    else:
        block = 1 << (x[-1] - 1).bit_length()
        why = "a row is read once and stays in registers between its sum of squares and its scaling"
        tile, programs = f"1 row of {block}, {8 if block >= 2048 else 4} warps", str(rows)
    kernel = f"{folder}/triton_impl.py: {folder}_kernel"
    return Explanation(question.operator, question.text(), "triton", kernel, (why,), tile=tile, programs=programs)


# What an operator's question becomes, and what is chosen for it.
_CHOICES: dict[str, tuple[Callable[[Asked], Any], Callable[[Any], Choice]]] = {
    "attention": (attention.describe, attention.choose),
    "attention_fp8": (attention_fp8.describe, attention_fp8.choose),
    "attention_varlen": (attention.describe, attention.choose),
    "merge_attention": (merge_attention.describe, merge_attention.choose),
}
_EXPLAINERS: dict[str, Callable[[Question], Explanation]] = {
    "add_rms_norm": _by_row,
    "append_kv": explain_attention.append,
    "decode_attention": explain_attention.decode,
    "ffn": _ffn,
    "linear": _linear,
    "masked_multihead_attention": explain_attention.masked,
    "rms_norm": _by_row,
    "swiglu": _by_row,
}
