"""Measurements of `bench prompt --beside-stream`: the stream's longest gap while a prompt runs, and no other."""

from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onewave.bench.engine import beside

STEP, PROMPT = 0.25, 3.0


class FakeLLM:
    """Its stream makes a token in STEP, and waits PROMPT for a prompt that arrives; the clock is its own. late: a token
    that takes ten times as long, alone and beside. changes: the stream's next token beside a prompt is another one."""

    name, dtype, quantization, decode_path, kv_cache_dtype = "fake", torch.float32, None, "eager", "float32"
    config = SimpleNamespace(vocab_size=32)
    runner = SimpleNamespace(limits=SimpleNamespace(max_tokens=2048))

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, late: int, changes: bool) -> None:
        self.now, self.late, self.changes = 0.0, late, changes
        self.arrived, self.answered = Event(), Event()
        monkeypatch.setattr(beside.time, "perf_counter", lambda: self.now)
        started = beside.Thread.start

        def start(thread: Any) -> None:
            started(thread)
            self.arrived.wait()
            self.now += PROMPT
            self.answered.set()
            thread.join()

        monkeypatch.setattr(beside.Thread, "start", start)

    def generate(self, prompt: list[int], params: Any) -> None:
        self.arrived.set()
        self.answered.wait()

    def stream(self, prompt: list[int], params: Any) -> Iterator[Any]:
        for count in range(1, params.max_tokens + 1):
            self.now += 10 * STEP if count == self.late else STEP
            changed = self.changes and count > 16 and self.answered.is_set()
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * (count - 1) + [8 if changed else 7])])


@pytest.mark.parametrize(
    ("late", "changes", "alone"),
    [(5, False, STEP), (20, True, 10 * STEP)],
    ids=["a slow token before the prompt", "a slow token after it, and other tokens"],
)
def test_a_gap_lies_between_a_prompts_arrival_and_its_answer(
    monkeypatch: pytest.MonkeyPatch, late: int, changes: bool, alone: float
) -> None:
    llm: Any = FakeLLM(monkeypatch, late=late, changes=changes)
    [found] = beside.measure_gaps(llm, [512], reps=1, warmup=0)
    assert (found.gap.p50, found.first.p50, found.alone.p50) == (PROMPT + STEP, PROMPT, alone)
    assert found.same_tokens is not changes
    line = found.measurement(llm)
    assert (line.metric, line.summary.p50) == ("gap_beside_prompt", (PROMPT + STEP) * 1e3)
