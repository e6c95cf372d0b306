"""Fixtures for every room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Kernels under test run in Triton's interpreter where there is no card. Set before anything imports Triton, which
# prepares its own library for one or the other then; transformers imports it too.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from kit.numpy_gpu.interpreter_products import sum_in_one_order

    sum_in_one_order()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file, fetched into the user's cache the first time."""
    from onewave.base.settings import Settings
    from onewave.weights.fetch.sources import resolve

    path = resolve("smollm2-135m-instruct", Settings.from_env(), progress=False).path
    assert path is not None
    return path
