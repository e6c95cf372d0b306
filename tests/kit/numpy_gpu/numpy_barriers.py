"""mbarriers, waits that give up, and partitions as threads, for gluon_in_numpy."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kit.numpy_gpu import happens_before

LIMIT_S = 200.0


FAILED = threading.Event()
"""Set by whatever fails first in a launch, so that nobody waits for it to the end."""


class Patience:
    """A wait's limit."""

    def __init__(self, complaint: str):
        self.complaint, self.until = complaint, time.monotonic() + LIMIT_S

    def look(self) -> None:
        """Raise TimeoutError once the time is up or somebody has failed."""
        if FAILED.is_set() or time.monotonic() > self.until:
            raise TimeoutError(self.complaint)


class Barrier:
    """An mbarrier: a phase ends with `count` arrivals and all expected bytes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.arrived = self.phase = self.bytes = 0
        self.heard = happens_before.Heard()

    def add(self, arrivals: int, expected: int, landed: int, clock: Any = None) -> None:
        """clock: what bytes that landed tell (happens_before.bring)."""
        with self.changed:
            self.heard.arrive(clock)
            self.arrived, self.bytes = self.arrived + arrivals, self.bytes + expected - landed
            assert self.arrived <= self.count, "more arrivals than a phase has"
            if self.arrived == self.count and self.bytes == 0:
                self.arrived, self.phase = 0, self.phase + 1
                self.heard.end_phase()
                self.changed.notify_all()

    def wait(self, parity: int, *, hears: bool = True) -> None:
        """hears: false for a wait that only happens to take long enough, as if it were not there."""
        with self.changed:
            waiting = Patience("a barrier's phase never ended")
            while not self.changed.wait_for(lambda: self.phase & 1 != parity, timeout=0.05):
                waiting.look()
            if hears:
                self.heard.acquire()


class Barriers(list[Barrier]):
    def index(self, at: Any) -> Barrier:
        return self[int(at)]


def run_side_by_side(calls: Sequence[Callable[[], Any]]) -> None:
    """Run all in threads; raises the first error."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], Any]) -> None:
        try:
            with np.errstate(all="ignore"):
                call()
        except BaseException as error:
            # Whoever gave up waiting is not the one to blame.
            errors.append(error)
            FAILED.set()

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, TimeoutError))
