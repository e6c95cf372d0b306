"""The official `openai` client against the server."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kit.serving import NAME, Serving, serve_in_thread
from onewave.engine.llm import LLM


def calls_made(url: str) -> int:
    # Imported here: whoever collects these tests would wait for it.
    openai = pytest.importorskip("openai", reason="the official client is not installed")
    from kit.serving.openai_calls import run_all

    options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}
    return run_all(openai.OpenAI(**options), openai.AsyncOpenAI(**options), NAME)


def test_the_official_client_is_content_with_every_answer(serving: Serving) -> None:
    assert calls_made(serving.url) >= 60


@pytest.mark.slow
def test_and_with_those_of_the_demo_model(smollm2_path: Path) -> None:
    with LLM(smollm2_path, device="cpu", max_model_len=512) as llm, serve_in_thread(llm) as found:
        assert calls_made(found.url) >= 60


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no Node")
def test_the_official_node_client_is_content_too(serving: Serving, tmp_path: Path) -> None:
    subprocess.run(["npm", "install", "openai"], cwd=tmp_path, check=True, capture_output=True, timeout=200)
    script = shutil.copy(Path(__file__).with_name("openai_calls.mjs"), tmp_path)
    done = subprocess.run(
        ["node", script, f"{serving.url}/v1", NAME], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 60
