"""One rounded model, whoever holds it: a stream of bytes, plain matrices, either decode path."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.models import plain_wave
from kit.models.plain_wave import how
from kit.models.tiny_decoders import BASE, DUMMY, LOCATION, STORED, in_float32, logits_of
from onewave.base.weight_formats import ROUNDINGS, Rounding
from onewave.engine.load.checkpoint import load_model, open_parts
from onewave.engine.load.load import load
from onewave.engine.load.rounded import pack_rounded, round_weights
from onewave.engine.load.rounding_cost import divergence
from onewave.engine.load.streamed import StreamedModel, stream_model
from onewave.engine.load.wave import load_wave
from onewave.models import llama_plan
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeStep, plan_decode

planned = plain_wave.planned  # a fixture
CPU = torch.device("cpu")
KEPT = {"int8": "G8", "fp8": "GF8", "int4": "Q4_0"}
BOTH = pytest.mark.parametrize("rounding", ROUNDINGS.values(), ids=list(ROUNDINGS))


def plain_model(config: ModelConfig, rounding: Rounding | None) -> Llama:
    found = load_model(LOCATION, config, DUMMY)
    if rounding is not None:
        found.weights = round_weights(found.weights, rounding)
    return found


def streamed(config: ModelConfig, rounding: Rounding) -> StreamedModel:
    program = plan_decode(DecodeStep(config, 1, rounding), workers=3).program
    with open_parts(LOCATION, config, DUMMY) as parts:
        return stream_model(parts, config, program, replace(DUMMY, weight_format=rounding))


@BOTH
@pytest.mark.parametrize("family", STORED)
def test_a_stream_of_bytes_and_plain_matrices_give_the_same_bits(family: str, rounding: Rounding) -> None:
    config = STORED[family]
    expected = logits_of(plain_model(config, rounding))
    found = logits_of(streamed(config, rounding).model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_tiles_of_two_operands_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    small = streamed(BASE, ROUNDINGS["int8"])
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", 100.0)
    large = streamed(BASE, ROUNDINGS["int8"])
    assert (small.stream.shape.images, large.stream.shape.images) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(logits_of(small.model), logits_of(large.model), strict=True))


@BOTH
@pytest.mark.parametrize("family", STORED)
def test_the_rounded_model_is_near_the_whole_one_but_not_it(family: str, rounding: Rounding) -> None:
    whole = logits_of(in_float32(plain_model(STORED[family], None)))
    found = logits_of(plain_model(STORED[family], rounding))
    for mine, exact in zip(found, whole, strict=True):
        error = float((mine - exact).norm() / exact.norm())
        assert 1e-3 < error < {"int8": 0.03, "fp8": 0.12, "int4": 0.4}[rounding.name]


@BOTH
def test_the_tied_embedding_keeps_its_values_beside_a_rounded_head(rounding: Rounding) -> None:
    config = STORED["tied tables"]
    embedding = plain_model(config, None).weights.embedding
    for model in (plain_model(config, rounding), streamed(config, rounding).model):
        assert torch.equal(model.weights.embedding, embedding)
        assert model.weights.head is not model.weights.embedding
        assert bool((model.weights.norm == 1).all())


def test_a_stream_of_bytes_holds_half_of_what_16_bits_take() -> None:
    made = streamed(BASE, ROUNDINGS["int8"])
    plain = plan_decode(DecodeStep(BASE), workers=3).program
    assert made.stream.images.nbytes * 2 == plain.stream_tiles * plain.shape.tile_bytes
    assert made.stream.scales.nbytes < made.stream.images.nbytes / 20


@BOTH
def test_a_cpu_keeps_the_rounded_model_as_blocks_of_the_same_values(rounding: Rounding) -> None:
    blocks, dense = (load_model(LOCATION, BASE, replace(DUMMY, dtype=torch.float32)) for _ in range(2))
    blocks.weights, dense.weights = pack_rounded(blocks.weights, rounding), round_weights(dense.weights, rounding)
    for mine, plain in zip(blocks.weights.layers, dense.weights.layers, strict=True):
        for name, kind in (("qkv", KEPT[rounding.name]), ("down", KEPT[rounding.name])):
            packed = getattr(mine, name)
            assert {piece.kind for piece in packed.pieces} == {kind}
            assert torch.equal(packed.dequantize(), getattr(plain, name))
    for mine, plain in zip(logits_of(blocks), logits_of(dense), strict=True):
        assert (mine - plain).abs().max() <= 1e-4 * plain.abs().max()


def test_the_cost_of_rounding_is_a_divergence_of_distributions() -> None:
    before = torch.tensor([[0.0, 0.0], [2.0, -1.0]])
    assert divergence(before, before + 3) < 1e-12
    after = torch.tensor([[math.log(3.0), 0.0], [2.0, -1.0]])
    expected = 0.5 * (math.log(0.5 / 0.75) + math.log(0.5 / 0.25)) / 2  # of two rows one moved
    assert divergence(before, after) == pytest.approx(expected)


@BOTH
def test_a_load_says_what_rounding_costs(rounding: Rounding, caplog: pytest.LogCaptureFixture) -> None:
    sampling = replace(DUMMY, dtype=torch.float32, weight_format=rounding, sample=lambda: [5, 90, 3, 17, 44])
    load("eager", LOCATION, BASE, sampling)
    assert cost_said(rounding, caplog) < 0.1


def cost_said(rounding: Rounding, caplog: pytest.LogCaptureFixture) -> float:
    (record,) = caplog.records
    said = re.fullmatch(
        rf"{rounding.name} weights: KL (\d\.\d{{4}}) nats a token to the model as stored, on 5 tokens of text",
        record.getMessage(),
    )
    assert said
    return float(said[1])


@BOTH
def test_a_load_for_the_wave_says_it_too(
    rounding: Rounding, planned: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_wave(LOCATION, BASE, how(tmp_path, rounding.name, sample=lambda: [5, 90, 3, 17, 44]))
    assert planned == [rounding]
    assert (1e-4 if rounding.name == "int4" else 0) <= cost_said(rounding, caplog) < 0.1
