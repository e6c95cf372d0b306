"""A table whose rows are looked up on the GPU, in nested groups (formats/nested.py): a quantised embedding."""

import torch
from torch import Tensor

from onewave.base.group_rounding import GroupedRows
from onewave.wave.weights.formats.nested import restore_nested


class RowTable:
    """Rows of four or eight bits, [rows, cols] of dtype when they are looked up; cols are even."""

    def __init__(self, rows: GroupedRows, bits: int, dtype: torch.dtype, codes: Tensor | None = None):
        """codes: uint8 [rows, cols * bits / 8], where the codes are to lie; None: anywhere."""
        assert rows.minima is not None
        assert rows.steps is not None
        self.bits, self.dtype, self.shape = bits, dtype, rows.codes.shape
        packed = rows.codes[:, 0::2] | (rows.codes[:, 1::2] << 4) if bits == 4 else rows.codes
        self.codes = packed if codes is None else codes.copy_(packed)
        self.scales, self.minima, self.row_scales = rows.scales.contiguous(), rows.minima.contiguous(), rows.row_scales
        self.steps = rows.steps.contiguous().view(torch.int16).squeeze(2)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        parts = (self.codes, self.scales, self.minima, self.row_scales, self.steps)
        return sum(part.nbytes for part in parts)

    def look_up(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Dequantise rows, in float32 and rounded once. ids: int64|int32 [n] on the table's device. out: [n, cols]."""
        if out is None:
            out = torch.empty(len(ids), self.shape[1], dtype=self.dtype, device=ids.device)
        if not ids.is_cuda:
            return out.copy_(self._restored(ids))
        from onewave.wave.weights.pack_impl import look_up_rows

        look_up_rows(self, ids, out)
        return out

    def _restored(self, ids: Tensor) -> Tensor:
        """The same by plain indexing."""
        codes = self.codes[ids]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        steps = self.steps[ids].contiguous().view(torch.int8).view(len(ids), -1, 2)
        rows = GroupedRows(codes, self.scales[ids], self.minima[ids], self.row_scales[ids], steps)
        return restore_nested(rows, self.bits, self.dtype)
