"""Merge attention over parts of the keys into attention over all of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onewave.ops import checks
from onewave.ops.backends import load
from onewave.ops.library import is_watched, register
from onewave.ops.merge_attention.call import MergeCall, check
from onewave.ops.merge_attention.choose import choose

_NAME = "merge_attention"


def merge_attention(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Combine results over disjoint sets of keys: out = sum of exp(lse_i - lse) * out_i, lse = log sum of exp(lse_i).

    outs: at least one partial output [.., heads, S, head_dim] bf16|fp16|fp32, as a sequence or stacked along a new
    first axis; last axis contiguous. lses: their natural-log sums of exponentials, float32 [.., heads, S], likewise.
    A part whose lse is -inf contributes nothing, whatever its output holds; a row without any part gives 0 and -inf.
    Returns (out [.., heads, S, head_dim] in outs' dtype, lse float32), both contiguous. Sums in float32 in the parts'
    order and rounds once; any tree of merges gives the same to rounding. A list of more than 8 is stacked first (a
    copy). Raises ShapeError, UnsupportedError, InvalidArgumentError. Source: Dao et al., Flash-Decoding 2023.
    """
    call = MergeCall(_as_parts(outs), _as_parts(lses, "lses"), backend)
    check(call)
    if is_watched(*call.outs, *call.lses):
        return torch.ops.onewave.merge_attention(*call.flat)
    return _run(call)


def _as_parts(tensors: Tensor | Sequence[Tensor], name: str = "outs") -> list[Tensor]:
    """A list of tensors with the parts along their first axis."""
    each = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
    checks.tensors(_NAME, **{f"{name}[{i}]": tensor for i, tensor in enumerate(each)})
    return [tensors] if isinstance(tensors, Tensor) else [tensor[None] for tensor in tensors]


def _run(call: MergeCall) -> tuple[Tensor, Tensor]:
    choice = choose(call)
    return load(_NAME, choice.module).run(call, choice)


def _library(outs: Sequence[Tensor], lses: Sequence[Tensor], backend: str = "auto") -> tuple[Tensor, Tensor]:
    return _run(MergeCall(list(outs), list(lses), backend))


def _fake(outs: Sequence[Tensor], lses: Sequence[Tensor], backend: str = "auto") -> tuple[Tensor, Tensor]:
    shape = outs[0].shape[1:]
    out = torch.empty(shape, dtype=outs[0].dtype, device=outs[0].device)
    return out, torch.empty(shape[:-1], dtype=lses[0].dtype, device=lses[0].device)


def _over_batch(
    info: Any, in_dims: Any, outs: Sequence[Tensor], lses: Sequence[Tensor], backend: str = "auto"
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """torch.vmap: its axis becomes one more behind the parts'."""

    def moved(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
        return [
            t.unsqueeze(1).expand(-1, info.batch_size, *t.shape[1:]) if dim is None else t.movedim(dim, 1)
            for t, dim in zip(tensors, dims, strict=True)
        ]

    return torch.ops.onewave.merge_attention(moved(outs, in_dims[0]), moved(lses, in_dims[1]), backend), (0, 0)


register(_NAME, _library, _fake)
torch.library.register_vmap(f"onewave::{_NAME}", _over_batch)  # pyright: ignore[reportUnknownMemberType]
