"""Decode steps from a cache in pages: the wave kernel's own source in NumPy, bit for bit what a plain cache gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.lanes import slow
from kit.models.tiny_decoders import FAMILIES, randn, random_model
from kit.numpy_gpu.simulated_wave import CAPACITY, DTYPES, LONG, Simulated, keys_box_of
from onewave.base.errors import InvalidArgumentError, ShapeError
from onewave.models import llama_plan
from onewave.models.llama import Llama
from onewave.tiles.graph.builders import cuts
from onewave.wave.launch.checks import check_entries, check_pages

Line = tuple[int, int, int, int, int, int]
"""Which cache, layer, slot, head, key and word a line brought nearer begins with."""


class Plain(Simulated):
    """A wave with a plain cache, asked what it has brought nearer."""

    def brought_nearer(self) -> set[Line]:
        return lines_of(self, self.cache_shape)


class Paged(Simulated):
    """A wave whose caches are pages in any order, with some pages that are nobody's. NaN where nothing was put."""

    def __init__(self, model: Llama, batch: int, workers: int, slots: int, page: int, *, streams: bool = False):
        super().__init__(model, batch, workers, slots, PAGE=page)
        config, self.page, self.per_slot = model.config, page, cuts(CAPACITY, page)
        self.dice = np.random.default_rng(1)
        self.pages = slots * self.per_slot + 3
        self.pool = (config.num_layers, self.pages, config.num_kv_heads, page, config.head_dim)
        empty = np.full(self.pool, np.nan, dtype=np.float16).view(np.int32)
        memory = self.bench.memory
        self.k, self.v = memory.put(empty), memory.put(empty)
        if streams:
            boxes = (keys_box_of(memory, cache, self.pool, DTYPES[self.dtype]) for cache in (self.k, self.v))
            self.bench.arguments |= {"STREAMS": 1, **dict(zip(("keys", "values"), boxes, strict=True))}
        self.table = np.zeros((slots, self.per_slot), dtype=np.int32)
        self.table_at = memory.put(np.full((slots, self.per_slot), -1, dtype=np.int32))
        places = np.array(self.places, dtype=np.int64)
        places[2:4] = int(self.k.address), int(self.v.address)
        places[8:11] = [np.prod(self.pool[axis:]) // 2 for axis in (1, 2, 3)]
        places[14:16] = int(self.table_at.address), self.per_slot
        self.places = places.tolist()

    def fill(self, caches: list[Tensor], keys: list[int]) -> None:
        """Deal out pages anew and lay plain caches out in them; a slot has pages for so many keys only."""
        self.table = self.dice.permutation(self.pages)[: self.table.size].reshape(self.table.shape).astype(np.int32)
        for pointer, cache in zip((self.k, self.v), caches, strict=True):
            pool = np.full(self.pool, np.nan, dtype=np.float16)
            padded = np.full((*cache.shape[:3], self.per_slot * self.page, cache.shape[4]), np.nan, dtype=np.float16)
            padded[:, :, :, : cache.shape[3]] = cache.numpy()
            for slot, pages in enumerate(self.table):
                for number, page in enumerate(pages):
                    pool[:, page] = padded[:, slot, :, number * self.page : (number + 1) * self.page]
            self.bench.memory.set(pointer, pool.view(np.int32))
        known = np.arange(self.per_slot) * self.page < np.array(keys)[:, None]
        # An entry that nobody may look at leads out of the device's memory.
        self.bench.memory.set(self.table_at, np.where(known, self.table, 1 << 30).astype(np.int32))

    def caches(self) -> list[Tensor]:
        found: list[Tensor] = []
        for pointer in (self.k, self.v):
            shape = (*self.pool[:-1], self.pool[-1] // 2)
            pool = self.bench.memory.get(pointer, shape).view(np.float16)
            found.append(torch.from_numpy(pool[:, self.table].transpose(0, 1, 3, 2, 4, 5).reshape(*self.wide)))
        return [cache[:, :, :, :CAPACITY] for cache in found]

    def brought_nearer(self) -> set[Line]:
        slots, numbers = np.indices(self.table.shape)
        where = {
            int(page): (int(s), int(n)) for page, s, n in zip(*map(np.ravel, (self.table, slots, numbers)), strict=True)
        }
        found: set[Line] = set()
        for cache, layer, page, head, key, word in lines_of(self, self.pool):
            slot, number = where[page]
            found.add((cache, layer, slot, head, number * self.page + key, word))
        return found

    @property
    def wide(self) -> tuple[int, ...]:
        layers, _, heads, page, dim = self.pool
        return layers, len(self.table), heads, self.per_slot * page, dim


def lines_of(wave: Simulated, shape: tuple[int, ...]) -> set[Line]:
    """The lines of a wave's caches, of this shape, that it has brought nearer."""
    words = (*shape[:-1], shape[-1] // 2)
    found: set[Line] = set()
    for line in wave.bench.memory.lines:
        for cache, pointer in enumerate((wave.k, wave.v)):
            word = (line - int(pointer.address)) // 4
            if 0 <= word < np.prod(words):
                found.add((cache, *(int(at) for at in np.unravel_index(word, words))))
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int16), y.contiguous().view(torch.int16)) for x, y in zip(a, b, strict=True))


def random_caches(wave: Simulated, contexts: list[int]) -> list[Tensor]:
    """Keys and values of so many tokens a slot; NaN beyond."""
    caches = [randn(*wave.cache_shape, seed=seed).half() for seed in (1, 2)]
    for cache in caches:
        for slot, context in enumerate(contexts):
            cache[:, slot, :, context:] = float("nan")
    return caches


def agree(model: Llama, contexts: list[int], workers: int, page: int) -> None:
    batch = len(contexts)
    plain, paged = Plain(model, batch, workers, batch, STREAMS=0), Paged(model, batch, workers, batch, page)
    streamed = Plain(model, batch, workers, batch)
    caches = random_caches(plain, contexts)
    for pointer, cache in zip((plain.k, plain.v), caches, strict=True):
        plain.bench.memory.set(pointer, cache.numpy().view(np.int32))
        streamed.bench.memory.set(pointer, cache.numpy().view(np.int32))
    paged.fill(caches, [context + 1 for context in contexts])
    tokens, slots = list(range(5, 5 + batch)), list(range(batch))
    expected = plain.step(tokens, contexts, slots)
    assert torch.equal(paged.step(tokens, contexts, slots), expected)
    assert torch.equal(streamed.step(tokens, contexts, slots), expected)
    assert same(paged.caches(), plain.caches())
    assert paged.brought_nearer() == plain.brought_nearer()


@pytest.mark.parametrize(("page", "tasks"), [(16, 1), (32, 128), (256, 1), (16, 128), slow(32, 1), slow(256, 128)])
def test_pages_in_any_order_give_the_bits_of_a_plain_cache(
    page: int, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_plan, "_ATTENTION_TASKS", tasks)
    agree(random_model(LONG), [15, 299, 16, 0, 256], 3, page)


@pytest.mark.parametrize("family", ["a sliding window", "seven heads a KV head, biases", "head_dim 128"])
def test_pages_of_other_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_plan, "_ATTENTION_TASKS", 4)
    config = FAMILIES[family]
    # A window that begins in the middle of a page, so that a warp's keys lie in two.
    windows = tuple(None if window is None else 201 for window in config.layer_windows)
    agree(random_model(replace(config, num_layers=1, layer_windows=windows[:1])), [270, 31], 3, 16)


@pytest.mark.parametrize(
    ("family", "page", "tasks", "ring"),
    [
        ("seven heads a KV head, biases", 128, 1, None),
        ("head_dim 128", 128, 4, None),
        ("head_dim 128", 128, 1, 5),  # one tile more than a block: its keys' slots are freed before its values'
        slow("seven heads a KV head, biases", 256, 4, None),
        slow("head_dim 128", 256, 1, None),
    ],
)
def test_keys_in_pages_come_through_the_ring(
    family: str, page: int, tasks: int, ring: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_plan, "_ATTENTION_TASKS", tasks)
    model, contexts = random_model(FAMILIES[family]), [299, 31, 256]
    plain, paged = Plain(model, 3, 3, 3), Paged(model, 3, 3, 3, page, streams=True)
    assert plain.bench.arguments["STREAMS"] == 1
    paged.bench.arguments["S"] = ring or paged.bench.program.shape.ring
    caches = random_caches(plain, contexts)
    for pointer, cache in zip((plain.k, plain.v), caches, strict=True):
        plain.bench.memory.set(pointer, cache.numpy().view(np.int32))
    paged.fill(caches, [context + 1 for context in contexts])
    expected = plain.step([5, 6, 7], contexts, [0, 1, 2])
    assert torch.equal(paged.step([5, 6, 7], contexts, [0, 1, 2]), expected)
    assert same(paged.caches(), plain.caches())
    assert paged.brought_nearer() == plain.brought_nearer()


def test_tokens_append_across_pages_and_the_table_may_change_between_launches() -> None:
    model = random_model(replace(LONG, qkv_bias=True))
    plain, paged = Simulated(model, 2, 3, 2), Paged(model, 2, 3, 2, 16)
    contexts, tokens, slots = [13, 30], [5, 6], [1, 0]
    caches = random_caches(plain, [30, 13])
    for pointer, cache in zip((plain.k, plain.v), caches, strict=True):
        plain.bench.memory.set(pointer, cache.numpy().view(np.int32))
    for launch in range(8):
        if launch % 4 == 0:
            paged.fill(plain.caches(), [contexts[1] + 4, contexts[0] + 4])
        expected = plain.step(tokens, contexts, slots)
        assert torch.equal(paged.step(tokens, contexts, slots), expected)
        assert same(paged.caches(), plain.caches())
        tokens, contexts = expected.argmax(dim=1).tolist(), [context + 1 for context in contexts]


def test_a_block_table_that_leads_nowhere_is_named_by_its_entry() -> None:
    table = torch.tensor([[0, 5, -1], [1, 2, 99]], dtype=torch.int32)
    slots = torch.tensor([1, 0])
    check_entries(table, 6, 16, slots, torch.tensor([31, 31]))
    check_entries(table, 6, 16, slots, torch.tensor([-1, 0]))
    with pytest.raises(InvalidArgumentError, match=r"block table\[0, 2\].*-1.*0 to 5"):
        check_entries(table, 6, 16, slots, torch.tensor([31, 32]))
    with pytest.raises(InvalidArgumentError, match=r"block table\[1, 2\].*99.*0 to 5"):
        check_entries(table, 6, 16, slots, torch.tensor([47, 31]))
    for wrong in (48, -2):
        with pytest.raises(InvalidArgumentError, match=rf"positions.*{wrong}.*-1 to 47"):
            check_entries(table, 6, 16, slots, torch.tensor([wrong, 0]))
    for wrong in (2, -1):
        with pytest.raises(InvalidArgumentError, match=rf"slots.*{wrong}.*0 to 1"):
            check_entries(table, 6, 16, torch.tensor([0, wrong]), torch.tensor([15, 15]))


def test_pages_of_another_size_or_a_table_of_another_kind_are_refused() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    for page in (16, 256):
        pool = torch.zeros(1, 2, 1, page, 32)
        check_pages(pool, pool, table)
    for page in (8, 48, 512):
        pool = torch.zeros(1, 2, 1, page, 32)
        with pytest.raises(ShapeError, match="16, 32, 64, 128, 256"):
            check_pages(pool, pool, table)
    pool = torch.zeros(1, 2, 1, 16, 32)
    for wrong in (table.long(), table[0], table.T):
        with pytest.raises(ShapeError, match="block table"):
            check_pages(pool, pool, wrong)
