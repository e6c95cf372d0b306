"""A clock for what works until a time is over."""

from itertools import count
from types import ModuleType, SimpleNamespace

import pytest


def count_looks(monkeypatch: pytest.MonkeyPatch, step_s: float, *modules: ModuleType) -> None:
    """Have a clock that these modules share go on by `step_s` whenever one looks at it, and not otherwise: they get as
    far within a time limit on any machine."""
    looks = count()

    def look() -> float:
        return next(looks) * step_s

    for module in modules:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=look, perf_counter=look))
