"""How the engine chooses its decode path, and the self-check that a wave must pass before it is used."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kit.models.plain_wave import CPU, LOCATION
from kit.models.plain_wave import how as options_of
from kit.models.tiny_decoders import BASE, in_float32, random_model
from onewave.base.errors import CapacityError, InvalidArgumentError, UnsupportedError, WeightsError
from onewave.base.settings import Settings
from onewave.engine.arguments import EngineOptions
from onewave.engine.engine import Engine
from onewave.engine.load import sketches
from onewave.engine.load import wave as load_module
from onewave.engine.load.checkpoint import ModelParts, load_model
from onewave.engine.load.choices import choose_decode, resolve_load
from onewave.engine.load.load import load
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.self_check import follows_growth, self_check
from onewave.engine.load.wave import load_wave
from onewave.engine.params import SamplingParams
from onewave.engine.prompt.passes import PromptChunk
from onewave.engine.runner import ModelRunner
from onewave.engine.wave_decode import WaveDecoder, unsuited
from onewave.memory.kv_cache import KVCache
from onewave.models import decode_wave, llama_plan
from onewave.models.batch import Batch
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.wave.launch import launch
from onewave.wave.weights.pack import StreamMatrix, WeightStream

GPU = torch.device("cuda", 0)


class PlainStep:
    """A wave that is the plain forward pass, and may be broken on purpose."""

    def __init__(self, model: Llama, broken: str = ""):
        self.model, self.broken = model, broken
        self.steps = 0

    def bind_cache(self, kv: KVCache) -> None:
        self.kv = kv

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        if self.broken == "positions":
            positions = positions - 1
        self.before = self.kv.k.clone()
        logits = self.model.forward(Batch.decode(tokens, positions, slots), self.kv)
        if self.broken == "nothing new in the cache":
            self.kv.k[:] = self.before
        if self.broken == "cache":
            self.kv.v[1] *= 1.2
        if self.broken == "nan in the cache":
            block = self.kv.table_of(slots)[0, positions[0] // self.kv.block_size]
            self.kv.k[0, block, :, positions[0] % self.kv.block_size] = float("nan")
        self.steps += 1
        if self.broken == "one number, sometimes" and self.steps % 5 == 0:
            logits[-1, -1] += 1e-6
        return logits * float("nan") if self.broken == "nan" else logits


@pytest.fixture(scope="module")
def model() -> Llama:
    return in_float32(random_model(BASE))


@pytest.mark.parametrize("sequences", [1, 3, 5])
def test_a_step_that_agrees_passes_the_self_check(model: Llama, sequences: int) -> None:
    assert self_check(model, PlainStep(model), sequences) < 1e-6


@pytest.mark.parametrize(
    "broken", ["positions", "cache", "nothing new in the cache", "nan", "nan in the cache", "one number, sometimes"]
)
def test_a_step_that_is_wrong_anywhere_fails_the_self_check(model: Llama, broken: str) -> None:
    assert self_check(model, PlainStep(model, broken), 3) > 0.05
    assert broken == "positions" or not follows_growth(model, PlainStep(model, broken), 3, 0.05)


def test_what_does_not_suit_the_wave_is_refused_by_name(model: Llama) -> None:
    with pytest.raises(UnsupportedError, match="compute capability"):
        WaveDecoder(model, 1)


def test_auto_is_left_to_the_model_on_a_gpu_and_eager_on_a_cpu() -> None:
    assert choose_decode("auto", enforce_eager=False, device=GPU) == "auto"
    assert choose_decode("auto", enforce_eager=True, device=GPU) == "eager"
    assert choose_decode("auto", enforce_eager=False, device=CPU) == "eager"


@pytest.mark.parametrize("path", ["wave", "graph", "eager"])
def test_a_path_that_is_asked_for_is_taken_or_refused_never_replaced(path: str) -> None:
    assert choose_decode(path, enforce_eager=False, device=GPU) == path
    if path != "eager":
        with pytest.raises(UnsupportedError, match="CUDA GPU"):
            choose_decode(path, enforce_eager=False, device=CPU)
        with pytest.raises(InvalidArgumentError, match="enforce_eager"):
            choose_decode(path, enforce_eager=True, device=GPU)


def test_an_unknown_path_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidArgumentError, match="auto, wave, graph, eager"):
        choose_decode("fast", enforce_eager=False, device=CPU)


how = partial(options_of, max_num_seqs=3)


class PlainWave(PlainStep):
    """DecodeWave on a GPU that is not there: plain operators on whatever the model holds."""

    made: ClassVar[list["PlainWave"]] = []

    def __init__(self, model: Llama, *, batch: int, stream: WeightStream, broken: str = ""):
        super().__init__(model, broken)
        self.batch, self.stream, self.wave = batch, stream, self
        self.made.append(self)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        assert len(tokens) <= self.batch
        return super().__call__(tokens, positions, slots)

    def check(self) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CPU that passes for a GPU; what happened on it."""
    seen: list[str] = []

    def planned(*arguments: object, **named: object) -> object:
        seen.append("planned")
        return plan_decode(*arguments, **named)

    monkeypatch.setattr(launch, "runs_here", lambda device: True)
    monkeypatch.setattr(launch, "co_resident", lambda device: 3)
    monkeypatch.setattr(decode_wave, "DecodeWave", PlainWave)
    monkeypatch.setattr(llama_plan, "plan_decode", planned)
    monkeypatch.setattr(PlainWave, "made", [])
    return seen


@pytest.mark.parametrize("slots", [3, 4])
def test_a_wave_is_loaded_straight_into_its_stream_and_generates_what_the_plain_model_does(
    gpu: list[str], tmp_path: Path, slots: int
) -> None:
    """With a slot more than a launch has rows too, whose step is two launches."""
    model, wave = load_wave(LOCATION, BASE, how(tmp_path))
    (made,) = PlainWave.made
    assert made.batch == 3
    assert isinstance(model.weights.layers[0].qkv, StreamMatrix)
    assert model.weights.layers[0].qkv.stream is made.stream
    plain = load_model(
        LOCATION, BASE, LoadOptions(dtype=torch.float16, device=CPU, load_format="dummy", max_model_len=64)
    )
    found = []
    for network, step in ((model, wave), (plain, None)):
        runner = ModelRunner(network, max_num_seqs=slots, max_model_len=64, wave=step)
        assert runner.decode_path == ("wave" if step else "eager")
        engine = Engine(runner)
        requests = [
            engine.add(None, prompt, SamplingParams(max_tokens=8, temperature=0.0, detokenize=False))
            for prompt in ([5, 9, 80], [3], [44, 45, 46, 47, 48], [90, 2])
        ]
        while engine.has_work:
            engine.step()
        found.append([request.output().outputs[0].token_ids for request in requests])
    assert found[0] == found[1]


def test_the_second_load_finds_the_program_that_the_first_planned(gpu: list[str], tmp_path: Path) -> None:
    load_wave(LOCATION, BASE, how(tmp_path))
    load_wave(LOCATION, BASE, how(tmp_path))
    assert gpu == ["planned"]
    load_wave(LOCATION, BASE, how(tmp_path, max_num_seqs=1))
    assert gpu == ["planned", "planned"]


def test_unpacked_matrices_are_kept_until_something_else_needs_the_room(
    gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_wave(LOCATION, BASE, how(tmp_path))
    assert not PlainWave.made[0].stream.keeping  # a CPU has no memory of its own
    monkeypatch.setattr(load_module, "_has_room", lambda stream: True)
    model, wave = load_wave(LOCATION, BASE, how(tmp_path))
    stream = PlainWave.made[1].stream
    runner = ModelRunner(model, max_num_seqs=1, max_model_len=320, wave=wave)
    first = runner.prefill([PromptChunk(0, [3, 4, 5])])
    assert stream.keeping
    assert torch.equal(runner.prefill([PromptChunk(0, [3, 4, 5])]), first)
    failed: list[str] = []

    def full_once(right: Any, error: Exception) -> Any:
        def act(*arguments: Any, **named: Any) -> Any:
            if not failed:
                failed.append("prompt")
                raise error
            return right(*arguments, **named)

        return act

    monkeypatch.setattr(model, "forward", full_once(model.forward, torch.OutOfMemoryError("full")))
    assert torch.equal(runner.prefill([PromptChunk(0, [3, 4, 5])]), first)
    assert failed == ["prompt"]
    assert not stream.keeping
    failed.clear()  # and with nothing left to give back
    with pytest.raises(CapacityError, match="does not fit"):
        runner.prefill([PromptChunk(0, [3])])


@pytest.mark.parametrize(
    ("device", "decode", "rows"), [("cuda", "auto", (16, 3)), ("cuda", "graph", (40, 1)), ("cpu", "eager", (40, 1))]
)
def test_more_sequences_than_a_launch_holds_take_several(device: str, decode: str, rows: tuple[int, int]) -> None:
    asked = EngineOptions(max_num_seqs=40, decode=decode)
    found = resolve_load(asked, BASE, device=torch.device(device), decode=decode, settings=Settings.from_env())
    assert (found.max_num_seqs, found.launches) == rows


@pytest.mark.parametrize(
    ("quantization", "launches", "path"),
    [(None, 1, "wave"), (None, 2, "graph"), ("int8", 2, "graph"), ("int4", 2, "wave"), ("int4", 3, "graph")],
)
def test_auto_takes_launches_that_together_are_faster_than_graphs(
    gpu: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, quantization: str | None, launches: int, path: str
) -> None:
    options = options_of(tmp_path, quantization, max_num_seqs=3, launches=launches)
    assert (load("auto", LOCATION, BASE, options)[1] is not None) == (path == "wave")
    assert any("launches" in record.message for record in caplog.records) == (path == "graph")
    assert load("wave", LOCATION, BASE, options)[1] is not None  # named, it is taken


@pytest.mark.parametrize("path", ["auto", "wave"])
def test_a_wave_that_fails_its_check_is_replaced_by_graphs_in_one_line_or_refused(
    gpu: list[str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_wave, "DecodeWave", lambda *a, **k: PlainWave(*a, **k, broken="positions"))
    if path == "wave":
        with pytest.raises(UnsupportedError, match="self-check"):
            load(path, LOCATION, BASE, how(tmp_path))
        assert not caplog.records
        return
    model, wave = load(path, LOCATION, BASE, how(tmp_path))
    assert wave is None
    assert isinstance(model.weights.layers[0].qkv, Tensor)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "CUDA graphs" in record.getMessage()
    assert "self-check" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_gpu_that_does_not_suit_decodes_with_graphs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, wave = load("auto", LOCATION, BASE, how(tmp_path))
    assert wave is None
    assert "compute capability 9.0" in caplog.records[0].getMessage()
    load("graph", LOCATION, BASE, how(tmp_path))
    assert len(caplog.records) == 1


def test_a_broken_checkpoint_is_no_reason_to_decode_otherwise(
    gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ModelParts, index: int, name: str) -> Tensor:
        raise WeightsError("model.safetensors", got="cut short")

    monkeypatch.setattr(ModelParts, "matrix", broken)
    with pytest.raises(WeightsError, match="cut short"):
        load("auto", LOCATION, BASE, how(tmp_path))


def test_what_does_not_suit_is_known_before_anything_is_loaded(gpu: list[str], tmp_path: Path) -> None:
    assert unsuited(BASE, how(tmp_path, device=GPU, max_num_seqs=16)) is None
    assert "up to 16" in str(unsuited(BASE, how(tmp_path, device=GPU, max_num_seqs=17)))
    assert "float32" in str(unsuited(BASE, how(tmp_path, device=GPU, dtype=torch.float32)))
    with pytest.raises(UnsupportedError, match="up to 16"):
        load_wave(LOCATION, BASE, how(tmp_path, max_num_seqs=17))
    assert unsuited(replace(BASE, hidden_size=2112), how(tmp_path, device=GPU, max_num_seqs=16)) is None
    assert gpu == []


def test_packing_is_compiled_ahead_on_zeros_that_stay_zeros() -> None:
    program = plan_decode(DecodeStep(sketches.one_layer(BASE)), workers=3).program
    stream = sketches.BlankStream(program, torch.float16, CPU)
    sketches.compile_packing(stream)
    assert stream.tensor.shape == (128, 64)
    assert not stream.tensor.any()


@pytest.mark.parametrize("family", ["biases", "norms", "plain"])
def test_the_kernel_compiled_ahead_is_the_whole_models(family: str) -> None:
    config = replace(BASE, qkv_bias=family == "biases", qk_norm=family == "norms", intermediate_size=1216)
    small = sketches.one_layer(config)
    for batch in (1, 4, 16):
        programs = [plan_decode(DecodeStep(each, batch), workers=3).program for each in (small, config)]
        assert programs[0].constants == programs[1].constants
        stream = sketches.BlankStream(programs[0], torch.float16, CPU)
        sketch = decode_wave.attention_setup(
            sketches.sketch(small, stream), plan_decode(DecodeStep(small, batch), workers=3).groups
        )
        whole = random_model(config)
        setup = decode_wave.attention_setup(whole, plan_decode(DecodeStep(config, batch), workers=3).groups)
        for name in ("groups", "hidden", "eps", "scale"):
            assert getattr(sketch, name) == getattr(setup, name)
        for name in ("q_norm", "k_norm"):
            assert (getattr(sketch, name) is None) == (getattr(setup, name) is None)
        assert (sketch.biases.numel() > 1) == (setup.biases.numel() > 1)
