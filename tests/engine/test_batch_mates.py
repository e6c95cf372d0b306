"""Outputs do not depend on batch-mates, prefix hits, chunks or preemptions."""

from dataclasses import replace

import pytest

from kit.crowd import alone, ragged, runner_of, together
from kit.models.tiny_decoders import BASE, in_float32, random_model
from onewave.memory import kv_cache


def test_two_hundred_requests_under_load_get_the_tokens_that_each_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "CPU_BLOCK_SIZE", 4)  # much happens in few tokens
    model = in_float32(random_model(replace(BASE, num_layers=1, layer_windows=(None,), max_position=48)))
    asked = ragged(200, vocab_size=131, block_size=4, max_new=14)
    found, counts = together(runner_of(model, blocks=12, tokens=24), asked)
    assert counts["preempted"] > 20, counts
    assert counts["cached"] > 300, counts
    assert counts["chunks"] > 20, counts
    assert counts["copies"] > 20, counts
    for one, same in zip(found, alone(runner_of(model, tokens=2048), asked), strict=True):
        assert [s.token_ids for s in one.samples] == [s.token_ids for s in same.samples]
