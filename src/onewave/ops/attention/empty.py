"""Attention of calls without a query, or without a key that any query sees: no kernel is launched."""

from torch import Tensor

from onewave.ops.attention.call import AttentionCall
from onewave.ops.attention.plan import AttentionChoice


def run(call: AttentionCall, choice: AttentionChoice) -> Tensor:
    """Return the output: zeros with an LSE of -inf. Tokens outside every packed sequence stay as they are."""
    out = call.output()
    return out if call.packed is not None else write_zeros(call, out)


def write_zeros(call: AttentionCall, out: Tensor) -> Tensor:
    """Write 0 to out and -inf to the LSE; return out."""
    if call.lse is not None:
        call.lse.fill_(float("-inf"))
    return out.zero_()
