"""Whole decode steps of tiny models: the wave kernel's own source in NumPy against the plain forward pass."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kit.lanes import slow
from kit.models.tiny_decoders import BASE, FAMILIES, in_float32, randn, random_model
from kit.numpy_gpu.simulated_wave import CAPACITY, LONG, STREAM, Simulated, assert_batch_invariant, assert_steps_agree
from onewave.base.settings import Settings
from onewave.models import llama_plan
from onewave.models.batch import Batch
from onewave.models.config.model_config import RopeConfig
from onewave.models.config.read import load_config
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.wave.plan.layout import TILE_BYTES
from onewave.wave.plan.steps import Kind, Word
from onewave.weights.fetch.sources import resolve

CPU = torch.device("cpu")


def agree_at(model: Llama, contexts: list[int], workers: int) -> None:
    """One step of sequences that hold `contexts` random tokens; NaN beyond them."""
    batch = len(contexts)
    exact = in_float32(model)
    wave = Simulated(model, batch, workers, batch)
    kv = exact.new_cache(num_slots=batch, capacity=CAPACITY)
    for cache, pointer, seed in ((kv.k, wave.k, 1), (kv.v, wave.v, 2)):
        cache.copy_(randn(*cache.shape, seed=seed).half())
        for slot, context in enumerate(contexts):
            cache[:, slot, :, context:] = float("nan")
        wave.bench.memory.set(pointer, cache.half().numpy().view(np.int32))
    tokens, slots = list(range(5, 5 + batch)), list(range(batch))
    expected = exact.forward(Batch.decode(*torch.tensor([tokens, contexts, slots])), kv)
    found = wave.step(tokens, contexts, slots)
    for row in range(batch):
        assert (found[row] - expected[row]).norm() < 4e-3 * expected[row].norm(), f"context {contexts[row]}"
    for ours, theirs in zip(wave.caches(), (kv.k, kv.v), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert (ours.float() - theirs).nan_to_num().abs().max() < 2e-2


@pytest.mark.parametrize("tasks", [1, 4, 128])
@pytest.mark.parametrize("context", [15, 16, 17, 63, 255, 256, 257, 300])
def test_long_contexts_in_any_number_of_splits(context: int, tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_ATTENTION_TASKS", tasks)
    agree_at(random_model(LONG), [context], 2)


@pytest.mark.parametrize(
    ("context", "dim"),
    [
        *((257, 32), (257, 128), (1024, 64), (8192, 128), (8193, 32), (8193, 64)),
        *(slow(*each) for each in [(257, 64), (1024, 32), (1024, 128), (8192, 32), (8192, 64), (8193, 128)]),
    ],
)
def test_the_output_projection_merges_one_sequences_splits_itself(context: int, dim: int) -> None:
    rope = RopeConfig("default", 500.0, dim)
    config = replace(LONG, head_dim=dim, rope=rope, num_heads=2048 // dim, num_kv_heads=2)
    model = random_model(config)
    program = plan_decode(DecodeStep(config), workers=3).program
    assert program.merge_words == 4
    agree_at(model, [context], 3)


def test_so_it_does_where_many_heads_leave_few_splits() -> None:
    rope = RopeConfig("default", 500.0, 32)
    config = replace(LONG, num_heads=32, num_kv_heads=32, head_dim=32, rope=rope)
    plan = plan_decode(DecodeStep(config), workers=3)
    assert (plan.groups.splits, plan.program.merge_words) == (4, 4)
    agree_at(random_model(config), [600], 3)


def test_activations_longer_than_one_round_of_threads_are_merged_in_several() -> None:
    rope = RopeConfig("default", 500.0, 128)
    config = replace(LONG, num_heads=40, num_kv_heads=8, head_dim=128, rope=rope)
    assert plan_decode(DecodeStep(config), workers=3).program.merge_words == 8
    agree_at(random_model(config), [600], 3)


@pytest.mark.parametrize(
    ("changes", "constants"),
    [
        ({}, {}),
        ({}, {"SYNC": 1}),
        ({"layer_windows": (300,)}, {}),
        ({"num_heads": 7, "num_kv_heads": 1, "head_dim": 64, "rope": RopeConfig("default", 500.0, 64)}, {}),
    ],
    ids=["plain", "counters", "a window", "seven heads"],
)
def test_a_wave_goes_from_any_length_to_any_other(changes: dict[str, Any], constants: dict[str, Any]) -> None:
    model = random_model(replace(LONG, **changes))
    exact, wave = in_float32(model), Simulated(model, 1, 3, 1, **constants)
    assert wave.bench.program.merge_words == 4
    kv = exact.new_cache(num_slots=1, capacity=CAPACITY)
    kv.k.normal_(generator=torch.Generator().manual_seed(8))
    kv.v.normal_(generator=torch.Generator().manual_seed(9))
    for token, position in enumerate((300, 8210, 10, 8200, 1100, 8192, 0, 256, 257)):
        for cache, pointer in ((kv.k, wave.k), (kv.v, wave.v)):
            wave.bench.memory.set(pointer, cache.half().numpy().view(np.int32))
        expected = exact.forward(Batch.decode(*torch.tensor([[token], [position], [0]])), kv)
        found = wave.step([token], [position], [0])
        assert (found - expected).norm() < 4e-3 * expected.norm(), f"position {position}"


@pytest.mark.parametrize("family", ["a sliding window", "seven heads a KV head, biases"])
def test_long_contexts_of_other_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_ATTENTION_TASKS", 4)
    config = FAMILIES[family]
    agree_at(random_model(replace(config, num_layers=1, layer_windows=config.layer_windows[:1])), [270], 3)


def test_a_hidden_row_too_long_for_one_sm_may_be_cut_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for cost in ("_TILES_OF_A_SUM", "_TILES_OF_A_SLICE"):
        monkeypatch.setattr(f"onewave.wave.plan.slices.{cost}", 0)
    model = random_model(replace(LONG, intermediate_size=4672))
    plan = plan_decode(DecodeStep(model.config, 5), workers=3)
    assert plan.program.max_slices == 2
    agree_at(model, [3, 20, 0, 9, 1], 3)


@pytest.mark.slow
def test_one_layer_of_llamas_real_shape() -> None:
    location = resolve("llama-3.2-1b", Settings.from_env(), load_format="dummy")
    config = replace(load_config(location), num_layers=1, layer_windows=(None,), vocab_size=1000, max_position=320)
    agree_at(random_model(config), [299], 8)


def test_neither_workers_nor_batch_mates_change_a_bit() -> None:
    assert_batch_invariant(random_model(LONG))


def test_a_batch_that_shrinks_and_grows_finds_nothing_of_an_earlier_step() -> None:
    model = random_model(LONG)
    exact, wave = in_float32(model), Simulated(model, 4, 3, 4)
    kv = exact.new_cache(num_slots=4, capacity=CAPACITY)
    kv.k.normal_(generator=torch.Generator().manual_seed(8))
    kv.v.normal_(generator=torch.Generator().manual_seed(9))
    for step, rows in enumerate((4, 1, 4, 2, 1, 4)):
        # Some that one split holds, some that need several; by turns the same ones.
        positions = [step if (i + step) % 2 else 253 + step for i in range(rows)]
        tokens = [(7 * step + i) % 131 for i in range(rows)]
        expected = exact.forward(Batch.decode(*torch.tensor([tokens, positions, list(range(rows))])), kv)
        for cache, pointer in ((kv.k, wave.k), (kv.v, wave.v)):
            wave.bench.memory.set(pointer, cache.half().numpy().view(np.int32))
        found = wave.step(tokens, positions, list(range(rows)))
        assert (found - expected).norm() < 4e-3 * expected.norm(), f"step {step}"


def test_sequences_of_different_lengths_share_a_step() -> None:
    agree_at(random_model(LONG), [0, 40, 299, 16, 128], 4)


def agree(model: Llama, batch: int, workers: int, steps: int, **constants: Any) -> None:
    """Logits and caches of sequences that began at different times against float32."""
    wave = Simulated(model, batch, workers, batch + 1, **constants)
    kv = assert_steps_agree(wave, in_float32(model), range(batch, 0, -1), steps)
    for ours, theirs in zip(wave.caches(), (kv.k, kv.v), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert (ours.float() - theirs).nan_to_num().abs().max() < 2e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_source_decodes_as_the_plain_forward_pass(family: str) -> None:
    agree(random_model(FAMILIES[family]), batch=1, workers=3, steps=3)


def test_sequences_of_one_batch_decode_side_by_side() -> None:
    agree(random_model(BASE), batch=3, workers=2, steps=5)


@pytest.mark.parametrize(
    ("workers", "batch", "intermediate"), [(1, 5, 4672), (3, 5, 4672), (9, 5, 4672), (2, 3, 9280), (1, 9, 4672)]
)
def test_activations_too_long_for_shared_memory_pass_through_it_for_a_few_row_blocks_at_a_time(
    workers: int, batch: int, intermediate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SUM", 1000)
    model = random_model(replace(LONG, intermediate_size=intermediate))
    program = plan_decode(DecodeStep(model.config, batch), workers=workers).program
    downs = program.steps[[phase.startswith("down") for phase in program.phases]]
    assert program.max_slices == 1
    assert (downs[:, Word.CHUNKS] > program.shape.slots).all()
    blocks = model.config.hidden_size // program.shape.rows
    assert downs[:, Word.BLOCKS].max() == min(program.shape.group, -(-blocks // workers))
    agree_at(model, [3, 20, 0, 9, 1, 4, 7, 2, 11][:batch], workers)


@pytest.mark.parametrize(("heads", "workers"), [(2, 40), (34, 3), slow(2, 3), slow(34, 40)])
def test_hidden_rows_and_heads_too_long_for_shared_memory_pass_through_it(
    heads: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (__name__, "kit.numpy_gpu.simulated_wave"):
        monkeypatch.setattr(f"{module}.CAPACITY", 320)
    sizes = {"hidden_size": 2112, "num_heads": heads, "num_kv_heads": 2, "head_dim": 64}
    rope = RopeConfig("default", 500.0, 64)
    model = random_model(replace(LONG, **sizes, max_position=320, rope=rope, qkv_bias=heads == 2))
    program = plan_decode(DecodeStep(model.config, 16), workers=workers).program
    assert program.shape.max_tiles * program.shape.cols < 2112
    agree_at(model, [3, 20, 0, 9, 1, 4, 7, 2, 11, 5, 6, 300, 8, 10, 12, 13], workers)


def test_a_slice_of_k_may_be_longer_than_shared_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SUM", 0)
    monkeypatch.setattr("onewave.wave.plan.slices._TILES_OF_A_SLICE", 9)
    model = random_model(replace(LONG, intermediate_size=6144))
    program = plan_decode(DecodeStep(model.config, 16), workers=3).program
    downs = program.steps[[name.startswith("down") and "_sum" not in name for name in program.names]]
    assert program.max_slices == 2
    assert (downs[:, Word.TILES] > program.shape.max_tiles).any()
    agree_at(model, [3, 20, 0, 9, 1, 4, 7, 2, 11, 5, 6, 30, 8, 10, 12, 13], 3)


def test_who_streams_more_than_the_others_has_that_much_of_it_brought_nearer() -> None:
    model, workers = random_model(replace(BASE, intermediate_size=640)), 3  # of 160 row blocks one has 54
    wave = Simulated(model, 1, workers, 1)
    wave.step([5], [0], [0])
    program = wave.bench.program
    phases = np.array(program.phases)
    steps = program.steps
    tiles = steps[:, Word.TILES] * steps[:, Word.BLOCKS] * (steps[:, Word.KIND] < Kind.REDUCE_HIDDEN)
    by_lane = np.repeat(np.arange(workers), program.lanes[:, 3])
    expected: list[tuple[int, int, int]] = []
    for block, (_, _, first, count) in enumerate(program.lanes.tolist()):
        mine = slice(first, first + count)
        for phase, begin, share in zip(phases[mine], np.cumsum(tiles[mine]) - tiles[mine], tiles[mine], strict=True):
            shares = [tiles[(phases == phase) & (by_lane == lane)].sum() for lane in range(workers)]
            more = share - sorted(shares)[1]
            if share > program.shape.ring and begin:
                coming = range(begin + program.shape.ring, begin + program.shape.ring + more)
                expected += [(block, STREAM + (tile * workers + block) * TILE_BYTES, TILE_BYTES) for tile in coming]
    assert len(expected) > 1
    assert sorted(wave.bench.memory.prefetched) == sorted(expected)
