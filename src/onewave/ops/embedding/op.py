"""Token embedding: rows of a table."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from onewave.ops.linear.packed import PackedWeight

__all__ = ["embedding"]


def embedding(token_ids: Tensor, table: Tensor | PackedWeight) -> Tensor:
    """Return the table's rows of these tokens.

    token_ids: [tokens] int64. table: [vocab, hidden], dense or packed. Returns [tokens, hidden] in the table's dtype
    (float32 when packed). An id outside the table is the caller's mistake; the engine checks prompts before they run.
    """
    if isinstance(table, PackedWeight):
        return table.dequantize(token_ids)
    return F.embedding(token_ids, table)
