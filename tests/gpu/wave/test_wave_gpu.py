"""Decode steps as one wave on a GPU: logits, caches, bits, batches, workers, delays, the engine."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kit.models.tiny_decoders import BASE, FAMILIES, random_model
from kit.operands.on_gpu import ON_WAVE
from kit.operands.wave_on_gpu import CAPACITY, copied, filled, on, on_gpu
from onewave.base.errors import InvalidArgumentError, ShapeError
from onewave.engine.load.self_check import self_check
from onewave.memory.kv_cache import KVCache
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig, RopeConfig
from onewave.models.decode_wave import DecodeWave
from onewave.wave.launch.launch import co_resident

pytestmark = ON_WAVE
CONTEXTS = [0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 511, 900, 1023, 1024, 1100, 8191, 8192, 8193]


def step(wave: DecodeWave, kv: KVCache, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    wave.bind_cache(kv)
    out = wave(tokens, positions, slots)
    torch.cuda.synchronize()
    wave.wave.check()
    return out


def assert_repeats(wave: DecodeWave, expected: Tensor, *row: Tensor, times: int = 1000) -> None:
    """So many steps of a bound wave give the same bits."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        wrong += (wave(*row) != expected).any()
    wave.wave.check()
    assert int(wrong) == 0


@pytest.mark.values
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_and_caches_are_as_close_to_float32_as_the_plain_step(family: str, dtype: torch.dtype) -> None:
    model = on_gpu(random_model(FAMILIES[family]), dtype)
    exact = on(model, torch.device("cpu"), torch.float32)
    wave = DecodeWave(model, batch=1)
    for context in CONTEXTS:
        plain, ours = filled(model, 2), filled(model, 2)
        wide = exact.new_cache(num_slots=2, capacity=CAPACITY)
        wide.k.copy_(plain.k)
        wide.v.copy_(plain.v)
        row = [torch.tensor([value]) for value in (context % 131, context, 1)]
        tokens, positions, slots = (value.cuda() for value in row)
        right = exact.forward(Batch.decode(*row), wide).cuda()
        ordinary = model.forward(Batch.decode(tokens, positions, slots), plain)
        found = step(wave, ours, tokens, positions, slots)
        bound = 1.5 * (ordinary - right).norm() + 2e-3 * right.norm()
        assert (found - right).norm() <= bound, context
        for mine, theirs in ((ours.k, plain.k), (ours.v, plain.v)):
            changed = (mine != theirs).nonzero()
            assert set(changed[:, 3].tolist()) <= {context}
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.05, atol=0.05)


def test_a_thousand_steps_give_the_same_bits_in_any_batch_and_with_any_workers() -> None:
    model = on_gpu(random_model(BASE))
    tokens = torch.tensor([5, 80, 3, 44, 9], device="cuda")
    positions = torch.tensor([300, 17, 0, 511, 64], device="cuda")
    slots = torch.tensor([2, 0, 4, 1, 3], device="cuda")
    kv = filled(model, 6)
    wave = DecodeWave(model, batch=8)
    together = step(wave, copied(model, kv), tokens, positions, slots)
    for i in range(5):
        part = slice(i, i + 1)
        assert torch.equal(step(wave, copied(model, kv), tokens[part], positions[part], slots[part])[0], together[i])
    most = co_resident(model.device)
    for workers in sorted({1, 17, 64, most - 1}):
        other = DecodeWave(model, batch=8, workers=workers)
        assert torch.equal(step(other, copied(model, kv), tokens, positions, slots), together)
    own = copied(model, kv)
    wave.bind_cache(own)
    assert_repeats(wave, together, tokens, positions, slots)


@pytest.mark.parametrize("position", [17, 300, 1030, 3071, 3080])
def test_a_single_sequences_bits_are_those_of_any_run_and_any_workers(position: int) -> None:
    model = on_gpu(random_model(BASE))
    kv = filled(model, 2)
    row = torch.tensor([[5], [position], [1]], device="cuda")
    wave = DecodeWave(model, batch=1)
    once = step(wave, copied(model, kv), *row)
    for workers in sorted({1, 17, 64, co_resident(model.device) - 1}):
        assert torch.equal(step(DecodeWave(model, batch=1, workers=workers), copied(model, kv), *row), once)
    wave.bind_cache(copied(model, kv))
    assert_repeats(wave, once, *row)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_launches_give_one_workers_bits_whose_weights_come_from_the_second_level_cache(
    batch: int, head_dim: int
) -> None:
    # A slot of the ring is written to again a few hundred nanoseconds after it has been freed: if loads of what was in
    # it are still on their way then, these launches show it.
    heads = 1024 // head_dim
    config = replace(
        BASE, vocab_size=5003, hidden_size=1024, intermediate_size=4096, num_layers=1, layer_windows=(None,),
        num_heads=heads, num_kv_heads=heads // 4, head_dim=head_dim, rope=RopeConfig("default", 500.0, head_dim),
    )  # fmt: skip
    model = on_gpu(random_model(config))
    kv = filled(model, batch)
    rows = torch.arange(batch, device="cuda")
    tokens, positions = rows + 5, rows * 37 % 600
    right = step(DecodeWave(model, batch=batch, workers=17), copied(model, kv), tokens, positions, rows)
    wave = DecodeWave(model, batch=batch)
    wave.bind_cache(kv)
    wrong = torch.zeros(1000, dtype=torch.int64, device="cuda")
    for launch in range(1000):
        wrong[launch] = (wave(tokens, positions, rows) != right).sum()
    wave.wave.check()
    assert wrong.nonzero().view(-1).tolist() == []


def test_steps_that_follow_each_other_in_a_graph_give_their_bits() -> None:
    model = on_gpu(random_model(BASE))
    kv = filled(model, 2)
    wave = DecodeWave(model, batch=1)
    rows = [torch.tensor([[5 + i], [300 + i], [1]], device="cuda") for i in range(4)]
    alone = copied(model, kv)
    right = [step(wave, alone, *row) for row in rows]
    wave.bind_cache(copied(model, kv))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [wave(*row) for row in rows]
    for _ in range(50):
        for out in found:
            out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        wave.wave.check()
        assert all(torch.equal(out, expected) for out, expected in zip(found, right, strict=True))


@pytest.mark.parametrize("sequences", [1, 2])
def test_random_delays_change_no_bit(sequences: int) -> None:
    model = on_gpu(random_model(BASE))
    kv = filled(model, 2)
    rows = torch.tensor([[5, 80], [300, 17], [1, 0]], device="cuda")
    tokens, positions, slots = rows[:, :sequences].contiguous()
    right = step(DecodeWave(model, batch=sequences), copied(model, kv), tokens, positions, slots)
    slow = DecodeWave(model, batch=sequences, workers=16, delays=True)
    slow.bind_cache(copied(model, kv))
    assert_repeats(slow, right, tokens, positions, slots, times=10_000)


@pytest.mark.parametrize("sequences", [1, 2, 4, 7, 16])
def test_the_self_check_passes(sequences: int) -> None:
    config: ModelConfig = replace(BASE, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=4)
    model = on_gpu(random_model(config))
    assert self_check(model, DecodeWave(model, batch=sequences), sequences) < 0.03


@pytest.mark.parametrize("sequences", [7, 16])
def test_sixteen_sequences_of_a_wide_model_have_the_same_bits_in_any_batch_and_with_any_workers(sequences: int) -> None:
    wide = {"hidden_size": 4224, "num_heads": 34, "head_dim": 64, "rope": RopeConfig("default", 500.0, 64)}
    model = on_gpu(random_model(replace(BASE, **wide)))
    wave = DecodeWave(model, batch=sequences)
    assert self_check(model, wave, sequences) < 0.03
    tokens = torch.arange(3, 3 + sequences, device="cuda")
    positions = torch.arange(sequences, device="cuda") * 37
    slots = torch.arange(sequences, device="cuda").flip(0)
    kv = filled(model, sequences)
    together = step(wave, copied(model, kv), tokens, positions, slots)
    alone = step(wave, copied(model, kv), tokens[2:3], positions[2:3], slots[2:3])
    assert torch.equal(alone[0], together[2])
    for workers in (1, 17, co_resident(model.device)):
        other = DecodeWave(model, batch=sequences, workers=workers)
        assert torch.equal(step(other, copied(model, kv), tokens, positions, slots), together)


def test_steps_on_two_streams_follow_each_other() -> None:
    model = on_gpu(random_model(BASE))
    kv = filled(model, 2)
    wave = DecodeWave(model, batch=1, workers=16)
    rows = [torch.tensor([[5 + i], [300], [i % 2]], device="cuda") for i in range(2)]
    right = [step(wave, copied(model, kv), *row) for row in rows]
    wave.bind_cache(copied(model, kv))
    streams = [torch.cuda.Stream() for _ in rows]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        found = []
        for stream, row in zip(streams, rows, strict=True):
            with torch.cuda.stream(stream):
                found.append(wave(*row))
        torch.cuda.synchronize()
        wrong += sum((out != once).any() for out, once in zip(found, right, strict=True))
    wave.wave.check()
    assert int(wrong) == 0


def test_a_step_without_a_cache_or_with_another_models_is_refused() -> None:
    model = on_gpu(random_model(BASE))
    wave = DecodeWave(model, batch=1)
    row = torch.tensor([[5], [3], [1]], device="cuda")
    with pytest.raises(InvalidArgumentError, match="bind_cache"):
        wave(*row)
    kv = filled(model, 2)
    with pytest.raises(ShapeError, match="caches"):
        wave.wave.bind_cache(kv.k.float(), kv.v.float())
    with torch.inference_mode():
        wave = DecodeWave(model, batch=1)
    once = step(wave, copied(model, kv), *row)
    with pytest.raises(ShapeError, match="tokens"):
        wave(*row.repeat(1, 3))
    assert torch.equal(step(wave, copied(model, kv), *row), once)
