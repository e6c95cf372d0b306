"""Chooses what runs masked multi-head attention: decode attention's kernels on a GPU, PyTorch elsewhere."""

import torch

from onewave.ops import checks
from onewave.ops.choice import Asked, Choice, because, empty_on_meta
from onewave.ops.decode_attention.call import Projection
from onewave.ops.decode_attention.choose import caches_of
from onewave.ops.decode_attention.choose import choose as choose_decode
from onewave.ops.masked_multihead_attention.call import MaskedCall, as_heads, check, result_dtype

_REFERENCE = "masked_multihead_attention/reference.py"
_ROUNDINGS = {"half_even": False, "half_away": True}
_STYLES = {"neox": False, "interleaved": True}


def choose(call: MaskedCall) -> Choice:
    """Return what runs; see ops/choice.py. On a GPU: decode attention's choice for call.decode."""
    if call.on_gpu and call.backend != "reference":
        return choose_decode(call.decode)
    why = "asked for" if call.backend == "reference" else "no other implementation for a CPU"
    return Choice("reference", "reference", _REFERENCE, (because(why),))


def switches(quant_round: str, rotary_style: str) -> tuple[bool, bool]:
    """Return whether to round half away from zero, and whether pairs are interleaved. Raises InvalidArgumentError."""
    checks.one_of("masked_multihead_attention", "quant_round", quant_round, _ROUNDINGS)
    checks.one_of("masked_multihead_attention", "rotary_style", rotary_style, _STYLES)
    return _ROUNDINGS[quant_round], _STYLES[rotary_style]


def describe(asked: Asked) -> MaskedCall:
    """A question: qkv, cache_k. A scaled projection is one in int32, with a cache in the dtype that was named."""
    qkv, cache = asked.take((2, 3, 4), (4, 5))
    kv_dtype, scaled = asked.dtype_of("kv_dtype", asked.dtype), asked.has("qkv_out_scale")
    options = asked.options
    half_away, interleaved = switches(options.get("quant_round", "half_even"), options.get("rotary_style", "neox"))
    given = empty_on_meta(qkv, torch.int32 if scaled else asked.dtype)
    keys, values = caches_of(cache, kv_dtype)
    x = as_heads(given, keys, values)
    out_scale = options.get("out_scale")
    fused = Projection(
        qkv_out_scale=empty_on_meta(x.shape[1:], torch.float32) if scaled else None, interleaved=interleaved,
        out_scale=1.0 if out_scale is True else out_scale, half_away=half_away,
        max_bound=options.get("quant_max_bound", 127.0), min_bound=options.get("quant_min_bound", -127.0),
    )  # fmt: skip
    lengths = empty_on_meta(qkv[:1], torch.int32)
    call = MaskedCall(
        x, keys, values, lengths, fused, **asked.given("steps_per_block", "scale", "backend"),
        row_keys=asked.number("seq_len"), described=asked.device,
    )  # fmt: skip
    check(call)
    result_dtype(call, given, options.get("dtype"), None)
    return call
