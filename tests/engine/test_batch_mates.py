"""Outputs do not depend on batch-mates, prefix hits, chunks or preemptions."""

from dataclasses import replace

import pytest
import torch

from kit.crowd import alone, ragged, runner_of, together
from kit.lanes import slow
from kit.models.tiny_decoders import BASE, in_float32, random_model
from kit.models.tiny_models import tokens
from onewave.engine.load.kv_format import measured_scales
from onewave.memory import kv_cache
from onewave.memory.kv_cache import KVFormat


@pytest.mark.parametrize(
    ("count", "kv_dtype"), [(200, None), (40, torch.int8), slow(40, torch.float8_e4m3fn)], ids=["200", "int8", "fp8"]
)
def test_requests_under_load_get_the_tokens_that_each_gets_alone(
    count: int, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "CPU_BLOCK_SIZE", 4)  # much happens in few tokens
    model = in_float32(random_model(replace(BASE, num_layers=1, layer_windows=(None,), max_position=48)))
    if kv_dtype is not None:
        model.kv_format = KVFormat(kv_dtype, *measured_scales(model, tokens(24, seed=3), kv_dtype))
    asked = ragged(count, vocab_size=131, block_size=4, max_new=14)
    found, counts = together(runner_of(model, blocks=12, tokens=24 if count == 200 else 16), asked)
    assert min(counts[what] for what in ("preempted", "chunks", "copies")) > count // 10, counts
    assert counts["cached"] > (300 if count == 200 else 20), counts
    for one, same in zip(found, alone(runner_of(model, tokens=2048), asked), strict=True):
        assert [s.token_ids for s in one.samples] == [s.token_ids for s in same.samples]
