"""Measurements of `bench latency`, against an engine whose times are known."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onewave.base.errors import InvalidArgumentError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import summarize
from onewave.bench.engine.latency import (
    cases,
    decode_weight_bytes,
    expected_seconds,
    kv_bytes_per_token,
    measure,
    measurement,
)
from onewave.engine.output import RequestMetrics
from onewave.models.llama import LayerWeights, LlamaWeights

PREFILL_S, STEP_S = 0.25, 0.01
CEILING = Ceiling("read bandwidth", 1.0, "GB/s", "by hand", summarize([1.0]))


def layer() -> LayerWeights:
    norm, matrix = torch.zeros(8), torch.zeros(8, 8)
    return LayerWeights(
        input_norm=norm,
        qkv=matrix,
        qkv_bias=norm,
        q_norm=None,
        k_norm=None,
        o=matrix,
        o_bias=None,
        post_norm=norm,
        gate_up=matrix,
        gate_up_bias=None,
        down=matrix,
        down_bias=None,
    )


LAYER_BYTES = 4 * (4 * 64 + 3 * 8)


class FakeLLM:
    """Prefills a prompt in PREFILL_S seconds and decodes a step in STEP_S, whatever it is asked."""

    name, device, dtype, max_model_len = "fake", torch.device("cpu"), torch.float32, 64
    decode_path, quantization, kv_cache_dtype, compact = "eager", None, "float32", False

    def __init__(self) -> None:
        head = torch.zeros(32, 8)
        weights = LlamaWeights(embedding=head, layers=(layer(), layer()), norm=torch.zeros(8), head=head)
        self.config: Any = SimpleNamespace(
            vocab_size=32, num_layers=2, num_kv_heads=3, head_dim=5, layer_windows=(None, 4)
        )
        self.runner = SimpleNamespace(
            model=SimpleNamespace(weights=weights, kv_format=SimpleNamespace(dtype=torch.float32)), stream=None
        )
        self.asked: list[tuple[list[list[int]], Any]] = []

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        self.asked.append((prompts, params))
        last_first = 100.0 + PREFILL_S * len(prompts)
        return [
            SimpleNamespace(
                metrics=RequestMetrics(
                    arrival_time=100.0,
                    first_token_time=100.0 + PREFILL_S * (i + 1),
                    finished_time=last_first + STEP_S * (params.max_tokens - 1),
                    num_prompt_tokens=len(prompt),
                    num_generation_tokens=params.max_tokens,
                    time_to_first_token=None,
                    tokens_per_second=None,
                )
            )
            for i, prompt in enumerate(prompts)
        ]


def results(llm: FakeLLM, *lists: list[int], reps: int = 2, warmup: int = 1) -> list[Any]:
    return list(measure(llm, cases(*lists), reps=reps, warmup=warmup, ceiling=CEILING))


def test_tests_are_named_as_llama_bench_names_them():
    assert [(case.name, case.batch_size) for case in cases([1, 8], [512], [128], [0, 4096])] == [
        ("pp512", 1),
        ("tg128", 1),
        ("tg128@d4096", 1),
        ("pp512", 8),
        ("tg128", 8),
        ("tg128@d4096", 8),
    ]


def test_prefill_is_prompt_tokens_over_the_time_to_the_last_first_token():
    (one,) = results(FakeLLM(), [2], [16], [0], [0])
    assert one.tokens_per_second.p50 == pytest.approx(2 * 16 / (2 * PREFILL_S))
    assert one.step_ms.p50 == pytest.approx(2 * PREFILL_S * 1e3)
    assert one.step_bytes is None
    assert one.ceiling_share is None


def test_decode_counts_the_steps_after_the_first_token():
    (one,) = results(FakeLLM(), [4], [0], [11], [5])
    assert one.step_ms.p50 == pytest.approx(STEP_S * 1e3)
    assert one.tokens_per_second.p50 == pytest.approx(4 / STEP_S)


def test_a_short_request_says_how_long_all_tests_take():
    llm, tests = FakeLLM(), cases([2], [16], [11], [0])
    seconds = expected_seconds(llm, tests, repetitions=3)
    assert seconds == pytest.approx(3 * 2 * (PREFILL_S + PREFILL_S / 16 + 10 * STEP_S))
    assert [(len(prompts[0]), params.max_tokens) for prompts, params in llm.asked] == [(16, 3)] * 2


def test_bytes_of_a_step_are_weights_once_and_each_sequences_keys_and_values():
    (one,) = results(FakeLLM(), [2], [0], [3], [6])
    weights = 2 * LAYER_BYTES + 4 * 8 + 4 * 32 * 8
    # Two steps attend to 7 and 8 tokens; the second layer's window holds 4.
    keys_and_values = 2 * (2 * 3 * 5 * 4) * (7.5 + 4)
    assert one.step_bytes == weights + keys_and_values
    assert one.gigabytes_per_second == pytest.approx(one.step_bytes * 1e-9 / STEP_S)
    assert one.ceiling_share == pytest.approx(one.gigabytes_per_second)


def test_an_embedding_of_its_own_is_not_read_whole():
    head = torch.zeros(32, 8)
    untied = LlamaWeights(embedding=torch.zeros(32, 8), layers=(), norm=torch.zeros(8), head=head)
    assert decode_weight_bytes(untied) == head.nbytes + 32


def test_a_token_takes_keys_and_values_in_every_layer():
    config: Any = SimpleNamespace(num_layers=32, num_kv_heads=8, head_dim=128)
    assert kv_bytes_per_token(config, torch.bfloat16) == 131072


def test_prompts_are_the_same_in_every_run_and_differ_between_repetitions():
    one, two = FakeLLM(), FakeLLM()
    results(one, [2], [16], [0], [0])
    results(two, [2], [16], [0], [0])
    assert one.asked[0][0] == two.asked[0][0]
    assert one.asked[0][0] != one.asked[1][0]
    assert len(one.asked) == 3


def test_requests_are_greedy_and_go_on_after_the_end():
    llm = FakeLLM()
    results(llm, [1], [0], [8], [0])
    params = llm.asked[0][1]
    assert (params.temperature, params.ignore_eos, params.max_tokens) == (0.0, True, 8)


def test_a_test_longer_than_the_context_is_refused_before_anything_runs():
    llm = FakeLLM()
    with pytest.raises(InvalidArgumentError, match="max_model_len=64"):
        results(llm, [1], [8], [32], [0, 40])
    assert not llm.asked


def test_the_ledger_line_says_what_is_needed_to_repeat_it():
    llm = FakeLLM()
    (one,) = results(llm, [2], [0], [3], [6])
    line = measurement(one, llm, threads=2)
    assert (line.model, line.metric, line.unit) == ("fake", "decode_step", "ms")
    assert line.summary == one.step_ms
    assert line.extra["test"] == "tg3@d6"
    assert line.extra["batch_size"] == 2
    assert line.extra["threads"] == 2
    assert line.extra["decode_path"] == "eager"
