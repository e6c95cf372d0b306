"""Whether packed matrices read back, by code that shares nothing with the kernels that packed them.

Of each matrix the first, a middle and the last row block are looked at, many matrices at once: what it takes is the
host's time, call by call.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onewave.base.group_rounding import GroupedRows
from onewave.wave.weights.pack import Weight, WeightStream

# Values that are read back together. With more, loading needs more memory, some fifty bytes each.
_VALUES = 1 << 23


class _Sample(NamedTuple):
    """Some row blocks of a matrix, (name, first, last), and their rows [rows, cols]: rounded to its format, as they
    have to read back, or not yet."""

    runs: list[tuple[str, int, int]]
    rows: Tensor
    rounded: bool


class ReadBack:
    """Checks a stream's matrices, each once it is packed."""

    def __init__(self, stream: WeightStream) -> None:
        self._stream, self._samples, self._values = stream, list[_Sample](), 0
        self._differs = torch.zeros((), dtype=torch.bool, device=stream.device)

    def add(self, name: str, weight: Weight) -> None:
        """Check what `put` packed, now or later; the weight may be freed."""
        stream, runs = self._stream, self._runs(name)
        height = stream.shape.rows
        low = np.array([low * height for _, low, _ in runs])
        rows = weight.rows(low, height, stream.device, wide=stream.format_of(name).wide)
        self._add(_Sample(runs, rows, rounded=False))

    def add_rows(self, name: str, rows: GroupedRows) -> None:
        """Check what `put_rows` packed, likewise."""
        form, height, runs = self._stream.format_of(name), self._stream.shape.rows, self._runs(name)
        blocks = [form.restore_groups(rows.block(low * height, high * height)) for _, low, high in runs]
        self._add(_Sample(runs, torch.cat(blocks), rounded=True))

    def differs(self) -> bool:
        """Whether anything reads back otherwise than it was given. Waits for the device."""
        self._check()
        return bool(self._differs)

    def _runs(self, name: str) -> list[tuple[str, int, int]]:
        blocks = self._stream.num_blocks(name)
        return [(name, block, block + 1) for block in sorted({0, blocks // 2, blocks - 1})]

    def _add(self, sample: _Sample) -> None:
        self._samples.append(sample)
        self._values += sample.rows.numel()
        if self._values > 4 * _VALUES:
            self._check()

    def _check(self) -> None:
        stream, kinds = self._stream, dict[tuple[int, int, bool], list[_Sample]]()
        for sample in self._samples:
            name, cols = sample.runs[0][0], sample.rows.shape[1]
            kinds.setdefault((stream.program.widths.get(name, 1), cols, sample.rounded), []).append(sample)
        for (_, cols, rounded), alike in kinds.items():
            step, form = max(1, _VALUES // alike[0].rows.numel()), stream.format_of(alike[0].runs[0][0])
            for first in range(0, len(alike), step):
                part = alike[first : first + step]
                rows = torch.cat([sample.rows for sample in part])
                expected = rows if rounded else form.expected(rows)
                found = stream.read_runs(cols, [run for sample in part for run in sample.runs])
                # A NaN weight must read back as NaN.
                self._differs |= ((found != expected) & ~(found.isnan() & expected.isnan())).any()
        self._samples, self._values = [], 0
