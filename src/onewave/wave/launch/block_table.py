"""Check a paged cache and its block table, on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError
from onewave.wave.plan.layout import PAGES


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
