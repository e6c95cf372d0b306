"""Decode steps on 4-bit weights of tiny models: the kernel's own source in NumPy against the plain forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kit.models.tiny_decoders import BASE, FAMILIES, in_float32, random_model
from kit.numpy_gpu.simulated_wave import CAPACITY, LONG, Simulated, assert_batch_invariant, assert_error_rule
from onewave.base.weight_formats import NIBBLES, GroupRounding
from onewave.engine.load.rounded import round_weights
from onewave.models import llama_plan
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig, RopeConfig
from onewave.models.llama import Llama
from onewave.models.llama_plan import plan_decode

INT4 = NIBBLES[128, False]
WIDE = replace(BASE, num_heads=2, num_kv_heads=1, head_dim=128, rope=RopeConfig("default", 500.0, 128))


def exact_of(model: Llama, form: GroupRounding) -> Llama:
    """The rounded weights in float32: what a step is to come to."""
    weights = round_weights(in_float32(model).weights, form)
    return Llama(model.config, weights, max_model_len=model.max_model_len)


def agree(model: Llama, form: GroupRounding, batch: int, *, steps: int = 2) -> None:
    exact = exact_of(model, form)
    wave = Simulated(model, batch, 3, batch, weight_format=form)
    kv = exact.new_cache(num_slots=batch, capacity=CAPACITY)
    dice = torch.Generator().manual_seed(3)
    for step in range(steps):
        alive = [b for b in range(batch) if step >= b or batch > 4]
        tokens = torch.randint(131, (len(alive),), generator=dice).tolist()
        positions = [step - b if batch <= 4 else step for b in alive]
        expected = exact.forward(Batch.decode(*torch.tensor([tokens, positions, alive])), kv)
        found = wave.step(tokens, positions, alive)
        assert (found - expected).norm() < 4e-3 * expected.norm(), f"step {step}"


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (BASE, INT4),
        (FAMILIES["seven heads a KV head, biases"], NIBBLES[64, False]),
        (WIDE, NIBBLES[32, True]),
        (LONG, NIBBLES[128, True]),
    ],
    ids=["int4", "groups of 64, biases", "groups of 32 with minima, heads of 128", "minima"],
)
def test_a_step_on_rounded_weights_is_the_plain_forward_pass_on_them(config: ModelConfig, form: GroupRounding) -> None:
    agree(random_model(config), form, batch=1, steps=1)


@pytest.mark.parametrize(
    ("form", "batch", "images"),
    [(NIBBLES[64, True], 2, 1), (INT4, 3, 4), (NIBBLES[32, False], 8, 1), (INT4, 16, 2)],
    ids=lambda given: getattr(given, "name", given),
)
def test_every_width_of_the_products_and_of_tiles(
    form: GroupRounding, batch: int, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", 100.0 if images > 1 else 0.0)
    model = random_model(replace(LONG, intermediate_size=2112))
    shape = plan_decode(model.config, batch=batch, workers=3, weight_bytes=form.weight_bytes).program.shape
    assert shape.images == images
    agree(model, form, batch, steps=2 if batch < 4 else 1)


def test_neither_workers_nor_batch_mates_change_a_bit() -> None:
    assert_batch_invariant(random_model(LONG), INT4)


def test_logits_are_as_near_to_exact_ones_as_the_error_rule_asks() -> None:
    model = random_model(BASE)
    rounded = round_weights(random_model(BASE).weights, INT4)
    plain = Llama(model.config, rounded, max_model_len=model.config.max_position)
    assert_error_rule(Simulated(model, 3, 3, 3, weight_format=INT4), exact_of(model, INT4), plain)
