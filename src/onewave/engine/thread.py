"""The one thread that makes an engine's steps. Callers send it jobs and sleep until their requests have news.

A caller adds its requests with `call` and then waits for their updates; the thread steps as long as a request runs and
does jobs between two steps. Whatever passes between threads goes through a SimpleQueue: its put and get are single
calls into C. Ctrl-C leaves none half done, as it may a Condition, which is Python code. And put never waits: the
garbage collector may close a stream anywhere, in the middle of this thread's own step too.
"""

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from onewave.base.errors import OnewaveError, UnsupportedError
from onewave.engine.engine import Engine

_Result = TypeVar("_Result")
_Inbox = SimpleQueue[Callable[[], object] | SimpleQueue[None]]

_log = logging.getLogger("onewave")
# Exit waits for the step under way: the interpreter aborts where it ends a thread that is inside of PyTorch.
_EXIT_SECONDS = 10.0


class _Mailbox:
    """State that callers share with the thread, in one process.

    inbox: jobs; a queue ends the thread, which then puts None into it. serving: held by the thread while it serves the
    inbox, so that there are never two. ident: of that thread. step_began: by the performance counter; None
    between steps. failed: steps that raised since the last one that did not.
    """

    def __init__(self) -> None:
        self.inbox: _Inbox = SimpleQueue()
        self.serving = threading.Lock()
        self.ident: int | None = None
        self.step_began: float | None = None
        self.failed = 0
        self.pid = os.getpid()


class EngineThread:
    """A daemon thread that begins with the first call. It ends with `end`, when this object is collected, and at exit.

    Holds the engine weakly. A forked child has no thread: the first that is asked of this object there ends what ran in
    the parent, and the first call begins a thread. A GPU can't be used from there: UnsupportedError says so.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._mailbox = self._new_mailbox()

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Have the thread do some work between two steps. Returns its result, or raises its error.

        Raises OnewaveError for a call from within a step.
        """
        self._look_for_fork()
        if threading.get_ident() == self._mailbox.ident:
            raise OnewaveError("LLM", got="called from within one of its own steps", next="Call it afterwards.")
        answer: SimpleQueue[tuple[_Result] | BaseException] = SimpleQueue()

        def job() -> None:
            try:
                answer.put((work(),))
            except BaseException as error:
                answer.put(error)

        self._mailbox.inbox.put(job)
        self._begin()
        found = answer.get()
        if isinstance(found, BaseException):
            try:
                raise found
            finally:
                del found  # its traceback holds this frame
        return found[0]

    def post(self, job: Callable[[], object]) -> None:
        """Have the thread do a job on running requests between two steps, without waiting for it."""
        self._mailbox.inbox.put(job)

    def submit(self, job: Callable[[], object]) -> None:
        """Have the thread do a job between two steps, without waiting for it; begin the thread where there is none."""
        self._look_for_fork()
        self._mailbox.inbox.put(job)
        self._begin()

    @property
    def step_seconds(self) -> float:
        """Seconds that the step under way has taken so far; 0 between steps."""
        began = self._mailbox.step_began
        return 0.0 if began is None else time.perf_counter() - began

    @property
    def failed_steps(self) -> int:
        """Steps that raised since the last one that did not."""
        return self._mailbox.failed

    def traceback(self) -> str:
        """Where the thread is now, as text; "" where there is none."""
        frame = sys._current_frames().get(self._mailbox.ident or 0)  # pyright: ignore[reportPrivateUsage] (documented)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def wait(self, updates: SimpleQueue[_Result]) -> _Result:
        """Return what the thread has put into a queue of a running request, as soon as there is something."""
        self._look_for_fork()
        return updates.get()

    def end(self) -> None:
        """Return once the thread has ended and holds nothing."""
        ended: SimpleQueue[None] = SimpleQueue()
        self._mailbox.inbox.put(ended)
        self._begin()
        ended.get()

    def _new_mailbox(self) -> _Mailbox:
        mailbox = _Mailbox()
        weakref.finalize(self, mailbox.inbox.put, SimpleQueue()).atexit = False
        atexit.register(_end_at_exit, mailbox)
        return mailbox

    def _begin(self) -> None:
        """Start the thread unless it is there. A job must lie in the inbox already: a thread that lets go of the lock
        looks there once more."""
        mailbox = self._mailbox
        if not mailbox.serving.locked():
            threading.Thread(target=_run, args=(mailbox, self._engine), name="onewave", daemon=True).start()

    def _look_for_fork(self) -> None:
        if self._mailbox.pid == os.getpid():
            return
        engine = self._engine()
        if engine is not None and engine.stream is not None:
            got = f"made on {engine.stream.device}, in a process that then was forked"
            raise UnsupportedError("LLM", got=got, next='Make it in a process that multiprocessing starts by "spawn".')
        self._mailbox = self._new_mailbox()
        if engine is not None:
            engine.abort_all(OnewaveError("request", got="begun before this process was forked", next="Send it again."))
            engine.tell_readers()


def _run(mailbox: _Mailbox, engine_of: weakref.ref[Engine]) -> None:
    while mailbox.serving.acquire(blocking=False):
        mailbox.ident = threading.get_ident()
        try:
            ended = _serve(mailbox, engine_of)
        finally:
            mailbox.ident = None
            mailbox.serving.release()
        ended.put(None)
        if mailbox.inbox.empty():
            return


def _serve(mailbox: _Mailbox, engine_of: weakref.ref[Engine]) -> SimpleQueue[None]:
    """Do jobs and make steps until a queue comes, which this returns; hold nothing while there is neither."""
    inbox, engine = mailbox.inbox, engine_of()
    stream = None if engine is None else engine.stream
    del engine
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        job = inbox.get()
        while callable(job):
            try:
                job()
            except Exception:  # of a posted one: no caller waits for it
                _log.exception("a job between two steps failed")
            engine = engine_of()
            if engine is not None:
                engine.tell_readers()
                while engine.has_work and inbox.empty():
                    mailbox.step_began = time.perf_counter()
                    _step(engine, mailbox)
                mailbox.step_began = None
                engine.tell_readers()
            del job, engine
            job = inbox.get()
    return job


def _step(engine: Engine, mailbox: _Mailbox) -> None:
    tells_later = False
    try:
        tells_later = engine.step()
        mailbox.failed = 0
    except BaseException as error:
        # The requests that it ended have copies for their callers.
        mailbox.failed += 1
        _log.debug("a step failed: %s", type(error).__name__)
    # Only now: a reader that is told finds that the frames of the failed step, and what they held, are gone.
    if not tells_later:
        engine.tell_readers()


def _end_at_exit(mailbox: _Mailbox) -> None:
    if mailbox.pid == os.getpid() and mailbox.serving.locked():
        ended: SimpleQueue[None] = SimpleQueue()
        mailbox.inbox.put(ended)
        with suppress(Empty):
            ended.get(timeout=_EXIT_SECONDS)
