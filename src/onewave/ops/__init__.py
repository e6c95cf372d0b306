"""The operators, one folder each; docs/reference/operators.md lists them.

Each name is the function, so `onewave.ops.attention(q, k, v)` works; an operator's modules are reached through their
full path, `from onewave.ops.attention.reference import attention`. `explain` is imported when it is first asked for: it
knows the wave and its tiles, which a CPU's operators do without.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from onewave.ops.append_kv.op import append_kv
from onewave.ops.attention.fp8.op import attention_fp8
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.decode_attention.op import decode_attention
from onewave.ops.embedding.op import embedding
from onewave.ops.ffn.op import ffn, pack_ffn
from onewave.ops.kv_layout import pack_k, unpack_k
from onewave.ops.linear.op import linear, linear_swiglu
from onewave.ops.masked_multihead_attention.op import masked_multihead_attention
from onewave.ops.merge_attention.op import merge_attention
from onewave.ops.post_attention.call import PostAttentionWeights
from onewave.ops.post_attention.op import post_attention
from onewave.ops.quantize_rows.op import quantize_rows
from onewave.ops.rms_norm.op import add_rms_norm, rms_norm
from onewave.ops.sampling.op import greedy
from onewave.ops.scaled_linear.op import linear_fp8, linear_int8
from onewave.ops.swiglu.op import swiglu
from onewave.ops.warm import Warmed, warm

if TYPE_CHECKING:
    from onewave.ops.explain import Explanation, explain

__all__ = [
    "Explanation",
    "PostAttentionWeights",
    "Warmed",
    "add_rms_norm",
    "append_kv",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "decode_attention",
    "embedding",
    "explain",
    "ffn",
    "greedy",
    "linear",
    "linear_fp8",
    "linear_int8",
    "linear_swiglu",
    "masked_multihead_attention",
    "merge_attention",
    "pack_ffn",
    "pack_k",
    "post_attention",
    "quantize_rows",
    "rms_norm",
    "swiglu",
    "unpack_k",
    "warm",
]


def _late(name: str) -> property:
    """A name of ops/explain.py. Importing that module sets `onewave.ops.explain` to it, which the function stands
    before."""
    return property(lambda self: getattr(import_module("onewave.ops.explain"), name), lambda self, value: None)


class _Ops(ModuleType):
    Explanation, explain = _late("Explanation"), _late("explain")


sys.modules[__name__].__class__ = _Ops
