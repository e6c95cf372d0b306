"""`quantization=`: checked first, carried to whatever holds the weights, and said where it saves nothing."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models import plain_wave
from kit.models.plain_wave import LOCATION, PlainWave, how, tokens_of
from kit.models.tiny_decoders import BASE
from onewave.base.errors import CapacityError, InvalidArgumentError, UnsupportedError
from onewave.base.weight_formats import ROUNDINGS
from onewave.engine.llm import LLM
from onewave.engine.load import rounded
from onewave.engine.load.load import load
from onewave.engine.load.wave import load_wave
from onewave.models.batch import Batch
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.ops.linear import linear
from onewave.wave.weights.pack import StreamMatrix

planned = plain_wave.planned  # a fixture
BOTH = pytest.mark.parametrize("name", ROUNDINGS)


@BOTH
def test_a_wave_and_plain_operators_generate_the_same_of_the_same_rounded_weights(
    planned: list[Any], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, wave = load_wave(LOCATION, BASE, how(tmp_path, name))
    assert planned == [ROUNDINGS[name]]
    (made,) = PlainWave.made
    assert made.stream.images.dtype is torch.uint8
    assert isinstance(model.weights.head, StreamMatrix)
    assert not caplog.records
    plain, none = load("eager", LOCATION, BASE, how(tmp_path, name))
    assert none is None
    assert isinstance(plain.weights.head, Tensor)
    (record,) = caplog.records
    packed = "only the wave, and a CPU in float32, hold them packed"
    assert record.getMessage() == f"{name} weights are kept in float16: {packed}"
    assert tokens_of(model, wave) == tokens_of(plain, None)
    assert tokens_of(plain, None) != tokens_of(load("eager", LOCATION, BASE, how(tmp_path, None))[0], None)


def test_a_program_for_bytes_is_none_for_16_bits_and_serves_both_roundings_of_many_sequences(
    planned: list[Any], tmp_path: Path
) -> None:
    for name in (None, "int8", None, "fp8", "int8"):
        load_wave(LOCATION, BASE, how(tmp_path, name, max_num_seqs=8))
    assert planned == [None, ROUNDINGS["int8"]]
    for name in ("int8", "fp8", "int8"):
        load_wave(LOCATION, BASE, how(tmp_path, name, max_num_seqs=1))
    assert planned[2:] == [ROUNDINGS["int8"], ROUNDINGS["fp8"]]
    assert len(list((tmp_path / "wave").glob("*.program"))) == 4


def test_a_cpu_rounds_float32_weights_too(tmp_path: Path) -> None:
    model, _ = load("eager", LOCATION, BASE, how(tmp_path, "int8", dtype=torch.float32))
    values = linear(torch.eye(BASE.hidden_size), model.weights.layers[0].qkv).T
    steps = values / (values.abs().amax(1, keepdim=True) / 127)
    assert (steps - steps.round()).abs().max() < 1e-4


@pytest.mark.parametrize("name", [*ROUNDINGS, "w8a8", "fp8-w8a8"])
def test_on_a_cpu_a_rounded_models_rows_do_not_see_their_batch(name: str, tmp_path: Path) -> None:
    model, _ = load("eager", LOCATION, BASE, how(tmp_path, name, dtype=torch.float32))
    kv = model.new_cache(num_slots=5, capacity=4)
    kv.k.zero_()
    kv.v.zero_()
    given = torch.arange(5) + 7, torch.arange(5) % 3, torch.arange(5)
    together = model.forward(Batch.decode(*given), kv)
    for row in range(5):
        alone = model.forward(Batch.decode(*(tensor[row : row + 1] for tensor in given)), kv)
        assert torch.equal(alone[0], together[row])


def test_weights_that_leave_no_room_to_round_them_are_a_capacity_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(rounded, "round_weights", full)
    with pytest.raises(CapacityError, match="weights of tiny: rounding them does not fit on cpu"):
        load("eager", LOCATION, BASE, how(tmp_path, "int8"))


@BOTH
def test_the_bytes_that_a_step_reads_are_those_of_its_path(planned: list[Any], name: str, tmp_path: Path) -> None:
    from onewave.bench.engine.latency import decode_weight_bytes

    model, _ = load_wave(LOCATION, BASE, how(tmp_path, name))
    plain, _ = load("eager", LOCATION, BASE, how(tmp_path, name))
    whole = decode_weight_bytes(plain.weights)
    rows = 2 * (256 + 128 + 2 * 192 + 128) + 131
    matrices = 2 * 128 * (256 + 128 + 2 * 192 + 192) + 131 * 128
    packed = int(matrices * ROUNDINGS[name].weight_bytes)
    assert decode_weight_bytes(model.weights, unpacked=True) == whole
    assert decode_weight_bytes(model.weights) == whole - 2 * matrices + packed + 4 * rows


@pytest.mark.parametrize("wrong", ["int3", "", 8, ["int8"]])
def test_an_unknown_quantization_is_refused_before_anything_is_loaded(wrong: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"quantization: {re.escape(repr(wrong))}; .*fp8, int4, w8a8, fp8-w8a8 or None"
    ):
        LLM("no-such-model", quantization=wrong)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"model": None}, "model: None; allowed: a directory"),
        ({"model": 5}, "model: 5; allowed: a directory"),
        ({"tokenizer": 5}, "tokenizer: 5; allowed: a directory"),
        ({"enforce_eager": "no"}, "enforce_eager: 'no'; allowed: True or False"),
        ({"progress": "no"}, "progress: 'no'; allowed: True or False"),
        ({"enforce_eager": None}, "enforce_eager: None; allowed: True or False"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_by_name(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=complaint):
        LLM(**{"model": "no-such-model", **options})


def test_planning_bytes_changes_no_sum(tmp_path: Path) -> None:
    """Row blocks, slices and splits are those of 16-bit weights: only the rounding makes a difference."""
    for batch in (1, 4, 16):
        plans = [plan_decode(DecodeStep(BASE, batch, form), workers=3) for form in (None, ROUNDINGS["int8"])]
        assert plans[0].groups == plans[1].groups
        assert plans[0].program.regions == plans[1].program.regions
        assert plans[0].program.names == plans[1].program.names


def test_rounded_weights_that_are_wrong_are_refused_when_the_model_loads(
    planned: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(self: PlainWave, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return 1.12 * self.model.forward(Batch.decode(tokens, positions, slots), self.kv)

    monkeypatch.setattr(PlainWave, "__call__", scaled)
    with pytest.raises(UnsupportedError, match="self-check of the wave"):
        load_wave(LOCATION, BASE, how(tmp_path, "int8"))
