"""Servers of tiny models of random weights, for all tests of this folder that need nothing of their own."""

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the server needs onewave[serve]")

from kit.browser import browser as browser
from kit.models.chat_templates import QWEN3
from kit.serving import NAME, Serving, serve_in_thread, tiny_llm
from onewave.server.options import ServeOptions

_SHARED: list[Serving] = []


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Have requests without a seed draw the same numbers in a test whichever ran before it."""
    for each in _SHARED:
        each.llm.run_between_steps(lambda engine: engine and setattr(engine, "_num_requests", 0))


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A tiny model that listens."""
    with tiny_llm(tmp_path_factory.mktemp("tiny"), max_num_seqs=8) as llm, serve_in_thread(llm) as found:
        _SHARED.append(found)
        yield found


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One whose chat template reads tools and knows thoughts."""
    opening = "{% if enable_thinking is defined and enable_thinking is true %}{{ '<think>\\n' }}{% endif %}"
    made = tiny_llm(tmp_path_factory.mktemp("qwen"), positions=4096, chat_template=QWEN3 + opening)
    options = ServeOptions(model_names=(NAME,), trust_request_chat_template=True)
    with made as llm, serve_in_thread(llm, options) as found:
        _SHARED.append(found)
        yield found


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One whose chat template does neither."""
    with tiny_llm(tmp_path_factory.mktemp("plain"), positions=4096) as llm, serve_in_thread(llm) as found:
        _SHARED.append(found)
        yield found
