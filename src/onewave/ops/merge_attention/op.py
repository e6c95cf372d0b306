"""Merge attention over parts of the keys into attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.backends import load
from onewave.ops.library import check_tensors, is_watched, register

__all__ = ["MERGE_BACKENDS", "merge_attention"]

_NAME = "merge_attention"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MERGE_BACKENDS = ("auto", "triton", "reference")


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
    stacked_outs, stacked_lses = _as_parts(outs), _as_parts(lses, "lses")
    _check(stacked_outs, stacked_lses, backend)
    if is_watched(*stacked_outs, *stacked_lses):
        return torch.ops.onewave.merge_attention(stacked_outs, stacked_lses, backend)
    return _run(stacked_outs, stacked_lses, backend)


def _as_parts(tensors: Tensor | Sequence[Tensor], name: str = "outs") -> list[Tensor]:
    """A list of tensors with the parts along their first axis."""
    each = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
    check_tensors(_NAME, **{f"{name}[{i}]": tensor for i, tensor in enumerate(each)})
    return [tensors] if isinstance(tensors, Tensor) else [tensor[None] for tensor in tensors]


def _check(outs: list[Tensor], lses: list[Tensor], backend: str) -> None:
    if not outs or len(outs) != len(lses):
        raise ShapeError(
            f"{_NAME}: parts", got=f"{len(outs)} outs, {len(lses)} lses", allowed="as many of each, at least one"
        )
    shape, dtype, device = outs[0].shape, outs[0].dtype, outs[0].device
    if len(shape) < 3 or shape[0] == 0:
        raise ShapeError(f"{_NAME}: outs", got=str(tuple(shape)), allowed="[parts, .., S, head_dim], at least one part")
    if dtype not in _DTYPES and not (dtype is torch.float64 and device.type == "cpu"):
        raise UnsupportedError(f"{_NAME}: dtype of outs", got=str(dtype), allowed="float16, bfloat16, float32")
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != shape or lse.shape != shape[:-1]:
            raise ShapeError(
                f"{_NAME}: a part's out and lse",
                got=f"{tuple(out.shape[1:])}, {tuple(lse.shape[1:])}",
                allowed=f"{tuple(shape[1:])}, {tuple(shape[1:-1])} in each part",
            )
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        if out.dtype is not dtype or lse.dtype is not wide:
            allowed = f"{dtype}, {wide} for its lse"
            raise UnsupportedError(f"{_NAME}: dtypes of a part", got=f"{out.dtype}, {lse.dtype}", allowed=allowed)
        if out.device != device or lse.device != device:
            raise UnsupportedError(f"{_NAME}: devices", got=f"{out.device}, {lse.device}", allowed=f"{device} for all")
        if out.stride(-1) != 1 and out.shape[-1] > 1:
            raise ShapeError(f"{_NAME}: strides of outs", got=str(out.stride()), allowed="a contiguous last axis")
    if backend not in MERGE_BACKENDS:
        raise InvalidArgumentError(f"{_NAME}: backend", got=shown(backend), allowed=", ".join(MERGE_BACKENDS))
    if backend == "triton" and device.type != "cuda":
        raise UnsupportedError(f"{_NAME} (backend=triton)", got=str(device), allowed="cuda", next='Use backend="auto".')


def _run(outs: Sequence[Tensor], lses: Sequence[Tensor], backend: str = "auto") -> tuple[Tensor, Tensor]:
    first = outs[0]
    if backend == "reference" or not first.is_cuda:
        return load(_NAME, "reference").merge_attention(torch.cat(list(outs)), torch.cat(list(lses)))
    # [parts, .., heads, S, D]: the axes before heads become one, those that are missing one of length 1.
    flat_outs = [_five_axes(out) for out in outs]
    flat_lses = [_five_axes(lse[..., None])[..., 0] for lse in lses]
    out, lse = load(_NAME, "triton_impl").merge_attention(flat_outs, flat_lses)
    return out.view(first.shape[1:]), lse.view(first.shape[1:-1])


def _five_axes(tensor: Tensor) -> Tensor:
    parts, *batch, queries, head_dim = tensor.shape
    heads = batch.pop() if batch else 1
    rows = 1
    for length in batch:
        rows *= length
    return tensor.reshape(parts, rows, heads, queries, head_dim)


def _library(outs: Sequence[Tensor], lses: Sequence[Tensor], backend: str = "auto") -> tuple[Tensor, Tensor]:
    return _run(outs, lses, backend)


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
