"""Messages of commands when a model is loaded."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from onewave.cli.session import open_llm
from onewave.engine import llm


@pytest.mark.parametrize(("path", "cache", "said"), [("wave", "bfloat16", ""), ("graph", "fp8", ", KV cache: fp8")])
def test_a_gpu_says_on_stderr_how_it_decodes(
    path: str, cache: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def load(model: str, **options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(decode_path=path, kv_cache_dtype=cache, load_seconds={"weights": 0.5, "imports": 0.25})

    monkeypatch.setattr(llm, "LLM", load)
    opened = open_llm("llama-3.2-1b", load_format="dummy", decode="auto")
    assert opened.llm.decode_path == path
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"ready after [\d.]+ s \(weights 0\.50, imports 0\.2\d\), decoding: {path}{said}\n", err)
    assert asked[0]["decode"] == "auto"


def test_a_cpu_has_one_way_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm, "LLM", lambda model, **options: SimpleNamespace(decode_path="eager"))
    open_llm("llama-3.2-1b", load_format="dummy")
    assert capsys.readouterr() == ("", "")
