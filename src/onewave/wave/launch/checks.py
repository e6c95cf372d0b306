"""Check a decode step's arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.errors import ShapeError
from onewave.wave.plan.operations import HeadGroups


def check_cache(
    k: Tensor, v: Tensor, layers: int, groups: HeadGroups, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Check the caches of a decode step: a model's layers and heads, slots or pages. Raises ShapeError."""
    kinds = {(tensor.dtype, tensor.device) for tensor in (k, v)}
    fits = k.ndim == 5 and (k.shape[0], k.shape[2], k.shape[4]) == (layers, groups.kv_heads, groups.head_dim)
    if not fits or k.shape != v.shape or kinds != {(dtype, device)} or not (k.is_contiguous() and v.is_contiguous()):
        got = " and ".join(f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" for tensor in (k, v))
        shape = f"[{layers}, slots or pages, {groups.kv_heads}, keys, {groups.head_dim}]"
        raise ShapeError("wave: caches", got=got, allowed=f"both {dtype} {shape} on {device}, contiguous")


def check_sequences(
    tokens: Tensor, positions: Tensor, slots: Tensor, logits: Tensor, *, max_rows: int, vocab: int, device: torch.device
) -> None:
    """Check a decode step's tokens, positions and slots, int64 [rows] each, and its float32 logits [rows, vocab].

    All are contiguous on the device. Raises ShapeError.
    """
    rows = len(tokens)
    for name, tensor in (("tokens", tokens), ("positions", positions), ("slots", slots)):
        whole = tensor.dtype is torch.int64 and tensor.shape == (rows,) and tensor.is_contiguous()
        if not (whole and 1 <= rows <= max_rows and tensor.device == device):
            got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            allowed = f"int64 [rows], contiguous, the same 1 to {max_rows} rows for all, on {device}"
            raise ShapeError(f"wave: {name}", got=got, allowed=allowed)
    fits = logits.shape == (rows, vocab) and logits.device == device
    if logits.dtype is not torch.float32 or not fits or not logits.is_contiguous():
        got = f"{logits.dtype} {tuple(logits.shape)} on {logits.device}"
        raise ShapeError("wave: logits", got=got, allowed=f"float32 [{rows}, {vocab}], contiguous, on {device}")
