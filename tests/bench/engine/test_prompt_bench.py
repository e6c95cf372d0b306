"""Measurements of `bench prompt`: every attention in turns, each where the engine's own was, nothing left behind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onewave.base.errors import UnsupportedError
from onewave.bench.engine import prompt
from onewave.bench.engine.prompt import measure_prompts
from onewave.engine.output import RequestMetrics

SECONDS = {"auto": 0.2, "cudnn": 0.3, "flash": 0.5}


class FakeRunner:
    """Its passes take no time."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(prefill_backend="auto")
        self.limits = SimpleNamespace(max_tokens=2048)

    def prefill(self) -> None: ...


class FakeLLM:
    """Takes as long for a prompt as its attention says."""

    name, dtype, quantization, decode_path = "fake", torch.float32, None, "eager"
    kv_cache_dtype = "float32"

    def __init__(self, device: str = "cuda") -> None:
        self.device = SimpleNamespace(type=device)
        self.config = SimpleNamespace(
            vocab_size=32, num_heads=4, num_kv_heads=2, head_dim=16, layer_windows=(None, 8, None)
        )
        self.runner = FakeRunner()
        self.ran: list[tuple[str, int, list[int]]] = []

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        kernels = {"cudnn": torch.backends.cuda.cudnn_sdp_enabled(), "flash": torch.backends.cuda.flash_sdp_enabled()}
        alone = [name for name, enabled in kernels.items() if enabled]
        backend = self.runner.model.prefill_backend
        which = "auto" if backend == "auto" else alone[0]
        assert backend == "auto" or (backend == "torch" and len(alone) == 1)
        self.ran.append((which, params.max_tokens, prompts[0]))
        metrics = RequestMetrics(
            arrival_time=1.0,
            first_token_time=1.0 + SECONDS[which],
            finished_time=2.0,
            num_prompt_tokens=len(prompts[0]),
            num_generation_tokens=1,
            time_to_first_token=None,
            tokens_per_second=None,
        )
        return [SimpleNamespace(metrics=metrics)]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    found = {"onewave": 0.1, "torch cuDNN": 0.15, "torch flash": 0.2}
    monkeypatch.setattr(prompt, "_alone", lambda llm, tokens, rounds: (found, ["torch other: too wide"]))
    monkeypatch.setattr(prompt._Passes, "seconds", lambda self: (0.05, 0.01))
    return found


def test_each_attention_has_its_turns_on_the_same_prompts(alone: dict[str, float]) -> None:
    llm: Any = FakeLLM()
    notes: list[str] = []
    results = list(measure_prompts(llm, [(1, 5), (1, 9)], reps=3, warmup=1, note=notes.append))
    assert [(each.attention, each.tokens, each.seconds.n) for each in results] == [
        (name, tokens, 3) for tokens in (5, 9) for name in alone
    ]
    assert [each.seconds.p50 for each in results[:3]] == pytest.approx(list(SECONDS.values()))
    assert notes == ["5 tokens, torch other: too wide", "9 tokens, torch other: too wide"]
    rounds = [llm.ran[at : at + 3] for at in range(0, len(llm.ran), 3)]
    assert all({which for which, *_ in each} == set(SECONDS) for each in rounds)
    assert all(len({tuple(prompt) for *_, prompt in each}) == 1 for each in rounds)
    assert len({tuple(which for which, *_ in each) for each in rounds}) > 1  # in more than one order
    assert all(tokens == 1 for _, tokens, _ in llm.ran)
    assert llm.runner.model.prefill_backend == "auto"


def test_the_ledger_gets_the_prompt_and_the_attention_by_itself(alone: dict[str, float]) -> None:
    llm: Any = FakeLLM()
    _, cudnn, _ = measure_prompts(llm, [(1, 5)], reps=1, warmup=0)
    line = cudnn.measurement(llm)
    assert (line.metric, line.unit, line.summary.p50) == ("prompt", "ms", pytest.approx(300))
    assert line.extra["attention"] == "torch cuDNN"
    assert line.extra["attention_ms"] == pytest.approx(150)
    assert line.extra["prompt_tokens"] == 5
    assert (line.extra["gpu_ms"], line.extra["host_ms"]) == (pytest.approx(50), pytest.approx(10))


def test_what_fails_is_named_and_the_engine_has_its_own_again(alone: dict[str, float]) -> None:
    llm: Any = FakeLLM()

    def broken(prompts: list[list[int]], params: Any) -> list[Any]:
        if llm.runner.model.prefill_backend == "torch":
            raise RuntimeError("no")
        return FakeLLM.generate(llm, prompts, params)

    llm.generate = broken
    with pytest.raises(RuntimeError, match="no"):
        list(measure_prompts(llm, [(1, 5)], reps=1, warmup=0))
    assert llm.runner.model.prefill_backend == "auto"
    assert torch.backends.cuda.flash_sdp_enabled()


def test_attention_by_itself_is_that_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    llm: Any = FakeLLM()
    llm.device = torch.device("cpu")
    called: list[tuple[str, Any]] = []

    def attention(q: Any, k: Any, v: Any, *, causal: bool, window: int | None, backend: str) -> None:
        assert (q.shape, k.shape, causal) == ((1, 4, 6, 16), (1, 2, 6, 16), True)
        called.append((backend, window))
        if backend == "torch" and torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("no\n such kernel")

    def in_rounds(runs: Any, device: Any, rounds: int) -> dict[str, Any]:
        for run, count in runs.values():
            assert count == 1
            run()
        return {name: SimpleNamespace(p50=1.0 if called[-1][1] is None else 0.25) for name in runs}

    def recorded(calls: Any, device: Any) -> Any:
        for call in calls:
            call()
        return calls[0]

    monkeypatch.setattr(prompt, "attention", attention)
    monkeypatch.setattr(prompt, "recorded", recorded)
    monkeypatch.setattr(prompt, "time_in_rounds", in_rounds)
    seconds, notes = prompt._alone(llm, 6, rounds=2)
    assert seconds == {"onewave": 2.25, "torch cuDNN": 2.25}
    assert notes == ["torch flash: no such kernel"]


def test_on_a_cpu_there_is_nothing_to_compare() -> None:
    llm: Any = FakeLLM("cpu")
    with pytest.raises(UnsupportedError, match="allowed: a CUDA GPU"):
        list(measure_prompts(llm, [(1, 5)], reps=1, warmup=0))
