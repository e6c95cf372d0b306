"""Threads that share an engine: one at a time works with it, and whoever waits for tokens makes them.

The first to come has the turn and steps until it has what it waits for. Those who come meanwhile line up and sleep.
After every step it wakes all whose wait is over; when it leaves, the next in line goes on. Who wants the engine to
itself goes before those who wait for tokens, so nobody is passed over for as long as others have something to do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

from onewave.base.errors import OnewaveError

__all__ = ["Turns"]


class _Waiter:
    """One call's place in the line. ready: whether its wait is over; None for one that wants the turn itself."""

    __slots__ = ("asleep", "ready", "thread")

    def __init__(self, ready: Callable[[], bool] | None) -> None:
        self.ready = ready
        self.thread = threading.get_ident()
        self.asleep: threading.Lock | None = None


class Turns:
    """Whose turn it is. A call from within a step, on the thread that makes it, is refused with OnewaveError."""

    def __init__(self) -> None:
        # Of the owner and the line; held for moments, never during a step.
        self._mutex = threading.Lock()
        self._owner: _Waiter | None = None
        self._line: list[_Waiter] = []
        self._posted: deque[Callable[[], None]] = deque()

    def until(self, ready: Callable[[], bool], step: Callable[[], None]) -> None:
        """Return once `ready()` holds, calling `step` as often as it takes unless another thread does. `ready` is asked
        between steps, by any thread; the error of a step is raised where it was made."""
        while True:
            waiter = _Waiter(ready)
            try:
                if not self._enter(waiter):
                    return
                while True:
                    if self._posted:
                        self._run_posted()
                    if ready():
                        return
                    if self._line and self._wake():
                        break
                    step()
            finally:
                self._leave(waiter)

    @contextmanager
    def alone(self) -> Generator[None]:
        """Have the turn for the block: nobody steps meanwhile."""
        waiter = _Waiter(None)
        try:
            self._enter(waiter)
            self._run_posted()
            yield
        finally:
            self._leave(waiter)

    def post(self, job: Callable[[], None]) -> None:
        """Have a job done while nobody steps: now, or by whoever has the turn as soon as its step is over. Never waits,
        so that it may come from anywhere: from the garbage collector in the middle of this thread's own step, too."""
        self._posted.append(job)
        self._settle()

    def _settle(self) -> None:
        """Do what is posted, unless somebody else is about to."""
        waiter = _Waiter(None)
        try:
            # Whoever holds the mutex, perhaps this very thread further down, looks at what is posted afterwards.
            if self._mutex.acquire(blocking=False):
                try:
                    if self._owner is None:
                        self._owner = waiter
                finally:
                    self._mutex.release()
        finally:
            if self._owner is waiter:
                self._leave(waiter)

    def _run_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _enter(self, waiter: _Waiter) -> bool:
        """Wait for the turn, or for the end of the wait. Returns whether it is the turn."""
        with self._mutex:
            if self._owner is None:
                self._owner = waiter
                return True
            if self._owner.thread == waiter.thread:
                raise OnewaveError("LLM", got="called from within one of its own steps", next="Call it afterwards.")
            waiter.asleep = threading.Lock()
            waiter.asleep.acquire()
            self._line.append(waiter)
        waiter.asleep.acquire()
        return self._owner is waiter

    def _leave(self, waiter: _Waiter) -> None:
        """Give the turn, or the place in the line, up; nothing for one that has neither."""
        try:
            if self._posted and self._owner is waiter:
                self._run_posted()
        finally:
            with self._mutex:
                if self._owner is waiter:
                    self._owner = None
                    if self._line:
                        self._hand_on()
                elif waiter in self._line:
                    self._line.remove(waiter)
        if self._posted:
            self._settle()

    def _wake(self) -> bool:
        """Wake those whose wait is over. Returns whether somebody wants the turn itself."""
        with self._mutex:
            self._wake_ready()
            return any(each.ready is None for each in self._line)

    def _wake_ready(self) -> None:
        for each in [each for each in self._line if each.ready is not None and each.ready()]:
            self._line.remove(each)
            assert each.asleep is not None
            each.asleep.release()

    def _hand_on(self) -> None:
        """Wake those whose wait is over, and give the turn to the next of the others."""
        self._wake_ready()
        following = next((each for each in self._line if each.ready is None), self._line[0] if self._line else None)
        if following is not None:
            self._line.remove(following)
            self._owner = following
            assert following.asleep is not None
            following.asleep.release()
