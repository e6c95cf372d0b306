"""The wave kernel's own source, executed in NumPy: the feed-forward block and whole decode steps."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onewave.ops.ffn.plan import FFNSizes, plan_ffn
from onewave.ops.ffn.reference import ffn as in_torch
from onewave.wave.layout import TileShape
from onewave.wave.pack import Weight, pack_stream
from onewave.wave.program import WaveProgram

sys.path.insert(0, str(Path(__file__).parent))
from gluon_in_numpy import Descriptor, Memory, Pointer, launch


class Bench:
    """A program's buffers in the simulated device's memory, kept from launch to launch."""

    def __init__(self, program: WaveProgram, stream: Tensor, **constants: Any):
        self.program, self.memory = program, Memory(1 << 25)
        put = self.memory.put
        exchange = np.full(64 + 2 * program.set_words, -1, dtype=np.int32)
        exchange[:64] = 0
        steps = np.concatenate((program.steps, np.zeros((1, program.steps.shape[1]), dtype=np.int32)))
        waits = program.waits if program.waits.size else np.zeros((1, 2), dtype=np.int32)
        shape: TileShape = program.shape
        self.arguments: dict[str, Any] = {
            "weights": Descriptor(stream.numpy()),
            "steps": put(steps),
            "lanes": put(program.lanes),
            "exchange": put(exchange),
            "waits": put(waits),
            "counters": put(np.zeros(max(1, len(program.totals)), dtype=np.int32)),
            "totals": put(program.totals if program.totals.size else np.zeros(1, dtype=np.int32)),
            "epochs": put(np.zeros(program.workers, dtype=np.int32)),
            "watch": put(np.zeros(16 + 8 * program.workers, dtype=np.int32)),
            "trace": put(np.zeros(4, dtype=np.int32)),
            "row_step": program.workers * 128,
            "set_words": program.set_words,
            "skipped": -1,
            "DTYPE": np.float16,
            "NB": shape.batch,
            "R": shape.rows,
            "S": shape.ring,
            "XS": shape.slots,
            "PC": shape.chunk,
            "SPLITS": 1 << (program.most_splits - 1).bit_length(),
            "ACT": 1,
            "GATED": True,
            "SYNC": 0,
            "FLIGHT": 3,
            "TEST": 0,
            "TRACE": 0,
            "XW": 8,
            "XREGS": 0,
            "D": 0,
            "GP": 1,
            "KSPLITS": 1,
            "QKNORM": False,
            "EPS": 1e-5,
            "SCALE": 1.0,
        } | constants

    def run(self, source: Pointer, source_stride: int, out: Pointer, out_stride: int, batch: int, **more: Any) -> None:
        places = more.pop("places", out)
        given = {"tokens": out, "positions": out, "slots": out, "places": places} | more
        given |= {"source": source, "source_stride": source_stride, "out": out, "out_stride": out_stride}
        delays = given.pop("delays", lambda: None)
        launch(self.memory, self.program.workers, self.arguments | given | {"batch": batch}, delays)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def words(values: Tensor) -> np.ndarray:
    return values.contiguous().numpy().view(np.int32)


@pytest.mark.parametrize(
    ("batch", "order", "policy", "workers"),
    [(1, "row", "data", 3), (3, "half_row", "data", 2), (8, "row", "tile", 3), (16, "row", "data", 2)],
)
def test_the_kernels_source_computes_the_block_launch_after_launch(
    batch: int, order: str, policy: str, workers: int
) -> None:
    sizes = FFNSizes(1 << (batch - 1).bit_length(), 192, 1088, 128, True)
    up, gate = ((randn(1088, 192, seed=seed) / 14).half() for seed in (1, 2))
    down = (randn(128, 1088, seed=3) / 33).half()
    plan = plan_ffn(sizes, workers=workers, order=order, policy=policy)
    program = plan.programs[0]
    stream = pack_stream(program, {"up": Weight((gate, up)), "down": Weight((down,))}, torch.device("cpu"))
    bench = Bench(program, stream, SYNC=int(policy != "data"))
    for seed in range(3):
        x = randn(batch, 192, seed=10 + seed).half()
        out = bench.memory.put(np.full((batch, 64), -1, dtype=np.int32))
        bench.run(bench.memory.put(words(x)), 96, out, 64, batch)
        found = torch.from_numpy(bench.memory.get(out, (batch, 64)).view(np.float16)).double()
        expected = in_torch(x.double(), up.double(), down.double(), gate.double(), "silu")
        assert (found - expected).abs().max() < 3e-3 * expected.abs().max()


def test_delays_at_random_places_change_no_bit() -> None:
    sizes = FFNSizes(4, 128, 576, 64, False)
    up, down = (randn(576, 128, seed=1) / 11).half(), (randn(64, 576, seed=2) / 24).half()
    program = plan_ffn(sizes, workers=4, order="half_row").programs[0]
    stream = pack_stream(program, {"up": Weight((up,)), "down": Weight((down,))}, torch.device("cpu"))
    bench = Bench(program, stream, GATED=False, TEST=2)
    x = bench.memory.put(words(randn(4, 128, seed=3).half()))
    dice = random.Random(5)
    results = []
    for _ in range(4):
        out = bench.memory.put(np.zeros((4, 32), dtype=np.int32))
        bench.run(x, 64, out, 32, 4, delays=lambda: time.sleep(dice.random() * 0.01))
        results.append(bench.memory.get(out, (4, 32)))
    assert all(np.array_equal(result, results[0]) for result in results)
