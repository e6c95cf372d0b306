"""The operators, one folder each; see docs/reference/api.md for the list.

Each name is the function, so `onewave.ops.attention(q, k, v)` works; an operator's modules are reached through their
full path, `from onewave.ops.attention.reference import attention`.
"""

from onewave.ops.append_kv.op import append_kv
from onewave.ops.attention.op import attention
from onewave.ops.decode_attention.op import decode_attention

__all__ = ["append_kv", "attention", "decode_attention"]
