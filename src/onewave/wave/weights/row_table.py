"""A table whose rows are looked up on the GPU, in nested groups (formats/nested.py): a quantised embedding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onewave.base.group_rounding import GroupedRows
from onewave.wave.weights.formats.nested import restore_nested


class RowTable:
    """Rows of four or eight bits, [rows, cols] of dtype when they are looked up; cols are even."""

    def __init__(self, rows: GroupedRows, bits: int, dtype: torch.dtype, room: Sequence[Tensor] | None = None):
        """room: of `room_for`, where all parts are to lie; None: anywhere."""
        assert rows.minima is not None
        assert rows.steps is not None
        self.bits, self.dtype, self.shape = bits, dtype, rows.codes.shape
        codes = rows.codes[:, 0::2] | (rows.codes[:, 1::2] << 4) if bits == 4 else rows.codes
        steps = rows.steps.contiguous().view(torch.int16).squeeze(2)
        parts = [codes, steps, rows.scales.contiguous(), rows.minima.contiguous(), rows.row_scales]
        if room is not None:
            parts = [place.copy_(part) for place, part in zip(room, parts, strict=True)]
        self.codes, self.steps, self.scales, self.minima, self.row_scales = parts

    @staticmethod
    def room_for(rows: int, cols: int, bits: int, device: torch.device) -> list[Tensor]:
        """Memory for a table's parts, to be taken before its rows are made."""
        groups = -(-cols // (128 if bits == 4 else 32))
        kinds = (torch.uint8, cols * bits // 8), (torch.int16, -(-cols // 32)), *[(torch.float16, groups)] * 2
        made = [torch.empty(rows, width, dtype=kind, device=device) for kind, width in kinds]
        return [*made, torch.empty(rows, device=device)]

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
