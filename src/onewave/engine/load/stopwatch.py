"""Where a load's time goes, by phase."""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

_log = logging.getLogger("onewave.stages")


class Stopwatch:
    """Seconds of each phase of a load, in the order in which they began. One thread's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add what happens meanwhile to a phase, but for phases within it."""
        _log.debug("loading: %s", name)
        self.seconds.setdefault(name, 0.0)
        began, before = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            within = sum(self.seconds.values()) - before
            self.seconds[name] += time.perf_counter() - began - within


class _Told(logging.Handler):
    def __init__(self, told: Callable[[str], None]) -> None:
        super().__init__()
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told(record.getMessage())


@contextmanager
def phases_told(told: Callable[[str], None]) -> Generator[None]:
    """Meanwhile, have each phase of any load told as it begins."""
    handler, level = _Told(told), _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)


def in_words(seconds: float, parts: dict[str, float]) -> str:
    """Say how long something took and where that went; what took less than 5 ms is left out."""
    named = {**parts, "the rest": seconds - sum(parts.values())}
    shown = [f"{name} {each:.2f}" for name, each in named.items() if each >= 0.005]
    return f"{seconds:.2f} s ({', '.join(shown)})" if shown else f"{seconds:.2f} s"
