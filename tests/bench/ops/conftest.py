"""Operators are timed on a CPU with few copies of their operands, and its ceilings on small ones."""

import pytest

from onewave.bench import ceilings
from onewave.bench.ops import attention


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BYTES_IN_ROTATION", {"cpu": 1})
    # The real sizes take a CPU half a minute.
    monkeypatch.setattr(ceilings, "_CPU_READ_BYTES", 2**22)
    monkeypatch.setattr(ceilings, "_CPU_MATRIX", 64)
