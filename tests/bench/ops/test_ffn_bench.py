"""`bench ops ffn`: which arrangements it measures on which shapes, and what it prints. The times here are made up."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.bench import ceilings, clock
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import summarize
from onewave.bench.counters import Counters
from onewave.bench.ops import ffn as bench
from onewave.bench.ops import ffn_counters
from onewave.bench.ops.ffn import PRODUCTS, SHAPES, SWEEP, FFNResult, FFNShape, measure_ffn
from onewave.bench.ops.ffn_counters import CountedFFN
from onewave.cli.bench.operators.ffn import bench_ffn, count_ffn
from onewave.cli.bench.report import Results
from onewave.ops.ffn.chain import launch as chain_impl
from onewave.ops.ffn.chain.plan import plan_chain
from onewave.ops.ffn.reference import ffn as in_torch
from onewave.ops.ffn.sizes import FFNSizes

CPU = torch.device("cpu")


class Made:
    """Stands for a packed block or a launch for many rows."""

    compact, weight_bytes = True, 1000

    def __init__(self, backend: str, activation: str | None = "silu"):
        self.backend, self.checks, self.outs = backend, 0, []
        self.plan = plan_chain(FFNSizes(64, 64, 128, 64, False), workers=2, streams=backend == "streams")

    def __call__(self, *given: Any) -> None:
        self.outs.append(given)

    def check(self) -> None:
        self.checks += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Made]]:
    found: dict[str, list[Made]] = {"wave": [], "chain": [], "streams": []}

    def make(backend: str) -> Made:
        found[backend].append(Made(backend))
        return found[backend][-1]

    def timed(runs: list[Callable[[], object]], *given: Any, **more: Any) -> Any:
        for run in runs:
            run()
        return summarize([float(len(runs))])

    monkeypatch.setattr(bench, "runs_here", lambda device: True)
    monkeypatch.setattr(bench, "pack_ffn", lambda *given, **more: make("wave"))
    monkeypatch.setattr(chain_impl, "chain", lambda *given, streams, **more: make("streams" if streams else "chain"))
    monkeypatch.setattr(clock, "time_calls", timed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(bench, "_BYTES_IN_ROTATION", 100_000)
    return found


def test_few_rows_are_measured_in_all_arrangements_and_many_in_all_but_the_wave(made: dict[str, list[Made]]) -> None:
    results = measure_ffn(FFNShape(64, 64, 128), CPU, torch.float32, reps=1)
    names = [result.implementation for result in results]
    assert [name.split(",")[0] for name in names] == ["wave", "chain", "streams", "cuBLAS"]
    assert names[1] == "chain, skewed, row, 64x128"
    # Weights of 32 KiB, 100 kB in rotation: four of each, and one plan for all.
    assert len(made["wave"]) == 4
    assert len(made["chain"]) == len(made["streams"]) == 1
    # To see how long it takes, and then its turn.
    assert len(made["chain"][0].outs) == 2 * 4
    assert all(each.checks == 1 for kind in made.values() for each in kind)
    results = measure_ffn(FFNShape(65, 64, 128, gated=True), CPU, torch.float32, reps=1)
    assert [r.implementation.split(",")[0] for r in results] == ["chain", "streams", "cuBLAS", "cuBLAS"]
    assert "gate and up in one" in results[2].implementation
    x, up, down, gate = made["chain"][1].outs[0]
    assert gate.shape == up.shape
    assert in_torch(x, up, down, gate, "silu").shape == (65, 64)
    assert all(result.speedup == pytest.approx(1.0) for result in results)


def test_rates_and_ledger_lines_count_what_the_bound_is_in() -> None:
    many = FFNResult(FFNShape(4096, gated=True), "chain", summarize([2e-3]), 3e-3)
    assert many.shape.flops == 2 * 4096 * 4096 * 14336 * 3
    assert many.speedup == pytest.approx(1.5)
    ceiling = Ceiling("bf16 matmul", 800.0, "TFLOP/s", "a test", summarize([800.0]))
    line = many.measurement("bfloat16", ceiling)
    assert line.extra["ceiling_share"] == pytest.approx(many.shape.flops / 2e-3 / 800e12)
    assert line.extra["times_as_fast_as_products"] == pytest.approx(1.5)


def test_the_sweep_holds_the_notes_case_and_every_power_of_two_up_to_32768() -> None:
    assert SWEEP[0] == FFNShape(16, 4096, 14336)
    for gated in (False, True):
        assert [s.rows for s in SWEEP[1:] if s.gated is gated] == [64 << i for i in range(10)]
    assert max(s.rows for s in SHAPES) == 64


def test_the_command_reads_shapes_and_prints_a_line_an_arrangement(
    made: dict[str, list[Made]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[FFNShape] = []

    def measured(shape: FFNShape, *given: Any, **more: Any) -> list[FFNResult]:
        asked.append(shape)
        return [FFNResult(shape, name, summarize([t]), 2e-3) for name, t in (("chain", 1e-3), (PRODUCTS, 2e-3))]

    monkeypatch.setattr(bench, "measure_ffn", measured)
    for name, unit in (("read_bandwidth", "GB/s"), ("matmul_rate", "TFLOP/s")):
        made_up = Ceiling(name, 1000.0, unit, "a test", summarize([1000.0]))
        monkeypatch.setattr(ceilings, name, lambda device, made_up=made_up: made_up)
    options = {"device": CPU, "dtype": torch.bfloat16, "reps": 1}
    bench_ffn("ffn", ["sweep", "100,64,128,gated"], out=Results(as_json=True), **options)
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert asked == [*SWEEP, FFNShape(100, 64, 128, gated=True)]
    assert len(trials) == 2 * len(asked)
    bench_ffn("ffn", ["4096,4096,14336"], out=Results(), **options)
    printed = capsys.readouterr().out
    assert "2.00" in printed
    assert "matmul_rate ceiling 1000" in printed


@pytest.mark.parametrize("text", ["8,4096", "8,4096,gated", "0,64,64", "sweep,gated", "a,b,c", "8,64,64,on", ",gated"])
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="rows,hidden,intermediate"):
        bench_ffn("ffn", [text], device=CPU, dtype=torch.bfloat16, reps=1, out=Results())


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "read_bandwidth", SimpleNamespace())
    with pytest.raises(UnsupportedError, match="compute capability"):
        bench_ffn("ffn", None, device=CPU, dtype=torch.bfloat16, reps=1, out=Results())


def test_counters_print_bytes_over_the_least_and_hits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def counted(shapes: list[FFNShape], *given: Any, reps: int, **_: object) -> list[CountedFFN]:
        asked.append(reps)
        return [CountedFFN(shape, "chain", (Counters(3.0 * shape.least_bytes, 0.0, 0.625),)) for shape in shapes]

    monkeypatch.setattr(ffn_counters, "count_ffn", counted)
    options = {"device": CPU, "dtype": torch.bfloat16}
    count_ffn("ffn", ["16,4096,14336"], reps=20, out=Results(), **options)
    printed = capsys.readouterr().out
    assert "3.00" in printed
    assert "62.5%" in printed
    count_ffn("ffn", ["16,4096,14336"], reps=2, out=Results(as_json=True), **options)
    assert json.loads(capsys.readouterr().out)["counted"][0]["l2_hit_rate"] == 0.625
    assert asked == [3, 2]
