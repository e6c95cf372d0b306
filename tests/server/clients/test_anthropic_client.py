"""The official `anthropic` client against the server."""

from pathlib import Path

import pytest

from kit.serving import NAME, Serving, serve_in_thread
from onewave.engine.llm import LLM


def calls_made(url: str) -> int:
    # Imported here: whoever collects these tests would wait two seconds for it.
    anthropic = pytest.importorskip("anthropic", reason="the official client is not installed")
    pytest.importorskip("llguidance", reason="forced calls need it")
    from kit.serving.anthropic_calls import run_all

    return run_all(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120), NAME)


def test_the_official_anthropic_client_is_content_with_every_answer(plain: Serving) -> None:
    assert calls_made(plain.url) >= 60


@pytest.mark.slow
def test_the_anthropic_client_is_content_with_the_demo_model(smollm2_path: Path) -> None:
    with LLM(smollm2_path, device="cpu", max_model_len=2048) as llm, serve_in_thread(llm) as found:
        assert calls_made(found.url) >= 60
