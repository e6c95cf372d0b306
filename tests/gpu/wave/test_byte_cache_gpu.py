"""On a GPU: decode steps from a cache in 8 bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kit.lanes import slow
from kit.models.tiny_decoders import BASE, FAMILIES, random_model
from kit.operands.on_gpu import ON_WAVE
from kit.operands.wave_on_gpu import on, on_gpu
from onewave.base.errors import ShapeError
from onewave.memory.kv_cache import KVCache, KVFormat
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig, RopeConfig
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama import Llama

pytestmark = ON_WAVE

INT8, FP8, CPU = torch.int8, torch.float8_e4m3fn, torch.device("cpu")
WIDE = FAMILIES["head_dim 128"]
NARROW = replace(BASE, num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeConfig("default", 500.0, 64))
CONTEXTS = [0, 299, 31, 1100, 128]
PER_SLOT = 1280


def in_8_bits(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> KVFormat:
    dice = torch.Generator().manual_seed(3)
    shape = (config.num_layers, config.num_kv_heads)
    scales = (0.004 + 0.02 * torch.rand(shape, generator=dice) for _ in range(2))
    return KVFormat(dtype, *(scale.to(device) for scale in scales))


def cache_of(model: Llama, page: int) -> KVCache:
    """Pages in any order; the same numbers for each key whatever the pages and the device."""
    rows, config = len(CONTEXTS), model.config
    kv = model.new_block_cache(num_blocks=rows * PER_SLOT // page, num_slots=rows, capacity=PER_SLOT, block_size=page)
    dice = torch.Generator().manual_seed(5)
    order = torch.randperm(rows * PER_SLOT // page, generator=dice).view(rows, -1)
    kv.block_table.copy_(order)
    shape = (config.num_layers, rows, config.num_kv_heads, PER_SLOT // page, page, config.head_dim)
    for number, cache in enumerate((kv.k, kv.v)):
        keys = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 40
        pages = keys.clamp(-120, 120).to(cache.dtype).transpose(2, 3).flatten(1, 2)
        cache.view(torch.int8)[:, order.flatten().to(cache.device)] = pages.view(torch.int8).to(cache.device)
    return kv


def rows_on(device: torch.device | str) -> list[Tensor]:
    numbers = ([5, 6, 7, 8, 9], CONTEXTS, list(range(len(CONTEXTS))))
    return [torch.tensor(values, device=device) for values in numbers]


@pytest.mark.parametrize(("config", "dtype"), [(WIDE, FP8), (NARROW, INT8), slow(WIDE, INT8), slow(NARROW, FP8)])
def test_logits_keep_the_error_rule_and_pages_and_mates_change_no_bit(config: ModelConfig, dtype: torch.dtype) -> None:
    model = on_gpu(random_model(config))
    exact = on(model, CPU, torch.float32)
    model.kv_format, exact.kv_format = (in_8_bits(config, dtype, each.device) for each in (model, exact))
    right = exact.forward(Batch.decode(*rows_on("cpu")), cache_of(exact, 16))
    wave, rows = DecodeWave(model, batch=len(CONTEXTS)), rows_on("cuda")
    found, caches = [], []
    for page in (16, 128, 256):
        caches.append(cache_of(model, page))
        wave.bind_cache(caches[-1])
        found.append(wave(*rows))
        assert torch.equal(wave(*rows), found[-1]), "another launch"
        wave.wave.check()
        assert torch.equal(found[-1], found[0]), f"pages of {page}"
    theirs = cache_of(model, 128)
    ordinary = model.forward(Batch.decode(*rows), theirs)
    error, allowed = ((each.cpu() - right).abs().max() for each in (found[0], ordinary))
    print(f"wave {float(error):.5f}, graphs {float(allowed):.5f}")
    assert error <= 2 * allowed + 1e-5
    for ours, plain, scale in zip(
        (caches[1].k, caches[1].v), (theirs.k, theirs.v), (theirs.k_scale, theirs.v_scale), strict=True
    ):
        mine, other = (cache.float() * scale[:, None, :, None, None] for cache in (ours, plain))
        assert ((mine - other).abs() <= 0.02 + 0.03 + 0.13 * other.abs()).all()
    wave.bind_cache(caches[1])
    for row in (1, 3):
        assert torch.equal(wave(*(part[row : row + 1] for part in rows))[0], found[0][row]), "alone"


def test_a_cache_in_8_bits_without_pages_or_scales_is_refused() -> None:
    model = on_gpu(random_model(WIDE))
    wave = DecodeWave(model, batch=1)
    model.kv_format = in_8_bits(WIDE, FP8, model.device)
    kv = cache_of(model, 128)
    with pytest.raises(ShapeError, match="scales: none"):
        wave.wave.bind_cache(kv.k, kv.v, kv.block_table)
    with pytest.raises(ShapeError, match="no block table"):
        wave.bind_cache(replace(kv, block_table=None))
