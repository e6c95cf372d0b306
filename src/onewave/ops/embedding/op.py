"""Token embedding: rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.library import checks_contents, is_watched, register
from onewave.ops.linear.packed import PackedWeight

if TYPE_CHECKING:
    from onewave.wave.weights.row_table import RowTable  # a CPU never imports the wave


def embedding(token_ids: Tensor, table: Tensor | PackedWeight | RowTable) -> Tensor:
    """Return the table's rows of these tokens.

    token_ids: [tokens] int64|int32. table: [vocab, hidden], dense, packed or a wave's RowTable. Returns [tokens,
    hidden] in the table's dtype (float32 when packed). An id outside the table is refused on a CPU; on CUDA with
    ONEWAVE_DEBUG=1, with a synchronisation, but for a RowTable. Raises ShapeError, UnsupportedError,
    InvalidArgumentError.
    """
    if not isinstance(table, Tensor | PackedWeight):
        if not hasattr(table, "look_up"):
            checks.tensors("embedding", table=table)
        return table.look_up(token_ids)
    packed = isinstance(table, PackedWeight)
    checks.tensors("embedding", token_ids=token_ids, **({} if packed else {"table": table}))
    checks.dtype("embedding", "token_ids", token_ids.dtype, checks.WHOLE)
    if packed:
        if not token_ids.is_cpu:
            got = str(token_ids.device)
            raise UnsupportedError("embedding with a packed table: token_ids", got=got, allowed="cpu")
        checks.indices("embedding", "token_ids", token_ids, table.rows)
        if token_ids.numel() == 0:
            return torch.empty(*token_ids.shape, table.cols)
        return table.dequantize(token_ids.flatten()).view(*token_ids.shape, table.cols)
    if table.ndim != 2:
        raise ShapeError("embedding: table", got=str(tuple(table.shape)), allowed="[vocab, hidden]")
    checks.one_device("embedding", token_ids, (table,))
    if is_watched(token_ids, table):
        result: Tensor = torch.ops.onewave.embedding(token_ids, table)
        return result
    if token_ids.is_cuda and checks_contents():
        checks.indices("embedding", "token_ids", token_ids, len(table))
    return _dense(token_ids, table)


def _dense(token_ids: Tensor, table: Tensor) -> Tensor:
    try:
        return F.embedding(token_ids, table)
    except (IndexError, RuntimeError):  # a CPU looks
        checks.indices("embedding", "token_ids", token_ids, len(table))
        raise


def _fake(token_ids: Tensor, table: Tensor) -> Tensor:
    return torch.empty((*token_ids.shape, table.shape[1]), dtype=table.dtype, device=table.device)


register("embedding", _dense, _fake)
