"""Token embedding: rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.ops.library import check_tensors, checks_contents, is_watched, register
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
            check_tensors("embedding", table=table)
        return table.look_up(token_ids)
    packed = isinstance(table, PackedWeight)
    check_tensors("embedding", token_ids=token_ids, **({} if packed else {"table": table}))
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError("embedding: token_ids", got=str(token_ids.dtype), allowed="int64, int32")
    if packed:
        if not token_ids.is_cpu:
            got = str(token_ids.device)
            raise UnsupportedError("embedding with a packed table: token_ids", got=got, allowed="cpu")
        _check_ids(token_ids, table.rows)
        if token_ids.numel() == 0:
            return torch.empty(*token_ids.shape, table.cols)
        return table.dequantize(token_ids.flatten()).view(*token_ids.shape, table.cols)
    if table.ndim != 2:
        raise ShapeError("embedding: table", got=str(tuple(table.shape)), allowed="[vocab, hidden]")
    if table.device != token_ids.device:
        got = f"{token_ids.device} and {table.device}"
        raise UnsupportedError("embedding: token_ids, table", got=got, allowed="one device")
    if is_watched(token_ids, table):
        result: Tensor = torch.ops.onewave.embedding(token_ids, table)
        return result
    if token_ids.is_cuda and checks_contents():
        _check_ids(token_ids, table.shape[0])
    return _dense(token_ids, table)


def _check_ids(token_ids: Tensor, vocab: int) -> None:
    """Raises InvalidArgumentError. Waits for the device."""
    if token_ids.numel() == 0:
        return
    low, high = (int(end) for end in token_ids.aminmax())
    if low < 0 or high >= vocab:
        got = str(low if low < 0 else high)
        allowed = f"0 to {vocab - 1}" if vocab else "none, as the table is empty"
        raise InvalidArgumentError("embedding: token_ids", got=got, allowed=allowed)


def _dense(token_ids: Tensor, table: Tensor) -> Tensor:
    try:
        return F.embedding(token_ids, table)
    except (IndexError, RuntimeError):  # a CPU looks
        _check_ids(token_ids, table.shape[0])
        raise


def _fake(token_ids: Tensor, table: Tensor) -> Tensor:
    return torch.empty((*token_ids.shape, table.shape[1]), dtype=table.dtype, device=table.device)


register("embedding", _dense, _fake)
