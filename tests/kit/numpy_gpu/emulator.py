"""The wave kernel's step records and packed stream, executed in NumPy one step after the other.

It reads exactly what the kernel reads, so that records, packing and buffers can be tested without a GPU. Steps run in
the order of the table's rows, which happens-before allows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from onewave.tiles.proof.table import TaskTable
from onewave.wave.plan.program import WaveProgram
from onewave.wave.plan.steps import Kind, Word

Floats = npt.NDArray[np.float64]


class Emulator:
    """One launch in float64. NaN in the exchange is a word that has not come."""

    def __init__(self, program: WaveProgram, stream: torch.Tensor, function: Callable[[Floats], Floats]):
        self.program, self.shape, self.function = program, program.shape, function
        self.tiles = stream.view(-1, 8192).double().numpy()
        self.exchange = np.full((program.set_words, 2), np.nan)  # two values a word, or one float32 in the first

    def run(self, table: TaskTable, x: Floats, out: Floats) -> None:
        """Run all steps; out is written in place."""
        where = {int(row): at for at, row in enumerate(table.queue)}
        lane = np.repeat(np.arange(self.program.workers), self.program.lanes[:, 3])
        self.streamed = [0] * self.program.workers
        for row in range(table.num_tasks):
            at = where[row]
            self._step(self.program.steps[at], int(lane[at]), x, out)

    def _step(self, record: npt.NDArray[np.int32], worker: int, x: Floats, out: Floats) -> None:
        kind, blocks, first = (int(record[i]) for i in (Word.KIND, Word.BLOCKS, Word.FIRST_BLOCK))
        rows, batch = self.shape.rows, len(x)
        if kind >= Kind.REDUCE_HIDDEN:
            piece, slices = self.shape.piece, int(record[Word.SLICE])
            for row in range(first * piece, (first + blocks) * piece, piece):
                at = int(record[Word.SOURCE]) + row // rows * slices * self.shape.batch * rows + row % rows
                index = at + np.arange(slices)[:, None, None] * (self.shape.batch * rows)
                index = index + np.arange(batch)[:, None] * rows + np.arange(piece)
                self._publish(record, row, self.exchange[index, 0].sum(0), kind == Kind.REDUCE_OUT, out)
            return
        values = self._activations(record, x)
        tiles = int(record[Word.TILES])
        totals = np.zeros((blocks, batch, rows))
        chunk = self.shape.chunk
        for group in range(0, blocks, self.shape.group):
            for begin in range(0, tiles, chunk):
                for total in totals[group : group + self.shape.group]:
                    for tile in range(begin, min(begin + chunk, tiles)):
                        total += self._product(self._next_tile(worker), values, tile)
        for block, total in enumerate(totals, first):
            if kind == Kind.PARTIAL:
                at = block * int(record[Word.TARGET_STRIDE]) + int(record[Word.SLICE])
                at = int(record[Word.TARGET]) + at * self.shape.batch * rows
                self.exchange[at + np.arange(batch)[:, None] * rows + np.arange(rows), 0] = total
            else:
                self._publish(record, block * rows, total, kind == Kind.OUT, out)

    def _activations(self, record: npt.NDArray[np.int32], x: Floats) -> Floats:
        begin, count = int(record[Word.FIRST_COLUMN]), int(record[Word.COLUMNS])
        source = int(record[Word.SOURCE])
        if source < 0:
            found = x[:, 2 * begin : 2 * (begin + count)]
        else:
            index = source + np.arange(len(x))[:, None] * int(record[Word.SOURCE_STRIDE]) + begin + np.arange(count)
            found = self.exchange[index].reshape(len(x), -1)
        assert not np.isnan(found).any(), "a step read what nobody has published"
        padded = np.zeros((len(x), int(record[Word.TILES]) * self.shape.cols))
        padded[:, : found.shape[1]] = found
        return padded

    def _next_tile(self, worker: int) -> Floats:
        lane = self.program.lanes[worker]
        row = int(lane[1]) + self.streamed[worker] * self.program.workers * 128
        assert self.streamed[worker] < lane[0]
        self.streamed[worker] += 1
        return self.tiles[row // 128].reshape(2, 64, 64)

    def _product(self, image: Floats, values: Floats, tile: int) -> Floats:
        a = np.concatenate((image[0], image[1]), axis=1)  # [64, 128]
        total = np.zeros((len(values), self.shape.rows))
        for q in range(self.shape.quarters):
            columns = values[:, tile * self.shape.cols + q * 128 :][:, :128]
            total += columns @ a[q * self.shape.rows : (q + 1) * self.shape.rows].T
        return total

    def _publish(self, record: npt.NDArray[np.int32], row: int, y: Floats, to_caller: bool, out: Floats) -> None:
        flags = int(record[Word.FLAGS])
        if flags & 3 == 3:
            y, row = self.function(y[:, 0::2]) * y[:, 1::2], row // 2
        elif flags & 1:
            y = self.function(y)
        if to_caller:
            out[:, row : row + y.shape[1]] = y
            return
        index = int(record[Word.TARGET]) + np.arange(len(y))[:, None] * int(record[Word.TARGET_STRIDE]) + row // 2
        self.exchange[index + np.arange(y.shape[1] // 2)] = y.reshape(len(y), -1, 2)
