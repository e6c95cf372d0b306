"""Token embedding: rows of a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.ops.library import check_tensors, is_watched, register
from onewave.ops.linear.packed import PackedWeight

__all__ = ["embedding"]


def embedding(token_ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
    """Return the table's rows of these tokens.

    token_ids: [tokens] int64. table: [vocab, hidden], dense or packed. Returns [tokens, hidden] in the table's dtype
    (float32 when packed). An id outside the table is the caller's mistake; the engine checks prompts before they run.
    """
    check_tensors("embedding", token_ids=token_ids)
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError("embedding: token_ids", got=str(token_ids.dtype), allowed="int64, int32")
    if isinstance(table, PackedWeight):
        return table.dequantize(token_ids)
    return torch.ops.onewave.embedding(token_ids, table) if is_watched(token_ids, table) else _dense(token_ids, table)


def _dense(token_ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(token_ids, table)


def _fake(token_ids: Tensor, table: Tensor) -> Tensor:
    return torch.empty((*token_ids.shape, table.shape[1]), dtype=table.dtype, device=table.device)


register("embedding", _dense, _fake)
