"""Fixtures for every room."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file, fetched into the user's cache the first time."""
    from onewave.base.settings import Settings
    from onewave.weights.sources import resolve

    path = resolve("smollm2-135m-instruct", Settings.from_env(), progress=False).path
    assert path is not None
    return path
