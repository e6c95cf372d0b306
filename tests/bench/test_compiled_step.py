"""The step that torch.compile gets computes what the plain one does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onewave.base.errors import UnsupportedError
from onewave.bench.compiled_step import compiled_step
from onewave.models.batch import Batch
from onewave.models.config import RopeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "wave"))
from tiny_decoders import BASE, FAMILIES, in_float32, random_model

ALL = FAMILIES | {"part of a head rotates": replace(BASE, rope=RopeConfig("default", 500.0, 16))}


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(("sequences", "context"), [(1, 0), (3, 20)])
@torch.inference_mode()
def test_logits_and_the_new_keys_are_the_plain_steps(family: str, sequences: int, context: int) -> None:
    model = in_float32(random_model(ALL[family]))
    plain, ours = (model.new_cache(num_slots=sequences, capacity=context + 1) for _ in range(2))
    dice = torch.Generator().manual_seed(3)
    plain.k.normal_(generator=dice)
    plain.v.normal_(generator=dice)
    ours.copy_from(plain)
    tokens = torch.arange(sequences)
    positions = torch.full_like(tokens, context)
    expected = model.forward(Batch.decode(tokens, positions, torch.arange(sequences)), plain)
    found = compiled_step(model, ours, backend="aot_eager")(tokens, positions)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(ours.k, plain.k, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.v, plain.v, rtol=1e-4, atol=1e-5)


def test_more_shapes_than_pytorch_recompiles_for_are_compiled() -> None:
    model = in_float32(random_model(BASE))
    with torch.inference_mode():
        for context in range(10):
            cache = model.new_cache(num_slots=1, capacity=context + 1)
            cache.k.zero_()
            cache.v.zero_()
            step = compiled_step(model, cache, backend="eager")
            assert step(torch.tensor([5]), torch.tensor([context])).isfinite().all()


def test_packed_weights_are_refused() -> None:
    model = in_float32(random_model(BASE))
    packed = replace(model.weights.layers[0], o=object())  # pyright: ignore[reportArgumentType]
    model.weights = replace(model.weights, layers=(packed, *model.weights.layers[1:]))
    with pytest.raises(UnsupportedError, match="packed weights"):
        compiled_step(model, model.new_cache(num_slots=1, capacity=1))
