"""`bench wave` and `bench ops ffn` without a GPU: what they refuse, and what they count."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from kit.models.tiny_decoders import BASE, in_float32, random_model
from onewave.base.errors import CapacityError, InvalidArgumentError, UnsupportedError
from onewave.base.settings import Settings
from onewave.base.weight_formats import NIBBLES, SIX_BITS, GroupRounding
from onewave.bench import ceilings
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import summarize
from onewave.bench.engine import wave as bench
from onewave.bench.engine.compiled_step import compiled_step
from onewave.bench.engine.plans import rank_correlation
from onewave.bench.engine.random_codes import q4_k_m, random_codes
from onewave.bench.engine.wave import WaveCase, WaveResult, in_pages, measure_wave
from onewave.bench.ops.ffn import FFNResult, FFNShape, measure_ffn
from onewave.cli.bench import wave as bench_wave
from onewave.cli.bench.operators.ffn import bench_ffn
from onewave.cli.bench.report import Results
from onewave.cli.main import app
from onewave.engine.load import choices as engine_options
from onewave.engine.load import wave as load_module
from onewave.engine.load.options import LoadOptions
from onewave.gpu import compile_pool
from onewave.memory.kv_cache import KVCache
from onewave.models.batch import Batch
from onewave.models.config.read import load_config
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeStep, hand_offs, plan_program
from onewave.weights.fetch.sources import resolve

CPU = torch.device("cpu")
CEILING = Ceiling("read bandwidth", 4000.0, "GB/s", "a test", summarize([4000.0]))


def test_a_block_counts_each_matrix_once() -> None:
    assert FFNShape(1).weight_bytes == 2 * 2 * 4096 * 14336
    assert FFNShape(8, 64, 128, gated=True).weight_bytes == 3 * 2 * 64 * 128


def test_the_ledgers_lines_hold_the_time_and_the_share_of_the_ceiling() -> None:
    line = FFNResult(FFNShape(1), "wave", summarize([100e-6])).measurement("bfloat16", CEILING)
    assert line.summary.p50 == pytest.approx(100)
    assert line.extra["ceiling_share"] == pytest.approx(FFNShape(1).weight_bytes / 100e-6 / 4e12)
    step = WaveResult("wave", 1, 512, summarize([0.5e-3]), 2_000_000_000, 0.01).measurement("m", "bfloat16", CEILING)
    assert step.summary.p50 == pytest.approx(0.5)
    assert step.extra["ceiling_share"] == pytest.approx(1.0)
    assert step.extra["self_check"] == 0.01
    assert "page_size" not in step.extra
    assert "us_per_hop" not in step.extra
    # Half of the time goes to the bytes, a quarter of a millisecond to 80 hand-offs.
    step = WaveResult("wave", 1, 512, summarize([0.5e-3]), 1_000_000_000, hops=80).measurement("m", "bfloat16", CEILING)
    assert step.extra["us_per_hop"] == pytest.approx(250 / 80)
    step = WaveResult("wave, pages", 1, 512, summarize([1.0]), 1, page=64).measurement("m", "bfloat16", CEILING)
    assert step.extra["page_size"] == 64


def test_a_cache_in_pages_holds_what_the_plain_one_does() -> None:
    kv = KVCache(*(torch.randn(2, 3, 2, 64, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)))
    paged = in_pages(kv, 16)
    assert paged.block_table.dtype is torch.int32
    assert sorted(paged.block_table.flatten().tolist()) == list(range(12))
    for plain, pool in ((kv.k, paged.k), (kv.v, paged.v)):
        for slot in range(3):
            for key in range(64):
                page = int(paged.block_table[slot, key // 16])
                assert torch.equal(pool[:, page, :, key % 16], plain[:, slot, :, key])


def test_a_page_size_that_no_kernel_takes_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "wave", "--page-size", "48"])
    assert isinstance(result.exception, InvalidArgumentError)


class PlainWave:
    """In a wave's place, the plain step."""

    def __init__(self, model: Llama, *, batch: int, stream: object):
        self.model, self.wave, self.kv = model, self, model.new_cache(num_slots=batch, capacity=1)

    def check(self) -> None: ...

    def bind_cache(self, kv: KVCache) -> None:
        self.kv = kv

    def decode(self, tokens: Tensor, positions: Tensor, slots: Tensor, logits: Tensor) -> Tensor:
        return logits.copy_(self.model.forward(Batch.decode(tokens, positions, slots), self.kv))


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DecodeWave", PlainWave)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(bench, "self_check", lambda model, wave, batch: 0.0)


@pytest.mark.usefixtures("without_a_gpu")
def test_all_paths_are_timed_on_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "compiled_step", partial(compiled_step, backend="aot_eager"))
    notes: list[str] = []
    model = in_float32(random_model(BASE))
    said: list[str] = []
    results, _ = measure_wave(
        model,
        WaveCase(2, 5, compiled=True),
        reps=2,
        report=notes.append,
        show=lambda stage: said.append(stage.rpartition(": ")[2]),
        measured=lambda result: said.append("measured"),
    )
    assert [each.path for each in results] == ["wave", "graph", "torch.compile"]
    # Each is told before what the next one needs begins.
    assert said == [
        *("self-check", "wave", "measured", "unpacking the matrices", "graph", "measured"),
        *("torch.compile compiles", "torch.compile", "measured"),
    ]
    assert results[0].hops == 5 * model.config.num_layers
    assert results[2].difference < 1e-4
    assert len({each.step_bytes for each in results}) == 1
    # Every other layer reads its window's keys alone.
    windows = tuple(2 if layer % 2 else None for layer in range(model.config.num_layers))
    model.config = replace(model.config, layer_windows=windows)
    cut, _ = measure_wave(model, WaveCase(2, 5), reps=2)
    key = 2 * model.config.num_kv_heads * model.config.head_dim * model.dtype.itemsize
    assert results[0].step_bytes - cut[0].step_bytes == 2 * key * 3 * sum(window == 2 for window in windows)
    assert notes == []


@pytest.mark.usefixtures("without_a_gpu")
def test_a_compiler_that_fails_keeps_no_figure_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Llama, kv: KVCache, context: int) -> None:
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(bench, "compiled_step", fail)
    notes: list[str] = []
    model = in_float32(random_model(BASE))
    results, _ = measure_wave(model, WaveCase(1, 5, compiled=True), reps=2, report=notes.append)
    assert [each.path for each in results] == ["wave", "graph"]
    assert notes == ["torch.compile: no step, RuntimeError: no compiler"]


@pytest.mark.parametrize("failure", [UnsupportedError("memory", got="none left"), torch.OutOfMemoryError("CUDA")])
def test_a_case_that_fails_takes_no_other_with_it(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def measured(
        model: object, case: WaveCase, *, measured: Callable[[WaveResult], None], **_: object
    ) -> tuple[list[WaveResult], None]:
        begun.append(case.batch)
        if case.batch == 8:
            raise failure
        measured(WaveResult("wave", case.batch, case.context, summarize([1e-3]), 10**9))
        return [], None

    loaded = SimpleNamespace(model=None, stream=None)
    for place, name, instead in (
        (bench, "measure_wave", measured),
        (ceilings, "read_bandwidth", lambda _: CEILING),
        (engine_options, "choose_device", lambda _: torch.device("cuda")),
        (engine_options, "check_dtype_on", lambda *_: None),
        (bench_wave.report, "make_current", lambda _: None),
        (compile_pool, "processes", lambda count: nullcontext()),
        (load_module, "load_streamed", lambda *_: loaded),
    ):
        monkeypatch.setattr(place, name, instead)
    done = CliRunner().invoke(app, ["bench", "wave", "--batch-size", "1,8,2"])
    assert isinstance(done.exception, (UnsupportedError, CapacityError))
    assert "1.000" in done.stdout
    assert begun == [1, 8]
    done = CliRunner().invoke(app, ["bench", "wave", "--batch-size", "1,32"])
    assert isinstance(done.exception, UnsupportedError)
    assert "up to 16 sequences" in str(done.exception)
    assert begun == [1, 8]


def test_one_byte_weights_are_nothing_for_torch_compile() -> None:
    result = CliRunner().invoke(app, ["bench", "wave", "--torch-compile", "--quantization", "int8"])
    assert isinstance(result.exception, InvalidArgumentError)


def test_a_step_waits_five_times_a_layer_and_where_splits_are_combined() -> None:
    config = load_config(resolve("llama-3.2-1b", Settings.from_env(), load_format="dummy"))
    layers = config.num_layers
    # One split up to 256 cached keys; one sequence's output projection merges them all.
    assert hand_offs(DecodeStep(config), context=32768) == 5 * layers
    assert [hand_offs(DecodeStep(config, 8), context=context) for context in (256, 257)] == [5 * layers, 6 * layers]
    windowed = replace(config, layer_windows=(257,) * layers)
    assert hand_offs(DecodeStep(windowed, 8), context=4096) == 5 * layers


def test_without_a_gpu_both_say_what_they_need() -> None:
    with pytest.raises(UnsupportedError, match="compute capability"):
        measure_ffn(FFNShape(1), CPU, torch.bfloat16, reps=1)
    result = CliRunner().invoke(app, ["bench", "wave", "--device", "cpu"])
    assert isinstance(result.exception, UnsupportedError)


def test_a_shape_that_is_no_three_numbers_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="rows,hidden,intermediate"):
        bench_ffn("ffn", ["8,4096"], device=CPU, dtype=torch.bfloat16, reps=1, out=Results())


@pytest.mark.parametrize("form", [NIBBLES[128, False], None], ids=["int4", "q4_k_m"])
def test_random_codes_are_a_model_of_the_format(form: GroupRounding | None) -> None:
    form = form or q4_k_m(BASE)
    options = LoadOptions(torch.bfloat16, CPU, weight_format=form, max_model_len=64)
    program = plan_program(DecodeStep(BASE, 1, form), workers=3)
    made = random_codes(BASE, program, options)
    kv = made.model.new_cache(num_slots=1, capacity=64)
    logits = made.model.forward(Batch.prefill([(0, [5, 90, 3], 0)], CPU), kv)
    assert 0.01 < logits.std() < 100
    assert 0.01 < made.model.weights.layers[0].down.dense().float().std() < 0.03


def test_the_mix_of_q4_k_m_is_llama_cpps() -> None:
    wide = dict(q4_k_m(replace(BASE, num_layers=32, layer_windows=(None,) * 32)).widths)
    more = [*range(4), 6, 9, 12, 15, 18, 21, 24, 27, *range(28, 32)]
    widths = {"qkv": 2, "down": SIX_BITS}
    assert wide == {"head": SIX_BITS} | {f"{name}{layer}": widths[name] for layer in more for name in widths}
    assert isinstance(
        CliRunner().invoke(app, ["bench", "wave", "--quantization", "q4_k_m", "--compact"]).exception,
        InvalidArgumentError,
    )


@pytest.mark.parametrize(
    ("predicted", "measured", "found"),
    [
        ((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0), 1.0),
        ((1.0, 2.0, 3.0, 4.0), (8.0, 7.0, 6.0, 5.0), -1.0),
        ((1.0, 1.0, 2.0), (5.0, 6.0, 7.0), 0.866),  # alike to the model: the mean of their ranks
        ((1.0, 1.0, 1.0), (5.0, 6.0, 7.0), None),
        ((1.0, 2.0), (5.0, 6.0), None),
    ],
)
def test_ranks_of_predicted_and_measured_plans_are_correlated(
    predicted: tuple[float, ...], measured: tuple[float, ...], found: float | None
) -> None:
    results = [
        WaveResult("wave", 1, 512, summarize([seconds]), 1, predicted=guess)
        for guess, seconds in zip(predicted, measured, strict=True)
    ]
    assert rank_correlation(results) == (None if found is None else pytest.approx(found, abs=1e-3))
