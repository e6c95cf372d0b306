"""Compiling Triton's kernels in processes of their own: its compiler holds Python's lock for most of the time."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch

from onewave.base.errors import OnewaveError

_Result = TypeVar("_Result")
_log = logging.getLogger("onewave")
_PR_SET_PDEATHSIG = 1


class _GivenUpError(Exception):
    """The caller of this thread was interrupted and no longer waits for it."""


@contextmanager
def processes(count: int) -> Generator[ProcessPoolExecutor | None]:
    """So many processes. None for fewer than two, in a daemon, which may have no processes of its own, and where the
    system refuses.

    Forked from this one, which takes a moment, while it has one thread and has not used CUDA. Later a fork would keep
    other threads' locks for ever, so each begins with a Python of its own, which takes two seconds to import PyTorch.
    """
    if count < 2 or multiprocessing.current_process().daemon:
        yield None
        return
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    may_fork = alone and "fork" in multiprocessing.get_all_start_methods()
    others = multiprocessing.active_children()
    context = multiprocessing.get_context("fork") if may_fork else _Spawning()
    with ProcessPoolExecutor(count, context, initializer=_prepare) as pool:
        started = True
        try:
            # The first job forks all of them, while there is one thread; each of these spawns one. From this thread:
            # they end with it.
            for _ in range(count):
                pool.submit(int)
        except OSError:  # no memory, or no more processes
            started = False
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
                    process.join()
        yield pool if started else None


class _SpawnedProcess(SpawnProcess):
    """One that does not run the caller's script again, which may be without the guard that spawning asks for."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)  # pyright: ignore
        finally:
            sys.modules["__main__"] = main


class _Spawning(SpawnContext):
    Process = _SpawnedProcess


def done_by(pool: ProcessPoolExecutor | None, job: Callable[[], _Result]) -> _Result:
    """Return what a job makes, in a process of the pool or, without one and where the pool fails, in this one."""
    if pool is not None:
        try:
            return pool.submit(job).result()
        except OnewaveError:
            raise
        except Exception as error:
            # Whatever it was: what fails there fails here again, with its own words.
            _log.debug("again, in this process: %s: %s", type(error).__name__, error)
    return job()


def _prepare() -> None:
    """Prepare a process's first compilation, while the process that asks for it still looks for its GPU."""
    from triton.runtime.cache import triton_key

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that waits
    _end_with_parent()
    gc.disable()  # a kernel's syntax trees are many objects, and the process does not last
    triton_key()  # reads all of Triton's own files


def _end_with_parent() -> None:
    """Have Linux end this process when the one that forked it is killed, which can't tell its pool."""
    parent = multiprocessing.parent_process()
    if sys.platform == "linux" and parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # before that was said
            os._exit(1)


@contextmanager
def compile_in(pool: ProcessPoolExecutor | None) -> Generator[Callable[[], None]]:
    """Meanwhile, whatever any thread has Triton compile is compiled by the pool first, into Triton's cache on disk,
    where Triton then finds it. None: nothing changes.

    Gives what an interrupted caller calls before it waits for its threads: the pool's processes end at once, and what
    is not compiled by then fails.
    """
    if pool is None:
        yield lambda: None
        return
    from triton import knobs
    from triton.runtime import driver

    before = knobs.runtime.jit_cache_hook
    given_up = threading.Event()

    def give_up() -> None:
        given_up.set()
        for process in list((pool._processes or {}).values()):  # pyright: ignore[reportPrivateUsage] (public from 3.14)
            process.kill()
        # One that died amid its result leaves the rest to be waited for, as long as anyone could still write it.
        pool._result_queue._writer.close()  # pyright: ignore

    def hook(**given: Any) -> bool | None:
        fn, known = given["fn"], given["compile"]
        source = (fn.module, fn.name, known["signature"], known["constants"], known["configs"][0])
        options = json.loads(known["specialization_data"])["options"]
        # A failure there repeats here, with its own words; a broken pool leaves all to Triton.
        with suppress(RuntimeError):
            wait([pool.submit(compile_kernel, *source, options, driver.active.get_current_target())])
        if given_up.is_set():
            # Not True, with which Triton would pass over the launch: what follows would read what it has not written.
            raise _GivenUpError
        return None if before is None else before(**given)

    knobs.runtime.jit_cache_hook = hook
    try:
        yield give_up
    finally:
        if knobs.runtime.jit_cache_hook is hook:
            knobs.runtime.jit_cache_hook = before


def compile_kernel(
    module: str,
    name: str,
    signature: Mapping[str, object],
    constants: Mapping[tuple[int, ...], object],
    attributes: Mapping[tuple[int, ...], object],
    options: Mapping[str, object],
    target: object,
) -> None:
    """Compile one variant of the kernel of that name into Triton's cache. Uses no device.

    signature, constants, attributes, options, target: as Triton's jit_cache_hook tells them.
    """
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from onewave.gpu.hashes import hash_in_order

    kernel = getattr(import_module(module), name)
    hash_in_order(kernel)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    with _launcher_beside(source):
        triton.compile(source, target=target, options=given)


@contextmanager
def _launcher_beside(source: Any) -> Generator[None]:
    """Meanwhile, have a C compiler make what launches the kernel, too, as soon as its compilation knows the arguments:
    the first launch would wait for that, half a second of it."""
    from triton import knobs

    before: Callable[..., Any] | None = knobs.runtime.add_stages_inspection_hook
    threads: list[threading.Thread] = []

    def hook(*given: Any) -> Any:
        if not given:  # Triton from 3.7 on asks what the hook does to a kernel, as (key, digest): nothing
            return ("", "") if before is None else before()
        said = None if before is None else before(*given)
        stages: dict[str, Callable[..., Any]] = given[1]
        make = stages.get("llir")
        if make is not None:

            def make_beside(module: Any, metadata: dict[str, Any]) -> Any:
                thread = threading.Thread(target=_make_launcher, args=(source, dict(metadata)))
                with suppress(RuntimeError):  # no more threads: the launch makes it
                    thread.start()
                    threads.append(thread)
                return make(module, metadata)

            stages["llir"] = make_beside
        return said

    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        if knobs.runtime.add_stages_inspection_hook is hook:
            knobs.runtime.add_stages_inspection_hook = before
        for thread in threads:
            thread.join()


def _make_launcher(source: Any, metadata: Mapping[str, Any]) -> None:
    """Triton's launcher of a kernel, into Triton's cache. metadata: as far as the compilation knows it."""
    # If this fails, or the Triton is another, the launch makes it, with its own errors.
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        later = dict.fromkeys(("global_scratch_size", "global_scratch_align", "profile_scratch_size"), 0)
        CudaLauncher(source, SimpleNamespace(**later | {"profile_scratch_align": 1} | dict(metadata)))
