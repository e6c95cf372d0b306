"""Check a decode step's arguments: caches, plain and paged, block table, sequences."""

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError
from onewave.wave.plan.layout import PAGES
from onewave.wave.plan.operations import HeadGroups

BYTE_NUMBERS = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""Dtypes of a cache in 8 bits: the kernel's KV."""
BYTE_HEADS = (64, 128)
"""Head dimensions of such a cache."""


def check_cache(
    k: Tensor, v: Tensor, layers: int, groups: HeadGroups, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Check the caches of a decode step: a model's layers and heads, slots or pages. dtype: they may be of, beside
    int8 and float8_e4m3fn. Raises ShapeError."""
    kinds = {(tensor.dtype, tensor.device) for tensor in (k, v)}
    fits = k.ndim == 5 and (k.shape[0], k.shape[2], k.shape[4]) == (layers, groups.kv_heads, groups.head_dim)
    known = len(kinds) == 1 and k.device == device and k.dtype in (dtype, *BYTE_NUMBERS)
    if not fits or k.shape != v.shape or not known or not (k.is_contiguous() and v.is_contiguous()):
        got = " and ".join(f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" for tensor in (k, v))
        shape = f"[{layers}, slots or pages, {groups.kv_heads}, keys, {groups.head_dim}]"
        raise ShapeError("wave: caches", got=got, allowed=f"both {dtype} {shape} on {device}, contiguous; or in 8 bits")


def check_bytes(k: Tensor, table: Tensor | None, scales: Tensor | None) -> None:
    """Check what comes with a cache that check_cache accepts: scales and pages with 8 bits. Raises ShapeError."""
    if k.dtype not in BYTE_NUMBERS:
        if scales is not None:
            raise ShapeError("wave: scales", got=f"with a {k.dtype} cache", allowed="int8, float8_e4m3fn")
        return
    if table is None or k.shape[4] not in BYTE_HEADS:
        got = f"{k.dtype}, head_dim {k.shape[4]}, {'no ' if table is None else ''}block table"
        raise ShapeError("wave: caches", got=got, allowed=f"8 bits with a block table, head_dim of {BYTE_HEADS}")
    shape = (k.shape[0], k.shape[2], 2)
    fits = scales is not None and scales.shape == shape and scales.dtype is torch.float32 and scales.device == k.device
    if scales is None or not fits or not scales.is_contiguous():
        got = "none" if scales is None else f"{scales.dtype} {tuple(scales.shape)} on {scales.device}"
        raise ShapeError("wave: scales", got=got, allowed=f"float32 {shape} on {k.device}, contiguous")


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


def check_pages(k: Tensor, v: Tensor, table: Tensor) -> None:
    """Check shapes. k, v: [layers, pages, kv_heads, page, head_dim]. Raises ShapeError."""
    if k.shape != v.shape or k.ndim != 5 or k.shape[3] not in PAGES or not (k.is_contiguous() and v.is_contiguous()):
        got = f"{tuple(k.shape)} and {tuple(v.shape)}"
        pages = ", ".join(map(str, PAGES))
        allowed = f"both [layers, pages, kv_heads, page, head_dim], contiguous, page one of {pages}"
        raise ShapeError("wave: pages", got=got, allowed=allowed)
    if table.ndim != 2 or table.dtype != torch.int32 or table.stride(1) != 1 or table.device != k.device:
        got = f"{table.dtype} {tuple(table.shape)} on {table.device}"
        raise ShapeError("wave: block table", got=got, allowed=f"int32 [slots, pages a slot] on {k.device}")


def check_entries(table: Tensor, pages: int, page: int, slots: Tensor, last: Tensor) -> None:
    """Check the entries of a block table that a launch uses; waits for the device.

    slots, last: int64 [rows]; last: the position up to which a row is read and written, -1 for none. Raises
    InvalidArgumentError.
    """
    limits = (("slots", slots, 0, table.shape[0]), ("positions", last, -1, table.shape[1] * page))
    for name, values, least, end in limits:
        wrong = values[(values < least) | (values >= end)]
        if len(wrong):
            allowed = f"{least} to {end - 1}, by the block table"
            raise InvalidArgumentError(f"wave: {name}", got=str(int(wrong[0])), allowed=allowed)
    rows = table[slots]
    used = torch.arange(table.shape[1], device=table.device) * page <= last[:, None]
    wrong = used & ((rows < 0) | (rows >= pages))
    if wrong.any():
        row, column = (int(at) for at in wrong.nonzero()[0])
        where, got = f"[{int(slots[row])}, {column}]", str(int(rows[row, column]))
        raise InvalidArgumentError(f"wave: block table{where}", got=got, allowed=f"0 to {pages - 1}")
