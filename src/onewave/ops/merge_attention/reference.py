"""The reference of `merge_attention`, in plain PyTorch."""

import torch
from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.merge_attention.call import MergeCall


def run(call: MergeCall, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the parts, stacked."""
    return merge_attention(torch.cat(call.outs), torch.cat(call.lses))


def merge_attention(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Average outs [parts, .., S, D] with weights softmax(lses [parts, .., S]) over the parts, in at least float32."""
    exact = torch.promote_types(outs.dtype, torch.float32)
    lses = lses.to(exact)
    lse = torch.logsumexp(lses, dim=0)
    # A row without keys in any part: every weight is exp(-inf - 0) = 0.
    weights = torch.exp(lses - lse.masked_fill(lse == float("-inf"), 0.0))
    # Values of a part without keys do not count: 0 * NaN must not get in.
    parts = outs.to(exact).masked_fill((lses == float("-inf"))[..., None], 0.0)
    return (weights[..., None] * parts).sum(dim=0).to(outs.dtype), lse
