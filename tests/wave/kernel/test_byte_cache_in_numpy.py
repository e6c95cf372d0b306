"""Decode steps from a cache in 8 bits: the wave kernel's own source in NumPy, beside the plain forward pass on it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.lanes import slow
from kit.models.tiny_decoders import BASE, FAMILIES, in_float32, randn, random_model
from kit.numpy_gpu.numpy_memory import Pointer
from kit.numpy_gpu.numpy_tensor_maps import Boxes
from kit.numpy_gpu.simulated_wave import Simulated
from kit.ptx.ptx_text import executed
from onewave.memory.kv_cache import KVCache, KVFormat
from onewave.models import llama_plan
from onewave.models.batch import Batch
from onewave.models.config.model_config import RopeConfig
from onewave.models.llama import Llama
from onewave.wave.kernel.attend import byte_cache
from onewave.wave.launch.checks import BYTE_NUMBERS

INT8, FP8 = torch.int8, torch.float8_e4m3fn
WIDE = FAMILIES["head_dim 128"]
# With heads of 64, 8-bit keys take half a tile each.
NARROW = replace(BASE, num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeConfig("default", 500.0, 64))


class InBytes(Simulated):
    """A wave on a plain forward pass's paged cache in 8 bits."""

    def __init__(self, model: Llama, kv: KVCache, batch: int, workers: int, *, streams: bool):
        super().__init__(model, batch, workers, batch, PAGE=kv.block_size, KV=BYTE_NUMBERS[kv.k.dtype])
        assert kv.block_table is not None
        assert kv.k_scale is not None
        assert kv.v_scale is not None
        memory, self.kv = self.bench.memory, kv
        self.k, self.v = (memory.put(cache.view(torch.int8).numpy()) for cache in (kv.k, kv.v))
        if streams:
            group, rows = 16 * kv.k.shape[-1], (kv.k.numel() - 7 * 16 * kv.k.shape[-1]) // 128
            boxes = (
                Boxes(memory, Pointer(cache.address, np.int8), (8, rows, 128), (group, 128, 1), [8, group // 128, 128])
                for cache in (self.k, self.v)
            )
            self.bench.arguments |= {"STREAMS": 1, **dict(zip(("keys", "values"), boxes, strict=True))}
        scales = torch.stack((kv.k_scale, kv.v_scale), -1)
        scales = memory.put(torch.cat((scales, 1 / scales), -1).numpy())
        table = memory.put(kv.block_table.numpy())
        places = np.array(self.places, dtype=np.int64)
        places[2:4] = int(self.k.address), int(self.v.address)
        places[8:10] = [kv.k.stride(axis) // 4 for axis in (0, 1)]
        places[10] = int(scales.address)
        places[14:16] = int(table.address), kv.block_table.shape[1]
        self.places = places.tolist()

    def caches(self) -> list[Tensor]:
        return [torch.from_numpy(self.bench.memory.get(p, tuple(self.kv.k.shape))) for p in (self.k, self.v)]


def filled(model: Llama, dtype: torch.dtype, contexts: list[int], page: int) -> KVCache:
    """A cache in pages in any order with random keys and values of so many tokens a slot; other numbers beyond."""
    config, dice = model.config, torch.Generator().manual_seed(7)
    model.kv_format = KVFormat(
        dtype, *(0.004 + 0.02 * torch.rand(config.num_layers, config.num_kv_heads) for _ in "kv")
    )
    per_slot = -(-(max(contexts) + 1) // page)
    num_blocks = len(contexts) * per_slot + 1
    kv = model.new_block_cache(
        num_blocks=num_blocks, num_slots=len(contexts), capacity=per_slot * page, block_size=page
    )
    kv.block_table.copy_(torch.randperm(num_blocks, generator=dice)[:-1].view(len(contexts), per_slot))
    for cache, seed in ((kv.k, 1), (kv.v, 2)):
        cache.copy_((randn(*cache.shape, seed=seed) * 40).clamp(-120, 120).to(dtype))
    return kv


def agree(model: Llama, dtype: torch.dtype, contexts: list[int], page: int, *, streams: bool, workers: int = 3) -> None:
    exact, batch = in_float32(model), len(contexts)
    kv = filled(exact, dtype, contexts, page)
    wave = InBytes(model, kv, batch, workers, streams=streams)
    tokens, slots = list(range(5, 5 + batch)), list(range(batch))
    before = wave.caches()
    expected = exact.forward(Batch.decode(*torch.tensor([tokens, contexts, slots])), kv)
    found = wave.step(tokens, contexts, slots)
    for row in range(batch):
        assert (found[row] - expected[row]).norm() < 4e-3 * expected[row].norm(), f"context {contexts[row]}"
    for ours, old, theirs, scale in zip(wave.caches(), before, (kv.k, kv.v), (kv.k_scale, kv.v_scale), strict=True):
        assert ((ours != old).any(-1) == (theirs.view(torch.int8) != old).any(-1)).all(), "rows of no new token"
        mine, plain = (cache.float() * scale[:, None, :, None, None] for cache in (ours.view(dtype), theirs))
        # A step of the numbers apart where what is rounded is: the wave's sums are rounded to 16 bits.
        step = 0.03 if dtype is INT8 else 0.13 * plain.abs()
        assert ((mine - plain).abs() <= 1e-2 + step).all()


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_the_instructions_that_widen_give_every_byte_its_value_in_every_place(dtype: torch.dtype) -> None:
    name = "INT8" if dtype is INT8 else "FP8"
    first, second = (np.random.default_rng(seed).permuted(np.tile(np.arange(256), (4, 1)), axis=1) for seed in (0, 1))
    words = [np.ascontiguousarray(each.T.astype(np.uint8)).view(np.uint32)[:, 0] for each in (first, second)]
    known = torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
    values = known[np.stack((first, second), -1)]  # [byte, word, of which key]

    def pairs(registers: dict[str, np.ndarray], count: int) -> np.ndarray:
        return np.stack([registers[f"${number}"].view(np.float16).reshape(-1, 2) for number in range(count)])

    found = pairs(executed(getattr(byte_cache, f"_HALVES_{name}").value, {"$2": words[0]}), 2)
    np.testing.assert_array_equal(found.transpose(0, 2, 1).reshape(4, -1), values[..., 0])
    found = pairs(executed(getattr(byte_cache, f"_KEYS_{name}").value, {"$4": words[0], "$5": words[1]}), 4)
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("config", "dtype", "page", "contexts", "tasks"),
    [
        (WIDE, INT8, 16, [15, 299, 0], 4),
        (WIDE, FP8, 128, [257, 16], 1),
        (NARROW, INT8, 128, [300], 4),
        (replace(NARROW, qkv_bias=True, qk_norm=True, layer_windows=(201, None)), FP8, 16, [270, 31], 4),
    ],
)
def test_a_cache_in_8_bits_is_read_and_appended_to(
    config, dtype: torch.dtype, page: int, contexts: list[int], tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_plan, "_ATTENTION_TASKS", tasks)
    agree(random_model(config), dtype, contexts, page, streams=False)


@pytest.mark.parametrize(
    ("config", "dtype", "page"), [(WIDE, FP8, 128), (NARROW, INT8, 256), slow(WIDE, INT8, 256), slow(NARROW, FP8, 128)]
)
def test_its_keys_come_through_the_ring(config, dtype: torch.dtype, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_ATTENTION_TASKS", 4)
    agree(random_model(config), dtype, [600, 31, 128], page, streams=True)
