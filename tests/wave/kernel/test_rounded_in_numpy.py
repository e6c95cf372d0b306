"""Decode steps on one-byte weights of tiny models: the kernel's own source in NumPy against the plain forward pass."""

from dataclasses import replace

import pytest
import torch

from kit.lanes import slow
from kit.models.tiny_decoders import BASE, FAMILIES, random_model
from kit.numpy_gpu.gluon_in_numpy import Fault
from kit.numpy_gpu.happens_before import Race
from kit.numpy_gpu.simulated_wave import (
    CAPACITY,
    LONG,
    Simulated,
    assert_batch_invariant,
    assert_error_rule,
    assert_steps_agree,
    exactly_rounded,
)
from onewave.base.weight_formats import ROW_ROUNDINGS
from onewave.engine.load.rounded import round_weights
from onewave.models import llama_plan
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig, RopeConfig
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.wave.plan.layout import TILE_BYTES
from onewave.wave.plan.steps import Word

INT8 = ROW_ROUNDINGS["int8"]

BIASED = FAMILIES["seven heads a KV head, biases"]
WIDE = replace(BASE, num_heads=2, num_kv_heads=1, head_dim=128, rope=RopeConfig("default", 500.0, 128))
MANY = replace(
    WIDE, num_heads=20, num_kv_heads=4, num_layers=1, layer_windows=(None,)
)  # merged by eight words a thread


def agree(model: Llama, name: str, batch: int, workers: int, steps: int) -> None:
    form = ROW_ROUNDINGS[name]
    wave = Simulated(model, batch, workers, batch, weight_format=form)
    assert_steps_agree(wave, exactly_rounded(model, form), range(batch), steps)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (BASE, "int8"),
        (BASE, "fp8"),
        (BIASED, "fp8"),
        (WIDE, "int8"),
        (MANY, "int8"),
        slow(BIASED, "int8"),
        slow(WIDE, "fp8"),
    ],
)
def test_a_step_on_rounded_weights_is_the_plain_forward_pass_on_them(config: ModelConfig, name: str) -> None:
    agree(random_model(config), name, batch=1, workers=3, steps=2)


@pytest.mark.parametrize(("name", "batch"), [("int8", 2), ("fp8", 3), ("int8", 8), ("fp8", 16)])
def test_every_width_of_the_products(name: str, batch: int) -> None:
    agree(random_model(LONG), name, batch, workers=3, steps=batch if batch < 4 else 2)


@pytest.mark.parametrize(("name", "batch"), [("int8", 1), ("fp8", 4), slow("int8", 16)])
def test_tiles_of_two_operands(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", 100.0)
    model = random_model(replace(LONG, intermediate_size=2112))
    shape = plan_decode(DecodeStep(model.config, batch, INT8), workers=3).program.shape
    assert (shape.images, shape.tile_bytes) == (2, TILE_BYTES)
    agree(model, name, batch, workers=3, steps=2)


@pytest.mark.parametrize(("name", "dim"), [("int8", 64), ("fp8", 128), slow("int8", 128), slow("fp8", 64)])
def test_keys_come_between_tiles_of_rounded_weights(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", 100.0)
    rope = RopeConfig("default", 500.0, dim)
    model = random_model(replace(LONG, intermediate_size=2112, head_dim=dim, rope=rope, num_heads=4, num_kv_heads=2))
    contexts = [900, 257]
    wave = Simulated(model, 2, 3, 2, weight_format=ROW_ROUNDINGS[name])
    assert wave.bench.arguments["STREAMS"]
    wave.fill([0, 1], contexts)
    exact = exactly_rounded(model, ROW_ROUNDINGS[name])
    kv = exact.new_cache(num_slots=2, capacity=CAPACITY)
    for cache, theirs in zip((kv.k, kv.v), wave.caches(), strict=True):
        cache.copy_(theirs)
    expected = exact.forward(Batch.decode(*torch.tensor([[5, 6], contexts, [0, 1]])), kv)
    found = wave.step([5, 6], contexts, [0, 1])
    assert (found - expected).norm() < 4e-3 * expected.norm()


def test_large_tiles_are_for_models_whose_rows_fill_them() -> None:
    def images(**sizes: int) -> int:
        return plan_decode(DecodeStep(replace(LONG, **sizes), 1, INT8), workers=3).program.shape.images

    assert images(hidden_size=2048, num_heads=64, num_kv_heads=8, intermediate_size=4096) == 2
    assert images(hidden_size=3072, num_heads=64, num_kv_heads=8, intermediate_size=4096) == 1


@pytest.mark.parametrize(
    ("name", "batch", "intermediate", "filling"),
    [
        *(("int8", 8, 4672, 0.0), ("fp8", 4, 8256, 100.0), ("int8", 16, 2112, 0.0)),
        *(slow("int8", 8, 4672, 100.0), slow("fp8", 4, 8256, 0.0), slow("int8", 16, 2112, 100.0)),
    ],
)
def test_activations_pass_for_a_few_row_blocks(
    name: str, batch: int, intermediate: int, filling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SUM", 1000)
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", filling)
    model = random_model(replace(LONG, intermediate_size=intermediate))
    program = plan_decode(DecodeStep(model.config, batch, INT8), workers=2).program
    downs = program.steps[[phase.startswith("down") for phase in program.phases]]
    assert (downs[:, Word.CHUNKS] > program.shape.slots).all()
    assert downs[:, Word.BLOCKS].max() == program.shape.group
    agree(model, name, batch, workers=2, steps=1)


@pytest.mark.parametrize(("name", "filling"), [("int8", 1.0), ("fp8", 2.0)])
def test_hidden_rows_of_sixteen_sequences_pass(name: str, filling: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", filling)
    model = random_model(replace(LONG, hidden_size=2112))
    shape = plan_decode(DecodeStep(model.config, 16, INT8), workers=2).program.shape
    assert shape.max_tiles * shape.cols < 2112
    assert shape.images == (1 if filling == 1.0 else 2)
    agree(model, name, 16, workers=2, steps=1)


def test_slices_of_a_long_row_carry_their_rows_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SUM", 0)
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SLICE", 0)
    model = random_model(replace(LONG, intermediate_size=4672))
    assert plan_decode(DecodeStep(model.config, 5, INT8), workers=3).program.max_slices == 2
    agree(model, "int8", batch=5, workers=3, steps=2)


@pytest.mark.parametrize("name", ["int8", slow("fp8")])
def test_neither_workers_nor_batch_mates_change_a_bit(name: str) -> None:
    assert_batch_invariant(random_model(LONG), ROW_ROUNDINGS[name])


def test_a_stream_of_bytes_is_half_as_long_and_its_ring_twice_as_deep() -> None:
    for batch in (1, 8, 16):
        plain, rounded = (plan_decode(DecodeStep(BASE, batch, form), workers=3).program for form in (None, INT8))
        assert rounded.stream_tiles == plain.stream_tiles
        assert rounded.shape.tile_bytes == TILE_BYTES // 2
        assert rounded.shape.ring // 2 in (plain.shape.ring, plain.shape.ring + 1)
        assert rounded.num_scales >= sum((4 + 2 * 2) * 32 + 2 * 128 + 2 * 192 for _ in range(2)) + 131


@pytest.mark.parametrize("name", ROW_ROUNDINGS)
def test_logits_are_as_near_to_exact_ones_as_the_error_rule_asks(name: str) -> None:
    model = random_model(BASE)
    rounded = round_weights(random_model(BASE).weights, ROW_ROUNDINGS[name])
    plain = Llama(model.config, rounded, max_model_len=model.config.max_position)
    assert_error_rule(
        Simulated(model, 3, 3, 3, weight_format=ROW_ROUNDINGS[name]), exactly_rounded(model, ROW_ROUNDINGS[name]), plain
    )


@pytest.mark.parametrize(("name", "function"), [("fp8", "multiply_bytes"), ("int8", "add_two")])
def test_a_slot_that_goes_before_anything_orders_its_loads_and_the_next_copies_is_found(
    name: str, function: str
) -> None:
    wave = Simulated(random_model(LONG), 1, 1, 1, weight_format=ROW_ROUNDINGS[name])
    wave.bench.planted.append(Fault(function, "fence_async_shared()", "pass"))
    with pytest.raises(Race, match=r"a copy by TMA writes what multi.* read"):
        wave.step([5], [0], [0])
