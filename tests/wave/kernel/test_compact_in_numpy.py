"""Decode steps on compact weights of tiny models: the kernel's own source in NumPy, beside the same on plain ones."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.lanes import slow
from kit.models.tiny_decoders import BASE, FAMILIES, in_float32, random_model
from kit.numpy_gpu.gluon_in_numpy import Fault
from kit.numpy_gpu.happens_before import Race
from kit.numpy_gpu.simulated_wave import LONG, Simulated, assert_batch_invariant, assert_error_rule
from onewave.base.weight_formats import COMPACT
from onewave.models import llama_plan
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig, RopeConfig
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.wave.plan.layout import LIST_WORDS, TILE_BYTES
from onewave.wave.plan.steps import Word

CAPACITY = 1024
WIDE = FAMILIES["head_dim 128"]


@pytest.fixture(autouse=True)
def _short_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.numpy_gpu.simulated_wave.CAPACITY", CAPACITY)


def model_of(config: ModelConfig) -> Llama:
    return random_model(config, torch.bfloat16)


def compact(model: Llama, batch: int, workers: int, **constants: Any) -> Simulated:
    return Simulated(model, batch, workers, batch, weight_format=COMPACT, **constants)


def agree(model: Llama, batch: int, workers: int, steps: int = 1, contexts: list[int] | None = None) -> Simulated:
    """Steps of sequences that hold so many random tokens: sums of the same products as those of plain weights, rounded
    to float32 in another order; and as far from exact ones as bfloat16 activations are. Returns the compact wave."""
    exact = in_float32(model)
    plain, wave = Simulated(model, batch, workers, batch), compact(model, batch, workers)
    contexts, slots = contexts or [0] * batch, list(range(batch))
    kv = exact.new_cache(num_slots=batch, capacity=CAPACITY)
    for one in (plain, wave):
        one.fill(slots, contexts)
    for cache, theirs in zip((kv.k, kv.v), plain.caches(), strict=True):
        cache.copy_(theirs)
    dice = torch.Generator().manual_seed(3)
    for step in range(steps):
        tokens = torch.randint(131, (batch,), generator=dice).tolist()
        positions = [context + step for context in contexts]
        expected = exact.forward(Batch.decode(*torch.tensor([tokens, positions, slots])), kv)
        beside, found = (one.step(tokens, positions, slots) for one in (plain, wave))
        # A sum next to where rounding turns is a bfloat16 number more or less, one of hundreds: 2^-8 of it.
        assert (found - beside).norm() < 1e-3 * beside.norm(), f"step {step}"
        assert (found - expected).norm() < 3.2e-2 * expected.norm(), f"step {step}"
    return wave


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_compact_weights_is_the_step_on_plain_ones(family: str) -> None:
    agree(model_of(FAMILIES[family]), batch=1, workers=3)


@pytest.mark.parametrize(
    ("batch", "filling"),
    [
        (3, 100.0),
        (16, 0.0),
        *(slow(*each) for each in [(1, 0.0), (1, 100.0), (2, 0.0), (3, 0.0), (8, 100.0), (16, 100.0)]),
    ],
)
def test_every_width_of_the_products(batch: int, filling: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", filling)
    model = model_of(replace(LONG, intermediate_size=2112))
    shape = plan_decode(DecodeStep(model.config, batch, COMPACT), workers=3).program.shape
    assert shape.images == (2 if filling else 1)
    assert shape.tile_bytes == 13 * 1024 * shape.images
    wave = agree(model, batch, workers=3)
    # Too few bytes a tile for a tile of keys.
    assert not wave.bench.arguments["STREAMS"]


@pytest.mark.parametrize(("batch", "dim"), [(1, 128), (8, 64), slow(1, 64), slow(2, 128), slow(8, 128)])
def test_keys_come_between_tiles_of_compact_weights(batch: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", 100.0)
    rope = RopeConfig("default", 500.0, dim)
    model = model_of(replace(LONG, intermediate_size=2112, head_dim=dim, rope=rope, num_heads=4, num_kv_heads=2))
    contexts = [900, 257, 3, 0, 128, 129, 300, 16][:batch]
    wave = agree(model, batch, workers=3, contexts=contexts)
    assert wave.bench.arguments["STREAMS"]
    shape = wave.bench.program.shape
    assert TILE_BYTES < shape.tile_bytes < 2 * TILE_BYTES


def test_keys_do_not_come_between_tiles_too_small_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", 0.0)
    rope = RopeConfig("default", 500.0, 64)
    model = model_of(replace(LONG, head_dim=64, rope=rope, num_heads=4, num_kv_heads=2))
    wave = agree(model, 2, workers=3, contexts=[500, 257])
    assert wave.bench.program.shape.tile_bytes < TILE_BYTES
    assert not wave.bench.arguments["STREAMS"]


@pytest.mark.parametrize(
    ("batch", "intermediate", "filling"),
    [(8, 4672, 0.0), slow(4, 8256, 100.0), slow(16, 2112, 0.0), (16, 2112, 100.0)],
)
def test_activations_pass_for_a_few_row_blocks(
    batch: int, intermediate: int, filling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SUM", 1000)
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", filling)
    model = model_of(replace(LONG, intermediate_size=intermediate))
    program = agree(model, batch, workers=2).bench.program
    downs = program.steps[[phase.startswith("down") for phase in program.phases]]
    assert (downs[:, Word.CHUNKS] > program.shape.slots).all()
    assert downs[:, Word.BLOCKS].max() == program.shape.group


@pytest.mark.parametrize("batch", [5, slow(9)])
def test_slices_of_a_long_row_carry_their_rows_scales(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SUM", 0)
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SLICE", 0)
    model = model_of(replace(LONG, intermediate_size=4672))
    assert agree(model, batch, workers=3).bench.program.max_slices >= 2


def plant_listed(model: Llama) -> None:
    """Give every matrix rows whose largest weight, 2^60, meets a channel that is always zero, and whose few others,
    too small beside it for thirteen bits, therefore make the whole sum."""
    config, weights = model.config, model.weights
    dice = torch.Generator().manual_seed(11)
    assert isinstance(weights.head, Tensor)
    weights.embedding[:, 0] = 0
    values = torch.arange(config.num_kv_heads) * config.head_dim
    values += (config.num_heads + config.num_kv_heads) * config.head_dim
    matrices = [weights.head]
    for layer in weights.layers:
        for matrix, dead in (
            (layer.qkv, values),
            (layer.o, [0]),
            (layer.gate_up, [0, config.intermediate_size]),
            (layer.down, [0]),
        ):
            matrix[dead] = 0
            matrices.append(matrix)
    for matrix in matrices:
        for row in range(3, len(matrix), 7):
            kept = torch.randint(1, matrix.shape[1], (3,), generator=dice)
            others = matrix[row, kept].clone()
            matrix[row] = 0
            matrix[row, kept] = others
            matrix[row, 0] = 2.0**60


@pytest.mark.parametrize(("batch", "filling"), [(1, 0.0), slow(1, 100.0), slow(3, 100.0), slow(8, 0.0), (16, 100.0)])
def test_listed_weights_count_for_as_much_as_others(
    batch: int, filling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", filling)
    model = model_of(replace(BASE, intermediate_size=320))
    plant_listed(model)
    wave = agree(model, batch, workers=3)
    lists = wave.bench.arguments["lists"].stream
    assert 3 < lists[:, 0].max() < LIST_WORDS
    assert (lists[:, 0] > 0).sum() > 20
    tokens, zeros, slots = list(range(5, 5 + batch)), [0] * batch, list(range(batch))
    right = wave.step(tokens, zeros, slots)
    planted = right[:, 3::7]
    assert (planted != 0).all()
    wave.bench.planted.append(Fault("add_compact_tile", "range(1, listed + 1)", "range(0)"))
    without = wave.step(tokens, zeros, slots)
    assert (without[:, 3::7] == 0).all(), "the sums of nothing but listed weights"
    assert (without - right).norm() > 0.05 * right.norm()


def test_one_listed_weight_is_as_good_as_any_in_each_half_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_MAX_FILLING", 100.0)
    model = model_of(replace(LONG, intermediate_size=2112))
    plant_listed(model)
    down = model.weights.layers[0].down
    for row in range(3, 128, 7):  # of 2,048 columns of a tile every row has one, from all eight groups and both halves
        down[row, 1:] = 0
        down[row, 40 + 113 * (row // 7)] = -1.5
    wave = agree(model, 1, workers=3)
    lists = wave.bench.arguments["lists"].stream
    used = np.arange(1, LIST_WORDS) <= lists[:, :1]
    assert set(lists[:, 1:][used] >> 12 & 3) == {0, 1, 2, 3}


def test_neither_workers_nor_batch_mates_change_a_bit() -> None:
    model = model_of(LONG)
    plant_listed(model)
    assert_batch_invariant(model, COMPACT)


def test_blocks_may_hand_off_by_counters() -> None:
    model = model_of(LONG)
    assert torch.equal(
        compact(model, 2, 3, SYNC=1).step([5, 6], [0, 0], [0, 1]), compact(model, 2, 3).step([5, 6], [0, 0], [0, 1])
    )


def test_logits_are_as_near_to_exact_ones_as_the_error_rule_asks() -> None:
    model = model_of(BASE)
    assert_error_rule(compact(model, 3, 3), in_float32(model), model)


def test_a_stream_of_compact_weights_has_as_many_tiles_and_a_deeper_ring() -> None:
    for batch in (1, 8, 16):
        plain, thirteen = (plan_decode(DecodeStep(BASE, batch, form), workers=3).program for form in (None, COMPACT))
        assert thirteen.shape.images == 1
        assert thirteen.stream_tiles == plain.stream_tiles
        assert thirteen.shape.ring * thirteen.shape.slot_bytes <= (plain.shape.ring + 1) * TILE_BYTES
        assert thirteen.shape.ring > plain.shape.ring
        assert thirteen.num_scales >= sum((4 + 2 * 2) * 32 + 2 * 128 + 2 * 192 for _ in range(2)) + 131


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (Fault("multiply_bytes", "fence_async_shared()", "pass"), r"a copy by TMA writes what multi.* read"),
        (
            Fault("multiply_bytes", "mbarrier.wait(ring.full", "mbarrier.luck(ring.full"),
            r"multi.* reads what a copy by TMA",
        ),
        (Fault("load_tile", "mbarrier.wait(ring.empty", "mbarrier.luck(ring.empty"), r"a copy by TMA writes what"),
        (
            Fault("request_tile", "tiles[1].index(slot)", "tiles[1].index(0)"),
            r"multi.* reads what|a copy by TMA writes",
        ),
        (
            Fault("request_tile", "tiles[2].index(slot)", "tiles[2].index(0)"),
            r"multi.* reads what|a copy by TMA writes",
        ),
    ],
    ids=["no fence", "no wait for the tile", "no wait for the slot", "words in a wrong slot", "lists in a wrong slot"],
)
def test_a_fault_with_tiles_in_several_boxes_is_found(fault: Fault, complaint: str) -> None:
    wave = compact(model_of(LONG), 1, 1)
    wave.step([5], [0], [0])
    wave.bench.planted.append(fault)
    with pytest.raises(Race, match=complaint):
        wave.step([5], [0], [0])
