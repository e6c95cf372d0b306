"""The wave kernel's own source, executed in NumPy: the feed-forward block and whole decode steps."""

import random
import time

import numpy as np
import pytest
import torch

from kit.lanes import slow
from kit.numpy_gpu.simulated_device import Bench, words
from kit.operands.random import randn
from onewave.base.weight_formats import COMPACT
from onewave.ops.ffn.reference import ffn as in_torch
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.plan import plan_ffn
from onewave.wave.plan.operations import OUTPUT
from onewave.wave.plan.steps import Place
from onewave.wave.weights.pack import Weight, WeightStream, pack_stream


@pytest.mark.parametrize(
    ("batch", "order", "policy", "workers", "inner", "gated"),
    [
        (1, "row", "data", 7, 1088, True),
        (2, "sm_local", "data", 4, 64, True),
        (3, "half_row", "data", 2, 1088, True),
        (3, "sequential", "data", 1, 192, True),
        (8, "row", "tile", 3, 1088, True),
        (16, "row", "data", 2, 1088, False),
        (16, "sm_local", "data", 4, 128, True),
        (32, "half_row", "data", 5, 1088, True),
        (64, "row", "data", 3, 1088, True),
    ],
)
def test_the_kernels_source_computes_the_block_launch_after_launch(
    batch: int, order: str, policy: str, workers: int, inner: int, gated: bool
) -> None:
    sizes = FFNSizes(1 << (batch - 1).bit_length(), 192, inner, 128, gated)
    up, gate = ((randn(inner, 192, seed=seed) / 14).half() for seed in (1, 2))
    down = (randn(128, inner, seed=3) / inner**0.5).half()
    plan = plan_ffn(sizes, workers=workers, order=order, policy=policy)
    weights = {"up": Weight((gate, up) if gated else (up,)), "down": Weight((down,))}
    streams = [pack_stream(program, weights, torch.device("cpu")).tensor for program in plan.programs]
    benches = [
        Bench(program, stream, SYNC=int(policy != "data"), GATED=gated)
        for program, stream in zip(plan.programs, streams, strict=True)
    ]
    # As many sequences as there is room for, fewer, and as many again: nothing of the first launch may be left over.
    for seed, rows in enumerate((batch, 1, batch, 1, 1, batch)):
        x = randn(rows, 192, seed=10 + seed).half()
        values = words(x)
        for bench, graph in zip(benches, plan.graphs, strict=True):  # two launches in sequential order
            width = graph.tensors[OUTPUT].shape[1] // 2
            out = bench.memory.put(np.full((rows, width), -1, dtype=np.int32))
            bench.run(bench.memory.put(values), values.shape[1], out, width, rows)
            values = bench.memory.get(out, (rows, width))
        found = torch.from_numpy(values.view(np.float16)).double()
        expected = in_torch(x.double(), up.double(), down.double(), gate.double() if gated else None, "silu")
        assert (found - expected).abs().max() < 3e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("batch", "hidden", "inner", "splits", "tile", "places"),
    [
        (16, 512, 2560, (1, 2), (64, 256), 4),  # tall tiles, five and ten a row block
        slow(16, 512, 1536, (1, 1), (32, 512), 2),
        (16, 448, 3136, (1, 2), (64, 128), 4),  # tiles of one operand, the last one not full
        slow(32, 512, 2560, (1, 2), (64, 256), 3),
        (8, 1024, 2048, (1, 1), (16, 1024), 2),
    ],
)
def test_the_block_on_compact_weights_is_the_block(
    batch: int, hidden: int, inner: int, splits: tuple[int, int], tile: tuple[int, int], places: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # A GPU of four SMs has as many row blocks of the second product as one of 128 has of a large one.
    monkeypatch.setattr("onewave.wave.plan.slices.NUM_SMS", 4)
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SUM", 0)
    sizes = FFNSizes(batch, hidden, inner, 128, True)
    up, gate = ((randn(inner, hidden, seed=seed) / hidden**0.5).bfloat16() for seed in (1, 2))
    down = (randn(128, inner, seed=3) / inner**0.5).bfloat16()
    up[3, 5] *= 2.0**-60  # a number that thirteen bits do not reach
    plan = plan_ffn.__wrapped__(sizes, workers=3, compact=True)
    shape = plan.programs[0].shape
    assert (plan.splits, (shape.rows, shape.cols), shape.slots) == (splits, tile, places)
    stream = WeightStream(plan.programs[0], torch.bfloat16, torch.device("cpu"), COMPACT)
    for name, weight in {"up": Weight((gate, up)), "down": Weight((down,))}.items():
        stream.put(name, weight)
    assert stream.reached
    bench = Bench(plan.programs[0], stream.tensor, stream.lists, COMPACT)
    launch_places = [0] * 16
    launch_places[Place.SCALES] = int(bench.memory.put(stream.scales.numpy()).address)
    for seed, rows in enumerate((batch, 1, batch)):
        x = randn(rows, hidden, seed=10 + seed).bfloat16()
        out = bench.memory.put(np.full((rows, 64), -1, dtype=np.int32))
        bench.run(bench.memory.put(words(x)), hidden // 2, out, 64, rows, places=launch_places)
        found = torch.from_numpy(bench.memory.get(out, (rows, 64))).view(torch.bfloat16).double()
        expected = in_torch(x.double(), up.double(), down.double(), gate.double(), "silu")
        assert (found - expected).norm() < 8e-3 * expected.norm()


@pytest.mark.parametrize("columns", [192, 1088, 2112, 4160])  # 1, 2, 3 and 5 tiles a row block
def test_tiles_held_in_registers_change_no_bit(columns: int) -> None:
    sizes = FFNSizes(1, columns, 192, 64, True)
    up, gate = ((randn(192, columns, seed=seed) / columns**0.5).half() for seed in (1, 2))
    down = (randn(64, 192, seed=3) / 14).half()
    program = plan_ffn(sizes, workers=3, order="row").programs[0]
    stream = pack_stream(program, {"up": Weight((gate, up)), "down": Weight((down,))}, torch.device("cpu")).tensor
    x, results = randn(1, columns, seed=4).half(), []
    for held in (0, 2, 4):
        bench = Bench(program, stream, HELD=held)
        out = bench.memory.put(np.full((1, 32), -1, dtype=np.int32))
        bench.run(bench.memory.put(words(x)), columns // 2, out, 32, 1)
        results.append(bench.memory.get(out, (1, 32)))
    assert all(np.array_equal(result, results[0]) for result in results)
    expected = in_torch(x.double(), up.double(), down.double(), gate.double(), "silu")
    assert (torch.from_numpy(results[0].view(np.float16)).double() - expected).abs().max() < 3e-3 * expected.abs().max()


def test_delays_at_random_places_change_no_bit() -> None:
    sizes = FFNSizes(4, 128, 576, 64, False)
    up, down = (randn(576, 128, seed=1) / 11).half(), (randn(64, 576, seed=2) / 24).half()
    program = plan_ffn(sizes, workers=4, order="half_row").programs[0]
    stream = pack_stream(program, {"up": Weight((up,)), "down": Weight((down,))}, torch.device("cpu")).tensor
    bench = Bench(program, stream, GATED=False, TEST=2)
    x = bench.memory.put(words(randn(4, 128, seed=3).half()))
    dice = random.Random(5)
    results = []
    for _ in range(4):
        out = bench.memory.put(np.zeros((4, 32), dtype=np.int32))
        bench.run(x, 64, out, 32, 4, delays=lambda: time.sleep(dice.random() * 0.01))
        results.append(bench.memory.get(out, (4, 32)))
    assert all(np.array_equal(result, results[0]) for result in results)
