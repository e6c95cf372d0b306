"""Threads that share an engine: one at a time works with it, and whoever waits for tokens makes them.

The first to come has the turn and steps until it has what it waits for. Those who come meanwhile line up and sleep.
After every step it wakes all whose wait is over; when it leaves, the next in line goes on. Who wants the engine to
itself goes before those who wait for tokens, so nobody is passed over for as long as others have something to do.

Ctrl-C raises KeyboardInterrupt where a function of Python's begins or after any call, here as well, and must not leave
a turn with a thread that has gone. So whoever gives its turn back tries again when that was cut short; every change is
a single operation, and `_hand_on` takes up what it finds half done. `with` and a Python object would not do: nothing
calls __exit__ again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeVar

from onewave.base.errors import OnewaveError

__all__ = ["Turns"]

_Result = TypeVar("_Result")


class _Waiter:
    """One call's place in the line. ready: whether its wait is over; None for one that wants the turn itself."""

    __slots__ = ("asleep", "ready", "thread")

    def __init__(self, ready: Callable[[], bool] | None) -> None:
        self.ready = ready
        self.thread = threading.get_ident()
        self.asleep: threading.Lock | None = None

    def wake(self) -> None:
        """Let its thread go on. The mutex must be held."""
        if self.asleep is not None and self.asleep.locked():
            self.asleep.release()


class Turns:
    """Whose turn it is. A call from within a step, on the thread that makes it, is refused with OnewaveError."""

    def __init__(self) -> None:
        # Of the line and of giving the turn back; held for moments, never during a step.
        self._mutex = threading.Lock()
        # Who has the turn, if anybody. A dictionary, as setdefault takes the turn in one operation, mutex or not.
        self._turn: dict[Literal["owner"], _Waiter] = {}
        self._line: list[_Waiter] = []
        self._posted: deque[Callable[[], None]] = deque()

    def until(self, ready: Callable[[], bool], step: Callable[[], None]) -> None:
        """Return once `ready()` holds, calling `step` as often as it takes unless another thread does. `ready` is asked
        between steps, by any thread; the error of a step is raised where it was made."""

        def wait_or_step(waiter: _Waiter) -> bool:
            if not self._enter(waiter):
                return True
            while True:
                if self._posted:
                    self._run_posted()
                if ready():
                    return True
                if self._line and self._wake():
                    return False
                step()

        while not self._and_leave(_Waiter(ready), wait_or_step):
            pass

    def alone(self, work: Callable[[], _Result]) -> _Result:
        """Have the turn for `work()`, whose result this returns: nobody steps meanwhile."""

        def enter_and_work(waiter: _Waiter) -> _Result:
            self._enter(waiter)
            self._run_posted()
            return work()

        return self._and_leave(_Waiter(None), enter_and_work)

    def post(self, job: Callable[[], None]) -> None:
        """Have a job done while nobody steps: now, or by whoever has the turn as soon as its step is over. Never waits,
        so that it may come from anywhere: from the garbage collector in the middle of this thread's own step, too."""
        self._posted.append(job)
        self._settle()

    def _and_leave(self, waiter: _Waiter, work: Callable[[_Waiter], _Result]) -> _Result:
        """Return `work(waiter)`; whatever happens there or here, the waiter is out of line and turn then."""
        try:
            return work(waiter)
        finally:
            try:
                self._leave(waiter)
            except BaseException:
                self._leave(waiter)
                raise

    def _settle(self) -> None:
        """Do what is posted, unless somebody else is about to."""
        # Whoever has the turn or the mutex, perhaps this very thread further down, looks at what is posted afterwards.
        if not self._turn and not self._mutex.locked():
            self._and_leave(_Waiter(None), lambda waiter: self._turn.setdefault("owner", waiter))

    def _run_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _enter(self, waiter: _Waiter) -> bool:
        """Wait for the turn, or for the end of the wait. Returns whether it is the turn."""
        with self._mutex:
            owner = self._turn.setdefault("owner", waiter)
            if owner is waiter:
                return True
            if owner.thread == waiter.thread:
                raise OnewaveError("LLM", got="called from within one of its own steps", next="Call it afterwards.")
            waiter.asleep = threading.Lock()
            waiter.asleep.acquire()
            self._line.append(waiter)
        waiter.asleep.acquire()
        return self._turn.get("owner") is waiter

    def _leave(self, waiter: _Waiter) -> None:
        """Give the turn, or the place in the line, up; nothing for one that has neither."""
        try:
            if self._posted and self._turn.get("owner") is waiter:
                self._run_posted()
        finally:
            with self._mutex:
                if waiter in self._line:
                    self._line.remove(waiter)
                if self._turn.get("owner") is waiter:
                    del self._turn["owner"]
                self._hand_on()
        if self._posted:
            self._settle()

    def _wake(self) -> bool:
        """Wake those whose wait is over. Returns whether somebody wants the turn itself."""
        with self._mutex:
            self._wake_ready()
            # Not with any(): a generator that is dropped half-way swallows Ctrl-C.
            return None in [each.ready for each in self._line]

    def _wake_ready(self) -> None:
        for each in [each for each in self._line if each.ready is not None and each.ready()]:
            each.wake()
            self._line.remove(each)

    def _hand_on(self) -> None:
        """If nobody has the turn, wake those whose wait is over and give it to the next of the others."""
        if not self._turn and self._line:
            self._wake_ready()
            following = [each for each in self._line if each.ready is None] or self._line
            if following:
                self._turn.setdefault("owner", following[0])
        owner = self._turn.get("owner")
        if owner in self._line:
            owner.wake()
            self._line.remove(owner)
