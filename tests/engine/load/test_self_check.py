"""The self-check of a wave whose model makes rounding errors larger from layer to layer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models.tiny_decoders import BASE, in_float32, random_model
from onewave.base.errors import UnsupportedError
from onewave.engine.load.self_check import follows_growth, self_check
from onewave.engine.wave_decode import WaveDecoder
from onewave.memory.kv_cache import KVCache
from onewave.models import decode_wave
from onewave.models.batch import Batch
from onewave.models.llama import LayerWeights, Llama

LAYERS = 8
QUERIES = slice(0, BASE.num_heads * BASE.head_dim)
Fault = Callable[[list[LayerWeights]], object]


class WideStep:
    """A wave that rounds less than plain operators do: a step in float32, of weights that may be spoilt on purpose."""

    def __init__(self, model: Llama, fault: Fault | None = None, *, ahead: int = 0):
        self.model, self.ahead, self.wave = in_float32(model), ahead, self
        layers = list(self.model.weights.layers)
        if fault is not None:
            fault(layers)
        self.model.weights = replace(self.model.weights, layers=tuple(layers))

    def bind_cache(self, kv: KVCache) -> None:
        self.kv = kv

    def check(self) -> None:
        pass

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        wide = replace(self.kv, k=self.kv.k.float(), v=self.kv.v.float())
        logits = self.model.forward(Batch.decode(tokens, positions + self.ahead, slots), wide)
        self.kv.k.copy_(wide.k)
        self.kv.v.copy_(wide.v)
        return logits


@pytest.fixture(scope="module")
def model() -> Llama:
    """Random weights whose attention nearly takes one key, often another one after the least change."""
    found = random_model(replace(BASE, num_layers=LAYERS, layer_windows=(None,) * LAYERS), torch.bfloat16)
    for layer in found.weights.layers:
        assert isinstance(layer.qkv, Tensor)
        layer.qkv[: -BASE.num_kv_heads * BASE.head_dim] *= 12
    return found


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_right_wave_may_be_as_far_off_as_rounding_takes_plain_operators(model: Llama, sequences: int) -> None:
    assert 0.05 < self_check(model, WideStep(model), sequences) < 0.7
    assert follows_growth(model, WideStep(model), sequences, 0.05)


def lost_tile(layer: int, name: str) -> Fault:
    return lambda layers: getattr(layers[layer], name)[:64, :64].zero_()


def half_scale(layer: int, name: str) -> Fault:
    return lambda layers: getattr(layers[layer], name).mul_(0.5)


def moved_columns(layer: int, name: str, rows: slice) -> Fault:
    def spoil(layers: Sequence[LayerWeights]) -> None:
        matrix = getattr(layers[layer], name)
        matrix[rows] = matrix[rows].roll(1, 1)

    return spoil


def swapped_layers(layers: list[LayerWeights]) -> None:
    layers[3], layers[4] = layers[4], layers[3]


FAULTS: dict[str, Fault] = {
    "a tile of o, first layer": lost_tile(0, "o"),
    "a tile of gate and up, a layer between": lost_tile(LAYERS // 2, "gate_up"),
    "a tile of down, last layer": lost_tile(LAYERS - 1, "down"),
    "scales of down, a layer between": half_scale(LAYERS // 2, "down"),
    "scales of qkv, last layer": half_scale(LAYERS - 1, "qkv"),
    "order of down's columns, last layer": moved_columns(LAYERS - 1, "down", slice(None)),
    "order of queries' columns, first layer": moved_columns(0, "qkv", QUERIES),
    "a tile of queries, first layer": lost_tile(0, "qkv"),
    "two layers": swapped_layers,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_also_where_errors_grow(model: Llama, name: str) -> None:
    assert not follows_growth(model, WideStep(model, FAULTS[name]), 3, 0.05)


def test_a_step_at_the_wrong_position_is_seen_where_errors_grow(model: Llama) -> None:
    assert not follows_growth(model, WideStep(model, ahead=1), 3, 0.05)


@pytest.mark.parametrize("fault", [None, FAULTS["a tile of down, last layer"]])
def test_the_decoder_takes_the_right_one_and_refuses_the_wrong_one(
    model: Llama, monkeypatch: pytest.MonkeyPatch, fault: Fault | None
) -> None:
    def made(model: Llama, **_: Any) -> WideStep:
        return WideStep(model, fault)

    monkeypatch.setattr(decode_wave, "DecodeWave", made)
    if fault is None:
        assert WaveDecoder(model, 3).difference > 0.05
        return
    with pytest.raises(UnsupportedError, match=r"logits \d\d\.\d% from the plain operators"):
        WaveDecoder(model, 3)
