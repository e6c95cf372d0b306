"""/metrics: what requests leave there, under either prefix."""

import json
import socket
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kit.serving import NAME, Serving, serve_in_thread, tiny_llm
from onewave.engine.llm import LLM
from onewave.engine.scheduler.load import HOST_PARTS
from onewave.server.options import ServeOptions


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_llm(tmp_path_factory.mktemp("tiny"), max_num_seqs=2) as model:
        yield model


def values(serving: Serving) -> dict[tuple[str, str], float]:
    """Every sample by name and by its label beyond model and engine."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(serving.ask("GET", "/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", None) == NAME
            assert labels.pop("engine", None) == "0"
            found[sample.name, next(iter(labels.values()), "")] = sample.value
    return found


@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_requests_are_counted_under_vllm_s_names(llm: LLM, vllm: bool, stream: bool) -> None:
    options = ServeOptions(model_names=(NAME,), vllm_metric_names=vllm)
    prefix = "vllm:" if vllm else "onewave:"
    body = {"prompt": "abcd", "max_tokens": 5, "ignore_eos": True, "n": 2}
    with serve_in_thread(llm, options) as serving:
        for _ in range(3):
            if stream:
                serving.events("/v1/completions", body)
            else:
                serving.post("/v1/completions", body)
        found = values(serving)
        # Blocks' worth of the same prompt: the second time they are found.
        cached = [
            serving.post("/v1/completions", {**body, "prompt": f"{stream}{vllm}".ljust(40)}).json()["usage"]
            for _ in range(2)
        ]
        later = values(serving)
    assert (
        cached[1]["prompt_tokens_details"]["cached_tokens"] > 0 == cached[0]["prompt_tokens_details"]["cached_tokens"]
    )
    hits = cached[1]["prompt_tokens_details"]["cached_tokens"]
    assert later[prefix + "prefix_cache_hits_total", ""] == hits
    assert later[prefix + "prefix_cache_queries_total", ""] == 92
    expected = {
        "prompt_tokens_total": 12, "generation_tokens_total": 30, "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 24, "e2e_request_latency_seconds_count": 3,
        "request_generation_tokens_sum": 30, "request_prompt_tokens_count": 3, "request_params_n_sum": 6,
        "request_params_max_tokens_sum": 15, "num_requests_running": 0, "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0, "num_preemptions_total": 0, "prompt_tokens_cached_total": 0,
        "request_max_num_generation_tokens_sum": 15, "request_prefill_kv_computed_tokens_sum": 12,
        "request_queue_time_seconds_count": 3, "request_prefill_time_seconds_count": 3,
        "request_inference_time_seconds_count": 3, "request_decode_time_seconds_count": 3,
    }  # fmt: skip
    assert {name: found[prefix + name, ""] for name in expected} == expected
    assert found[f"{prefix}request_success_total", "length"] == 6
    assert found[f"{prefix}prompt_tokens_by_source_total", "local_compute"] == 12
    assert later[f"{prefix}prompt_tokens_by_source_total", "local_cache_hit"] == hits
    assert found[f"{prefix}num_requests_waiting_by_reason", "capacity"] == 0
    assert 0 < found[f"{prefix}decode_steps_total", ""] < found[f"{prefix}iteration_tokens_total_count", ""]
    for kind in ("", "cpu_"):
        assert all(found[f"{prefix}decode_host_{kind}seconds_total", part] > 0 for part in HOST_PARTS)
    # Prompts and decode steps, each token once but the last of an answer, which is not fed. Other servers' come before.
    assert later[f"{prefix}iteration_tokens_total_sum", ""] > found[f"{prefix}iteration_tokens_total_sum", ""] >= 36
    assert found[f"{prefix}inter_token_latency_seconds_bucket", "+Inf"] == 24


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_leaves_is_counted_as_aborted_with_its_tokens(
    llm: LLM, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left, steps = llm.runner.decode, threading.Event(), count()

    def decode(*given: Any) -> Any:
        assert next(steps) < 20 or left.wait(120)
        return real(*given)

    monkeypatch.setattr(llm.runner, "decode", decode)
    with serve_in_thread(llm, ServeOptions(model_names=(NAME,))) as serving:
        before = values(serving)
        sent = json.dumps({"prompt": "abcd", "max_tokens": 400, "ignore_eos": True, "stream": stream}).encode()
        host, _, port = serving.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            client.sendall(b"content-length: %d\r\n\r\n%b" % (len(sent), sent))
            while values(serving)["onewave:generation_tokens_total", ""] < 3:
                pass
        while serving.served.engine.num_requests:
            pass
        left.set()
        while not (found := values(serving)).get(("onewave:request_success_total", "abort")):
            pass
    assert found["onewave:request_success_total", "abort"] == 1
    assert found["onewave:prompt_tokens_total", ""] - before["onewave:prompt_tokens_total", ""] == 4
    assert found["onewave:generation_tokens_total", ""] >= 3
