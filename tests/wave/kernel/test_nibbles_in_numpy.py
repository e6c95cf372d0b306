"""Decode steps on 4-bit weights of tiny models: the kernel's own source in NumPy against the plain forward pass."""

from copy import copy
from dataclasses import fields, replace

import pytest
import torch

from kit.lanes import slow
from kit.models.tiny_decoders import BASE, FAMILIES, in_float32, random_model
from kit.numpy_gpu.simulated_wave import (
    CAPACITY,
    LONG,
    Simulated,
    assert_batch_invariant,
    assert_error_rule,
    assert_steps_agree,
    exactly_rounded,
)
from onewave.base.weight_formats import NESTED, NIBBLES, SIX_BITS, GroupRounding, mixed
from onewave.engine.load.rounded import round_weights
from onewave.engine.load.streamed import layer_matrices
from onewave.models import llama_plan
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig, RopeConfig
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.wave.weights.formats import tile_format
from onewave.wave.weights.pack import WeightStream

INT4 = NIBBLES[128, False]
FLOATS = replace(INT4, name="fp8")  # beside int4
WIDE = replace(BASE, num_heads=2, num_kv_heads=1, head_dim=128, rope=RopeConfig("default", 500.0, 128))


def agree(model: Llama, form: GroupRounding, batch: int, *, steps: int = 2) -> None:
    wave = Simulated(model, batch, 3, batch, weight_format=form)
    assert_steps_agree(wave, exactly_rounded(model, form), range(batch), steps, at_once=batch > 4)


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
    monkeypatch.setattr(llama_plan, "_MAX_FILLING_OF_NIBBLES", 100.0 if images > 1 else 0.0)
    model = random_model(replace(LONG, intermediate_size=2112))
    shape = plan_decode(DecodeStep(model.config, batch, form), workers=3).program.shape
    assert shape.images == images
    agree(model, form, batch, steps=2 if batch < 4 else 1)


def of_stream(model: Llama, stream: WeightStream) -> Llama:
    """A model in float32 of the matrices that a stream holds."""
    ones, config = torch.ones_like(model.weights.norm), model.config

    def dense(name: str, *shape: int) -> torch.Tensor:
        return stream.matrix(name, *shape).dense().clone()

    layers = tuple(
        replace(layer, input_norm=ones, post_norm=ones, **{n: dense(f"{n}{i}", *s) for n, s in shapes.items()})
        for shapes in (layer_matrices(config),)
        for i, layer in enumerate(model.weights.layers)
    )
    head = dense("head", config.vocab_size, config.hidden_size)
    weights = replace(model.weights, layers=layers, norm=ones, head=head)
    return in_float32(Llama(config, weights, max_model_len=model.max_model_len))


@pytest.mark.parametrize(
    ("nibbles", "batch", "widths"),
    [
        (INT4, 4, {"head": 4, "down0": 2}),
        (FLOATS, 2, {"head": 4, "down0": 2, "qkv0": 2, "gate_up0": 2}),
        (NIBBLES[32, True], 8, {"head": 2, "o0": 4, "qkv0": 2}),
        slow(NIBBLES[64, True], 1, {"head": 2, "gate_up0": 2}),
        slow(NIBBLES[32, False], 2, {"down0": 2, "qkv0": 4}),
        (NESTED, 1, {"head": 2, "qkv0": 2, "down0": SIX_BITS, "gate_up0": 4}),
        (NESTED, 4, {"down0": 2, "o0": 4, "head": SIX_BITS}),
        (NESTED, 16, {"down0": SIX_BITS, "gate_up0": SIX_BITS}),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_matrices_of_eight_and_sixteen_bits_lie_beside_those_of_four(
    nibbles: GroupRounding, batch: int, widths: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING_OF_NIBBLES", 100.0)
    # One sequence's activations pass through shared memory in nested digits: three chunks, room for two.
    passing = nibbles is NESTED and batch == 1
    model = random_model(replace(LONG, intermediate_size=8320 if passing else 2112))
    form = mixed(INT4, widths, floats=True) if nibbles is FLOATS else mixed(nibbles, widths)
    wave = Simulated(model, batch, 3, batch, weight_format=form)
    exact = of_stream(model, wave.stream)
    rows = [5] * batch, [0] * batch, list(range(batch))
    kv = exact.new_cache(num_slots=batch, capacity=CAPACITY)
    expected = exact.forward(Batch.decode(*torch.tensor(rows)), kv)
    assert (wave.step(*rows) - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize(("batch", "config"), [(1, BASE), (8, LONG)], ids=["two layers", "eight sequences"])
def test_gains_of_norms_may_lie_beside_the_weights(batch: int, config: ModelConfig) -> None:
    model = random_model(config)
    wave = Simulated(model, batch, 3, batch, weight_format=INT4, gains_apart=True)
    held = of_stream(model, wave.stream)
    own = in_float32(model).weights
    layers = tuple(
        replace(a, input_norm=b.input_norm, post_norm=b.post_norm)
        for a, b in zip(held.weights.layers, own.layers, strict=True)
    )
    exact = Llama(config, replace(held.weights, layers=layers, norm=own.norm), max_model_len=model.max_model_len)
    rows = [5] * batch, [0] * batch, list(range(batch))
    expected = exact.forward(Batch.decode(*torch.tensor(rows)), exact.new_cache(num_slots=batch, capacity=CAPACITY))
    assert (wave.step(*rows) - expected).norm() < 3e-3 * expected.norm()


def test_neither_workers_nor_batch_mates_change_a_bit() -> None:
    assert_batch_invariant(random_model(LONG), INT4)


def test_logits_are_as_near_to_exact_ones_as_the_error_rule_asks() -> None:
    model = random_model(BASE)
    rounded = round_weights(random_model(BASE).weights, INT4)
    plain = Llama(model.config, rounded, max_model_len=model.config.max_position)
    assert_error_rule(Simulated(model, 3, 3, 3, weight_format=INT4), exactly_rounded(model, INT4), plain)


@pytest.mark.parametrize("batch", [1, 3])
def test_outliers_among_activations_cost_no_more_than_in_16_bits(batch: int) -> None:
    model = random_model(BASE)
    model.weights.embedding[:, 7] *= 300
    wave = Simulated(model, batch, 3, batch, weight_format=INT4)
    exact, rounded = exactly_rounded(model, INT4), round_weights(random_model(BASE).weights, INT4)
    plain = Llama(model.config, replace(rounded, embedding=model.weights.embedding), max_model_len=model.max_model_len)
    rows = [5, 6, 7][:batch], [0] * batch, list(range(batch))
    found = wave.step(*rows)
    right, ordinary = (
        network.forward(
            Batch.decode(*torch.tensor(rows)), network.new_cache(num_slots=batch, capacity=CAPACITY)
        ).float()
        for network in (exact, plain)
    )
    assert (found - right).norm() <= 1.1 * (ordinary - right).norm()


def unrounded(stream: WeightStream) -> WeightStream:
    """The same tiles, read back as float32."""
    twin, form, shape = copy(stream), stream.weight_format, stream.program.shape
    twin.dtype = torch.float32
    twin._formats = {width: tile_format(form, shape, torch.float32, width) for width in stream._formats}
    return twin


def test_logits_are_nearer_to_those_of_unrounded_weights_than_of_weights_in_16_bits() -> None:
    model = random_model(BASE)
    wave = Simulated(model, 2, 3, 2, weight_format=mixed(NESTED, {"down0": SIX_BITS, "qkv1": 2}))
    exact = of_stream(model, unrounded(wave.stream))

    def halved(part: object) -> object:
        return part.half() if isinstance(part, torch.Tensor) else part

    weights = exact.weights
    layers = [replace(one, **{f.name: halved(getattr(one, f.name)) for f in fields(one)}) for one in weights.layers]
    tables = {name: halved(getattr(weights, name)) for name in ("embedding", "norm", "head")}
    plain = Llama(exact.config, replace(weights, layers=tuple(layers), **tables), max_model_len=exact.max_model_len)
    caches = [network.new_cache(num_slots=2, capacity=CAPACITY) for network in (exact, plain)]
    errors = torch.zeros(2)
    for position, tokens in enumerate(([5, 90], [3, 17], [44, 121])):
        rows = tokens, [position] * 2, [0, 1]
        batch = Batch.decode(*torch.tensor(rows))
        right, ordinary = (one.forward(batch, kv).float() for one, kv in zip((exact, plain), caches, strict=True))
        errors += torch.stack([(found - right).square().sum() for found in (wave.step(*rows), ordinary)])
    assert errors[0] < errors[1]
