"""On a GPU: decode steps from a paged cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kit.models.tiny_decoders import BASE, FAMILIES, random_model
from kit.operands.on_gpu import ON_WAVE
from kit.operands.wave_on_gpu import copied, filled, on_gpu
from onewave.base.errors import InvalidArgumentError
from onewave.bench.engine.wave import in_pages
from onewave.memory.kv_cache import KVCache
from onewave.models.decode_wave import DecodeWave

pytestmark = ON_WAVE


def gathered(paged: KVCache) -> tuple[Tensor, Tensor]:
    found = [pool[:, paged.block_table.long()].transpose(2, 3).flatten(3, 4) for pool in (paged.k, paged.v)]
    return found[0], found[1]


def assert_same(paged: KVCache, kv: KVCache) -> None:
    for ours, theirs in zip(gathered(paged), (kv.k, kv.v), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.values
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page", [16, 128, 256])
def test_pages_give_the_bits_of_a_plain_cache(family: str, page: int) -> None:
    config = FAMILIES[family]
    windows = tuple(None if window is None else 201 for window in config.layer_windows)
    model = on_gpu(random_model(replace(config, layer_windows=windows)))
    wave, kv = DecodeWave(model, batch=5), filled(model, 6)
    for contexts in ([0, 1, 15, 16, 17], [127, 128, 129, 255, 256], [257, 511, 900, 1023, 63]):
        plain = copied(model, kv)
        paged = in_pages(plain, page)
        rows = [torch.tensor(values, device="cuda") for values in ([5, 6, 7, 8, 9], contexts, [4, 0, 2, 1, 5])]
        wave.bind_cache(plain)
        expected = wave(*rows)
        wave.bind_cache(paged)
        found = wave(*rows)
        wave.wave.check()
        assert torch.equal(found, expected)
        assert_same(paged, plain)


def test_the_table_may_change_between_launches() -> None:
    model = on_gpu(random_model(BASE))
    wave = DecodeWave(model, batch=3, workers=9)
    plain = filled(model, 3)
    paged = in_pages(plain, 32)
    slots = torch.tensor([2, 0, 1], device="cuda")
    tokens, positions = slots + 5, slots * 60 + 14
    for _ in range(4):
        # Two pages trade places, in the table and in memory.
        pages = paged.block_table[0, :2].long().tolist()
        paged.block_table[0, :2] = paged.block_table[0, :2].flip(0)
        for pool in (paged.k, paged.v):
            pool[:, pages] = pool[:, pages[::-1]]
        wave.bind_cache(plain)
        expected = wave(tokens, positions, slots)
        wave.bind_cache(paged)
        assert torch.equal(wave(tokens, positions, slots), expected)
        assert_same(paged, plain)
        tokens, positions = expected.argmax(dim=1), positions + 1
    wave.wave.check()


def test_a_wrong_entry_is_named_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_gpu(random_model(BASE))
    wave, paged = DecodeWave(model, batch=1), in_pages(filled(model, 1), 64)
    paged.block_table[0, 2] = 9999
    wave.bind_cache(paged)
    rows = [torch.tensor([value], device="cuda") for value in (5, 127, 0)]
    wave(*rows)  # the entry is not used yet
    monkeypatch.setenv("ONEWAVE_DEBUG", "1")
    wave(*rows)
    rows[1] += 1
    with pytest.raises(InvalidArgumentError, match=r"block table\[0, 2\]"):
        wave(*rows)
