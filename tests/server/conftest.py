"""One server of a tiny model for all tests of this folder that need nothing of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the server needs onewave[serve]")

from kit.browser import browser as browser
from kit.serving import Serving, serve_in_thread, tiny_llm


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A tiny model that listens."""
    with tiny_llm(tmp_path_factory.mktemp("tiny"), max_num_seqs=8) as llm, serve_in_thread(llm) as found:
        yield found
