"""A load's time by phase."""

from collections.abc import Iterator

import pytest

from onewave.engine.load import stopwatch
from onewave.engine.load.stopwatch import Stopwatch


def test_a_phase_within_another_one_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[float] = iter([0.0, 1.0, 4.0, 9.0, 20.0, 21.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(times))
    watch = Stopwatch()
    with watch.phase("imports"), watch.phase("hashes"):
        pass
    with watch.phase("imports"):
        pass
    assert watch.seconds == {"imports": 7.0, "hashes": 3.0}
