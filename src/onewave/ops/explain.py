"""Which kernel an operator runs on given shapes, with which tile and split, and why. Nothing is run to find out.

    >>> print(explain("decode_attention", (1, 32, 1, 128), (1, 8, 4096, 128), device="cuda:sm_90", dtype="bf16"))

Each operator's own `choose` answers; this file only reads the question and lays out the answer.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from operator import index
from typing import Any

import torch

from onewave.base.device import CPU, H200_SMS, Device, current_device, device_of
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, check_one_of, shown
from onewave.ops import checks
from onewave.ops.append_kv import choose as append_kv
from onewave.ops.attention import choose as attention
from onewave.ops.attention.fp8 import choose as attention_fp8
from onewave.ops.choice import DTYPES, Asked, Choice
from onewave.ops.decode_attention import choose as decode_attention
from onewave.ops.ffn import choose as ffn
from onewave.ops.linear import choose as linear
from onewave.ops.masked_multihead_attention import choose as masked
from onewave.ops.merge_attention import choose as merge_attention
from onewave.ops.post_attention import choose as post_attention
from onewave.ops.quantize_rows import choose as quantize_rows
from onewave.ops.rms_norm import choose as rms_norm
from onewave.ops.scaled_linear import choose as scaled_linear
from onewave.ops.swiglu import choose as swiglu

Shape = Sequence[int]

# Options that a call states by its tensors, beside those that are its own.
_MORE_OPTIONS = {
    "append_kv": ("kv_dtype",),
    "attention": ("descriptors",),
    "attention_fp8": ("sequences",),
    "attention_varlen": ("descriptors", "page_size", "sequences"),
    "decode_attention": ("kv_dtype", "seq_len"),
    "ffn": ("gated", "workers"),
    "linear": ("gated", "sequences", "tiles"),
    "masked_multihead_attention": ("kv_dtype", "seq_len"),
    "quantize_rows": ("codes",),
    "post_attention": ("workers",),
}


# Options that count something, and the least of each.
_LEAST = {
    "max_seqlen_q": 0, "max_seqlen_k": 0, "page_size": 1, "seq_len": 0, "sequences": 0, "split_size": 1,
    "steps_per_block": 1, "workers": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """One operator's choice. kernel: its file and function; tile, split: None where it has none.

    why: sentences. programs: thread blocks of the launch, where there is one.
    """

    operator: str
    question: str
    backend: str
    kernel: str
    why: tuple[str, ...]
    tile: str | None = None
    split: str | None = None
    programs: str | None = None

    def __str__(self) -> str:
        rows = [("backend", self.backend), ("kernel", self.kernel), ("tile", self.tile), ("split", self.split)]
        lines = [f"{self.operator} {self.question}"]
        lines += [f"  {name:<9} {value}" for name, value in (*rows, ("programs", self.programs)) if value]
        lines += [f"  {'because' if i == 0 else '':<9} {reason}" for i, reason in enumerate(self.why)]
        return "\n".join(lines)


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
        merge_attention the stacked outs; linear, linear_int8 and linear_fp8 x, weight (linear: gated=True, as of
        linear_swiglu; tiles="int8", sequences=8, in a stream of that format for so many sequences)
        ffn x, w_up, w_down (gated=True, workers=132);
        post_attention attended, o, gate_up (workers=132); rms_norm, add_rms_norm and
        swiglu x; quantize_rows x (codes="int8" or "fp8")
    device: "cpu", "cuda", or a GPU that need not be there, such as "cuda:sm_90"; default: this machine's. dtype:
    "bf16", "fp16", "fp32". options: the call's own. Raises InvalidArgumentError, ShapeError, UnsupportedError.
    """
    name = (op if isinstance(op, str) else getattr(op, "__name__", repr(op))).replace("-", "_")
    check_one_of("explain: operator", name, sorted(_CHOICES))
    where = _device(device)
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype if isinstance(dtype, torch.dtype) else None  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
    if kind is None:
        raise UnsupportedError("explain: dtype", got=shown(dtype), allowed=", ".join(DTYPES))
    sizes = tuple(_sizes(shape) for shape in shapes)
    parameters = signature(getattr(import_module("onewave.ops"), name)).parameters
    more = _MORE_OPTIONS.get(name, ())
    known = [*parameters, *more]
    for option in options:
        check_one_of(f"explain {name}: option", option, known)
    for option, least in _LEAST.items():
        if options.get(option) is not None:
            checks.whole(f"explain {name}", option, options[option], least)
    # None is what such a call has without them; elsewhere, as for rotary and activation, it means something.
    absent = {*more, *(option for option, parameter in parameters.items() if parameter.default is None)}
    given = {option: value for option, value in options.items() if value is not None or option not in absent}
    asked = Asked(name, sizes, where, kind, given)
    describe, choose = _CHOICES[name]
    choice = choose(describe(asked))
    reasons = tuple(map(str, choice.why))
    return Explanation(
        name, str(asked), choice.backend, choice.kernel, reasons, choice.tile, choice.split, choice.programs
    )


def _sizes(shape: Shape) -> tuple[int, ...]:
    allowed = "whole numbers from 0, such as (1, 32, 4096, 128)"
    try:
        sizes = tuple(index(size) for size in shape)
    except TypeError as error:
        raise ShapeError("explain: shape", got=shown(shape), allowed=allowed) from error
    if any(size < 0 for size in sizes):
        raise ShapeError("explain: shape", got=shown(shape), allowed=allowed)
    return sizes


def _device(device: str | torch.device | None) -> Device:
    """Return the device that is asked about; an unknown GPU is an H200."""
    text = "cuda" if torch.cuda.is_available() else "cpu"
    text = text if device is None else str(device)
    found = re.fullmatch(r"cpu|cuda(?::(?:sm_?(\d{2,3})|\d+))?", text)
    if not found:
        raise InvalidArgumentError("explain: device", got=shown(text), allowed="cpu, cuda, cuda:N, cuda:sm_90")
    if text == "cpu":
        return CPU
    if found[1] or not torch.cuda.is_available():
        major, minor = divmod(int(found[1] or 90), 10)
        return Device((major, minor), H200_SMS)
    number, count = int(text[5:] or current_device()), torch.cuda.device_count()
    if number >= count:
        raise InvalidArgumentError("explain: device", got=text, allowed=f"cuda:0..cuda:{count - 1}, cuda:sm_90")
    return device_of(torch.device("cuda", number))


# Functions that turn an operator's question into a call and choose for that call.
_CHOICES: dict[str, tuple[Callable[[Asked], Any], Callable[[Any], Choice]]] = {
    "add_rms_norm": (rms_norm.describe, rms_norm.choose),
    "append_kv": (append_kv.describe, append_kv.choose),
    "attention": (attention.describe, attention.choose),
    "attention_fp8": (attention_fp8.describe, attention_fp8.choose),
    "attention_varlen": (attention.describe, attention.choose),
    "decode_attention": (decode_attention.describe, decode_attention.choose),
    "ffn": (ffn.describe, ffn.choose),
    "linear": (linear.describe, linear.choose),
    "linear_fp8": (scaled_linear.describe, scaled_linear.choose),
    "linear_int8": (scaled_linear.describe, scaled_linear.choose),
    "masked_multihead_attention": (masked.describe, masked.choose),
    "merge_attention": (merge_attention.describe, merge_attention.choose),
    "quantize_rows": (quantize_rows.describe, quantize_rows.choose),
    "post_attention": (post_attention.describe, post_attention.choose),
    "rms_norm": (rms_norm.describe, rms_norm.choose),
    "swiglu": (swiglu.describe, swiglu.choose),
}
