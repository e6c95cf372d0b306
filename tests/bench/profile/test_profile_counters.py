"""Counters of a profile under ncu: which range belongs to which part."""

import json

import pytest

from onewave.base.errors import UnsupportedError
from onewave.bench.counters import Counters
from onewave.bench.profile import counters
from onewave.bench.profile.counters import Counted, count

ASKED = Counted("llama-3.2-1b", tokens=[64, 256], batches=[1, 8], context=512, weights="compact")
PARTS = ["qkv", "attention", "o", "gate_up", "down", "between", "head"]


@pytest.mark.parametrize("lost", [0, 1])
def test_ranges_belong_to_a_prompts_parts_and_then_to_whole_steps(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    ranges = [Counters(float(at), 0.0, 0.5) for at in range(2 * len(PARTS) + 2 - lost)]

    def run(module: str, arguments: list[str], **_: object) -> list[Counters]:
        assert module == counters.__name__
        assert Counted(**json.loads(arguments[0])) == ASKED
        return ranges

    monkeypatch.setattr(counters, "collect", run)
    if lost:
        with pytest.raises(UnsupportedError, match="15 counted ranges of 16"):
            count(ASKED)
        return
    found = count(ASKED)
    prompts = [("prefill", tokens, part) for tokens in (64, 256) for part in PARTS]
    assert list(found) == [*prompts, ("decode", 1, "step"), ("decode", 8, "step")]
    assert [each.dram_read_bytes for each in found.values()] == list(range(16))
