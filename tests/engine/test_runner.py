"""ModelRunner's cache: how it grows, and what an interrupted growth leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onewave.base.errors import CapacityError
from onewave.engine.runner import ModelRunner
from onewave.memory.kv_cache import StaticKVCache
from onewave.models.batch import StepRows

CPU = torch.device("cpu")


class Model:
    """Makes caches of one number a key, up to `room` keys in all its slots."""

    device, dtype, config = CPU, torch.float32, SimpleNamespace(vocab_size=8)
    packs_prompts, rotary = False, SimpleNamespace(varies=False)

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.asked = room, list[int]()

    def new_cache(self, *, num_slots: int, capacity: int) -> StaticKVCache:
        self.asked.append(capacity)
        if num_slots * capacity > self.room:
            raise CapacityError("KV cache", got=f"{capacity} do not fit")
        sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": torch.float32, "device": CPU}
        return StaticKVCache(num_slots=num_slots, capacity=capacity, **sizes)


class Wave:
    """Notes the cache that it reads, and is interrupted while it is bound, if told so; may hold memory to release."""

    stream = None

    def __init__(self, model: Model, held: int = 0) -> None:
        self.model, self.held = model, held
        self.bound: StaticKVCache | None = None
        self.interrupted = False
        self.read: list[StaticKVCache | None] = []

    def release(self) -> bool:
        self.model.room += self.held
        held, self.held = self.held, 0
        return held > 0

    def bind_cache(self, kv: StaticKVCache) -> None:
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        self.bound = kv

    def step(self, *_: Any) -> torch.Tensor:
        self.read.append(self.bound)
        return torch.zeros(1, 8)


def runner(model: Model, wave: Wave | None = None, most: int = 100_000) -> ModelRunner:
    return ModelRunner(model, max_num_seqs=1, max_model_len=most, wave=wave, decode="eager")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("room", "held", "tokens", "asked"),
    [
        (1 << 20, 0, 10, [256]),
        (1 << 20, 0, 257, [512]),
        (1 << 20, 0, 5000, [8192]),
        (2 * 6000, 0, 5000, [8192, 5120]),
        (2 * 6000, 2 * 3000, 5000, [8192, 8192]),
        (2 * 6000, 2 * 10, 5000, [8192, 8192, 5120]),
        (2 * 6000, 2 * 3000, 8000, [8192, 8192]),
    ],
)
def test_a_cache_doubles_or_where_that_finds_no_memory_is_as_large_as_needed(
    room: int, held: int, tokens: int, asked: list[int]
) -> None:
    model = Model(room)
    made = runner(model, Wave(model, held) if held else None)
    made.reserve(tokens)
    assert model.asked == asked
    made.reserve(min(asked[-1], tokens + 1))
    assert model.asked == asked


@pytest.mark.parametrize("held", [0, 10])
def test_what_does_not_fit_is_refused_and_the_cache_stays(held: int) -> None:
    model = Model(2 * 1000)
    wave = Wave(model, held)
    made = runner(model, wave)
    made.reserve(300)
    before = wave.bound
    with pytest.raises(CapacityError, match="do not fit"):
        made.reserve(5000)
    assert wave.bound is before
    made.reserve(500)


def test_a_wave_whose_binding_was_interrupted_is_bound_before_its_next_step() -> None:
    model = Model()
    wave = Wave(model)
    made = runner(model, wave)
    made.reserve(10)
    wave.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        made.reserve(300)
    one = torch.zeros(1, dtype=torch.int64)
    made.reserve(300)
    made.decode(StepRows(one, one, one))
    made.decode(StepRows(one, one, one))
    assert [None if kv is None else kv.capacity for kv in wave.read] == [512, 512]
