"""A program's buffers on the simulated device (gluon_in_numpy), and launches of it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kit.numpy_gpu.gluon_in_numpy import Descriptor, Fault, Matrix, Memory, Pointer, launch
from kit.numpy_gpu.numpy_memory import DTYPES, as_numpy
from onewave.base.weight_formats import WeightFormat
from onewave.wave.plan.layout import STEP_WORDS, TOGETHER
from onewave.wave.plan.program import WaveProgram


class Bench:
    """A program's buffers in the simulated device's memory, kept from launch to launch. lists: of compact weights.
    form: of weights below 16 bits."""

    def __init__(
        self,
        program: WaveProgram,
        stream: Tensor,
        lists: Tensor | None = None,
        form: WeightFormat | None = None,
        **constants: Any,
    ):
        self.program, self.memory = program, Memory(1 << 26)
        self.planted: list[Fault] = []
        put = self.memory.put
        exchange = np.full(2 * program.set_words, -1, dtype=np.int32)
        rows = np.pad(program.steps, ((1, 0), (0, 0)))  # the first one: a launch's places
        self.records = put(rows)
        waits = program.waits if program.waits.size else np.zeros((1, 2), dtype=np.int32)
        tiles, images = as_numpy(stream), program.shape.images
        self.arguments: dict[str, Any] = {
            "weights": Descriptor(tiles, program.shape.tile_rows if form is None else form.box_rows * images),
            "lasts": Descriptor(tiles, 0 if form is None else form.copied_rows * images),
            "lists": None if lists is None else Descriptor(lists.numpy(), 1),
            "slack": put(program.slack),
            "slack_words": program.slack.shape[1],
            "tasks": put(program.key_tasks),
            "task_words": program.key_tasks.shape[1],
            "keys": None,  # of a decode step that streams them
            "values": None,
            "records": Matrix(self.memory, self.records, rows.shape, (TOGETHER, STEP_WORDS)),
            "steps": self.records + STEP_WORDS,
            "lanes": put(program.lanes),
            "exchange": put(exchange),
            "waits": put(waits),
            "counters": put(np.zeros(max(1, len(program.totals)), dtype=np.int32)),
            "totals": put(program.totals if program.totals.size else np.zeros(1, dtype=np.int32)),
            "epochs": put(np.zeros(program.workers, dtype=np.int32)),
            "watch": put(np.zeros(16 + 8 * program.workers, dtype=np.int32)),
            "trace": put(np.zeros(4, dtype=np.int32)),
            "row_step": program.workers * program.shape.tile_rows,
            "set_words": program.set_words,
            "skipped": -1,
            "DTYPE": DTYPES[stream.dtype],
            "FORMAT": 0 if form is None else form.number,
            **program.constants,
            **dict.fromkeys(("SYNC", "TEST", "TRACE", "XREGS", "LREGS", "MREGS", "D", "PAGE", "STREAMS", "KV"), 0),
            **dict.fromkeys(("ACT", "GP", "CH", "KSPLITS"), 1),
            "FLIGHT": 3,
            "XW": 8,
            "QKNORM": False,
            "EPS": 1e-5,
            "SCALE": 1.0,
            "MULTIPLIERS": program.shape.multipliers,
        } | constants

    def run(self, source: Pointer, source_stride: int, out: Pointer, out_stride: int, batch: int, **more: Any) -> None:
        if "places" in more:
            self.memory.set(self.records, np.array(more.pop("places"), dtype=np.int64).view(np.int32))
        given = {"tokens": out, "positions": out, "slots": out} | more
        given |= {"source": source, "source_stride": source_stride, "out": out, "out_stride": out_stride}
        delays = given.pop("delays", lambda: None)
        arguments = self.arguments | given | {"batch": batch}
        launch(self.memory, self.program.workers, arguments, delays, planted=self.planted)
        made = self.memory.get(self.arguments["epochs"], (self.program.workers,))
        assert len(set(made.tolist())) == 1, "blocks that do not agree on how many launches there were"
        if not self.arguments["SYNC"]:
            size = self.program.set_words
            whole = self.memory.get(self.arguments["exchange"], (2 * size,))
            following = whole.reshape(2, size)[int(made[0]) & 1]
            # Whatever an earlier launch left there would be taken for the next one's data.
            left = [r.name for r in self.program.regions if (following[r.first :][: r.words] != -1).any()]
            assert not left, f"a launch left words in the next one's set: {left}"


def words(values: Tensor) -> np.ndarray:
    return values.contiguous().view(torch.int32).numpy()
