"""How the engine chooses its decode path, and the self-check that a wave must pass before it is used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.engine.options import choose_decode
from onewave.engine.wave_decode import WaveDecoder, self_check
from onewave.memory.kv_cache import StaticKVCache
from onewave.models.batch import Batch
from onewave.models.llama import Llama

sys.path.insert(0, str(Path(__file__).parents[1] / "wave"))
from tiny_decoders import BASE, in_float32, random_model

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


class PlainStep:
    """A wave that is the plain forward pass, and may be broken on purpose."""

    def __init__(self, model: Llama, broken: str = ""):
        self.model, self.broken = model, broken

    def bind_cache(self, kv: StaticKVCache) -> None:
        self.kv = kv

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        if self.broken == "positions":
            positions = positions - 1
        logits = self.model.forward(Batch.decode(tokens, positions, slots), self.kv)
        if self.broken == "cache":
            self.kv.v[1] *= 1.2
        if self.broken == "nan in the cache":
            self.kv.k[0, 0, :, positions[0]] = float("nan")
        return logits * float("nan") if self.broken == "nan" else logits


@pytest.fixture(scope="module")
def model() -> Llama:
    return in_float32(random_model(BASE))


@pytest.mark.parametrize("sequences", [1, 3, 5])
def test_a_step_that_agrees_passes_the_self_check(model: Llama, sequences: int) -> None:
    assert self_check(model, PlainStep(model), sequences) < 1e-6


@pytest.mark.parametrize("broken", ["positions", "cache", "nan", "nan in the cache"])
def test_a_step_that_is_wrong_anywhere_fails_the_self_check(model: Llama, broken: str) -> None:
    assert self_check(model, PlainStep(model, broken), 3) > 0.05


def test_what_does_not_suit_the_wave_is_refused_by_name(model: Llama) -> None:
    with pytest.raises(UnsupportedError, match="up to 16 sequences"):
        WaveDecoder(model, 17)
    with pytest.raises(UnsupportedError, match="compute capability"):
        WaveDecoder(model, 1)


def test_auto_is_a_graph_on_a_card_and_eager_on_a_cpu() -> None:
    assert choose_decode("auto", enforce_eager=False, device=CARD) == "graph"
    assert choose_decode("auto", enforce_eager=True, device=CARD) == "eager"
    assert choose_decode("auto", enforce_eager=False, device=CPU) == "eager"


@pytest.mark.parametrize("path", ["wave", "graph", "eager"])
def test_a_path_that_is_asked_for_is_taken_or_refused_never_replaced(path: str) -> None:
    assert choose_decode(path, enforce_eager=False, device=CARD) == path
    if path != "eager":
        with pytest.raises(UnsupportedError, match="CUDA card"):
            choose_decode(path, enforce_eager=False, device=CPU)
        with pytest.raises(InvalidArgumentError, match="enforce_eager"):
            choose_decode(path, enforce_eager=True, device=CARD)


def test_an_unknown_path_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidArgumentError, match="auto, wave, graph, eager"):
        choose_decode("fast", enforce_eager=False, device=CPU)
