"""A team of threads for the CPU kernels, made for decoding: many tiny jobs, back to back.

A job is a kernel and a number of items, cut into chunks. The calling thread and the workers draw chunks from one ticket
counter, and the caller returns when every drawn chunk is done. It never waits for a thread that has not drawn anything:
when other programs keep the cores busy, a worker that gets no time costs nothing but its help. (A pool that gives every
thread a fixed share stalls for a time slice at each of the hundred-odd jobs of a step.)

The ticket is one 64-bit word: 24 bits job number, 20 bits chunks of the job, 20 bits next chunk. Drawing adds one and
looks at what was there, so a thread that comes late draws from the newest job or sees that nothing is left; it can't
mix up two jobs. A job's kernel and arguments are written before its ticket and stay until all its chunks are done.

Workers spin between jobs for a few milliseconds, then leave compiled code and sleep until the next job wakes them.
While a list of jobs runs they do not sleep.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic
from numpy.typing import NDArray

from onewave.base.settings import Settings
from onewave.ops.cpu.math_impl import FAST, integers

# Places in the shared int64 array, each on its own cache line.
_TICKET, _DONE, _BUSY, _KERNEL, _TABLE, _CHUNK, _COUNT, _LISTS = (8 * i for i in range(8))
_MAX_ARGUMENTS = 18
_PADDING = (0,) * _MAX_ARGUMENTS
_MAX_CHUNKS = 4096
# One poll is an atomic load, a few nanoseconds.
_IDLE_POLLS = 1_000_000
_WAIT_POLLS = 20_000
# Parts of a list of jobs before each of which sleeping workers are woken: that takes a microsecond.
_LIST_PARTS = 8

_SIGNATURE = types.void(types.int64, types.int64, types.int64)
_LEAD_SIGNATURE = types.void(
    types.int64, types.int64, types.float64, types.UniTuple(types.int64, _MAX_ARGUMENTS), types.int64, types.int64
)
_LEAD_ALL_SIGNATURE = types.void(types.int64, types.int64, types.int64)
# int64 of a job in a list: the kernel's address, items, items a chunk, and the table that the kernel reads.
_JOB_WORDS = 3 + 1 + _MAX_ARGUMENTS


# Files below ops/ from which kernels of other files inline: Numba does not notice when one changes.
_INLINED = (
    *(f"cpu/{name}" for name in ("__init__", "math_impl", "team_impl", "vectors_impl")),
    *(f"linear/{name}" for name in ("loops_impl", "packed", "unpack_impl")),
)


def _drop_stale(function) -> None:
    """Delete what is kept on disk of a function if it is older than anything that it may have inlined."""
    folder = Path(__file__).parents[1]
    changed = max((folder / f"{name}.py").stat().st_mtime_ns for name in _INLINED)
    for index in Path(FunctionCache(function).cache_path).glob(f"*.{function.__name__}-*.nbi"):
        with suppress(FileNotFoundError):  # another process was faster
            if index.stat().st_mtime_ns < changed:
                index.unlink()


def _kept(decorator, *signature, **options):
    """A Numba decorator whose machine code is kept on disk, if Numba finds a folder there that it may write."""

    def decorate(function):
        try:
            _drop_stale(function)
            return decorator(*signature, cache=True, **options)(function)
        except (RuntimeError, PermissionError):
            # No folder, or another user's stale files in it: each process compiles for itself.
            return decorator(*signature, **options)(function)

    return decorate


class kernel:  # reads as a decorator
    """`function(table_at, first, last)`, compiled when first run: do items first..last-1.

    At table_at lie one float64 and the job's int64 arguments (see `Job`).
    """

    fastmath: ClassVar[set[str]] = FAST

    def __init__(self, function) -> None:
        self._function = function

    @cached_property
    def _compiled(self):
        # The NumPy error model: Python's check for a zero divisor would keep loops from being vectorised.
        return _kept(cfunc, _SIGNATURE, fastmath=self.fastmath, error_model="numpy")(self._function)

    @cached_property
    def address(self) -> int:
        address = self._compiled.address
        assert address is not None
        return address


class ordered_kernel(kernel):
    """A kernel whose sums LLVM leaves in the order in which they are written."""

    fastmath: ClassVar[set[str]] = set()


def _atomic(name: str, ordering: str = "seq_cst"):
    @intrinsic
    def operation(_context, address, value):
        def emit(_ctx, builder, _signature, args):
            pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw(name, pointer, args[1], ordering)

        return types.int64(types.int64, types.int64), emit

    return operation


_atomic_add, _atomic_swap = _atomic("add"), _atomic("xchg")


@intrinsic
def _atomic_load(_context, address):
    def emit(_ctx, builder, _signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def call(_context, function, table_at, first, last):
    """Call a kernel by its address."""

    def emit(_ctx, builder, _signature, args):
        word = ir.IntType(64)
        pointer = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [word] * 3).as_pointer())
        builder.call(pointer, args[1:])
        return _ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def _yield_core(_context):
    def emit(_ctx, builder, _signature, _args):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(function, [])
        return _ctx.get_dummy_value()

    return types.void(), emit


@njit(nogil=True)
def _draw(state_at):
    """Do chunks of the newest job until none is left; return that job's number."""
    state = integers(state_at, 64)
    while True:
        ticket = _atomic_add(state_at + _TICKET * 8, 1)
        chunk, chunks = ticket & 0xFFFFF, (ticket >> 20) & 0xFFFFF
        if chunk >= chunks:
            return (ticket >> 40) & 0xFFFFFF
        first = chunk * state[_CHUNK]
        call(state[_KERNEL], state[_TABLE], first, min(first + state[_CHUNK], state[_COUNT]))
        _atomic_add(state_at + _DONE * 8, 1)


@_kept(njit, nogil=True)
def _work(state_at, last_job):
    """A worker's loop. Returns the last job seen when none has come for a while and no list of jobs runs."""
    idle = 0
    while idle < _IDLE_POLLS:
        if (_atomic_load(state_at + _TICKET * 8) >> 40) & 0xFFFFFF == last_job:
            idle = idle + 1 if _atomic_load(state_at + _LISTS * 8) == 0 else 0
            continue
        last_job = _draw(state_at)
        idle = 0
    return last_job


@intrinsic
def _on_stack(_context, number, arguments):
    """Write the number and the arguments to the caller's stack frame; return the address."""

    def emit(_ctx, builder, _signature, args):
        word = ir.IntType(64)
        table = cgutils.alloca_once(builder, word, size=1 + _MAX_ARGUMENTS)
        builder.store(builder.bitcast(args[0], word), table)
        for place in range(_MAX_ARGUMENTS):
            at = builder.gep(table, [ir.IntType(32)(1 + place)])
            builder.store(builder.extract_value(args[1], place), at)
        return builder.ptrtoint(table, word)

    return types.int64(types.float64, types.UniTuple(types.int64, _MAX_ARGUMENTS)), emit


@njit(nogil=True)
def _do(state_at, function, table_at, count, chunk):
    """Run a job with the threads that help; alone when chunk is 0 or the team is busy with another caller's job."""
    if chunk == 0 or _atomic_swap(state_at + _BUSY * 8, 1) != 0:
        call(function, table_at, 0, count)
        return
    state = integers(state_at, 64)
    chunks = (count + chunk - 1) // chunk
    state[_KERNEL], state[_TABLE], state[_CHUNK], state[_COUNT] = function, table_at, chunk, count
    _atomic_swap(state_at + _DONE * 8, 0)
    job = ((_atomic_load(state_at + _TICKET * 8) >> 40) + 1) & 0xFFFFFF
    _atomic_swap(state_at + _TICKET * 8, (job << 40) | (chunks << 20))
    _draw(state_at)
    polls = 0
    while _atomic_load(state_at + _DONE * 8) != chunks:
        polls += 1
        if polls > _WAIT_POLLS:
            # The thread with the last chunk may be waiting for this very core.
            _yield_core()
    _atomic_swap(state_at + _BUSY * 8, 0)


@_kept(njit, _LEAD_SIGNATURE, nogil=True)
def _lead(state_at, function, number, arguments, count, chunk):
    _do(state_at, function, _on_stack(number, arguments), count, chunk)


@_kept(njit, _LEAD_ALL_SIGNATURE, nogil=True)
def _lead_all(state_at, jobs_at, num_jobs):
    # A worker that fell asleep within a list would stay asleep.
    _atomic_add(state_at + _LISTS * 8, 1)
    jobs = integers(jobs_at, num_jobs * _JOB_WORDS)
    for job in range(0, num_jobs * _JOB_WORDS, _JOB_WORDS):
        _do(state_at, jobs[job], jobs_at + (job + 3) * 8, jobs[job + 1], jobs[job + 2])
    _atomic_add(state_at + _LISTS * 8, -1)


class _Team:
    """num_threads - 1 worker threads and the caller."""

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        self.state = np.zeros(64 + 8, np.int64)
        # Aligned to a cache line.
        self.state_at = (self.state.ctypes.data + 63) // 64 * 64
        # A byte a worker: 1 while it sleeps or is about to.
        self.asleep = bytearray(num_threads - 1)
        # A worker sleeps by taking its bell, which is held already; to ring is to release it. A caller holds nothing
        # meanwhile: Ctrl-C may end it between any two of its calls (threading.Condition, whose parts are written in
        # Python, would stay locked then).
        self.bells = [threading.Lock() for _ in self.asleep]
        for worker in range(num_threads - 1):
            self.bells[worker].acquire()
            threading.Thread(target=self._worker, args=(worker,), name="onewave-cpu", daemon=True).start()

    def _worker(self, worker: int) -> None:
        job, asleep, bell = 0, self.asleep, self.bells[worker]
        while True:
            job = _work(self.state_at, job)
            asleep[worker] = 1
            bell.acquire()
            asleep[worker] = 0
            # Rung once more meanwhile: it is awake already.
            bell.acquire(blocking=False)

    def wake(self) -> None:
        """Wake the workers that sleep."""
        if 1 in self.asleep:
            for asleep, bell in zip(self.asleep, self.bells, strict=True):
                if asleep and bell.locked():
                    with suppress(RuntimeError):  # another caller was faster
                        bell.release()

    def chunk_for(self, count: int) -> int:
        """Return the items of a chunk."""
        # Two chunks a thread: long runs of memory for the prefetcher, and half a share to wait for at most.
        return max(1, count // (2 * self.num_threads), -(-count // _MAX_CHUNKS))


@cache
def _team() -> _Team:
    return _Team(Settings.from_env().num_threads)


def num_threads() -> int:
    """Return how many threads a job has, the caller's included."""
    return _team().num_threads


if hasattr(os, "register_at_fork"):
    # A forked child has no workers, and its state may be that of another thread's job.
    os.register_at_fork(after_in_child=_team.cache_clear)


def run(job: kernel, count: int, arguments: tuple[int, ...], number: float = 0.0, *, alone: bool = False) -> None:
    """Run a kernel over `count` items; see Job."""
    if count == 0:
        return
    team = _team()
    chunk = 0
    if not alone:
        team.wake()
        chunk = team.chunk_for(count)
    _lead(team.state_at, job.address, number, arguments + _PADDING[len(arguments) :], count, chunk)


class Job(NamedTuple):
    """A kernel over `items` items.

    It finds number as the float64 at place 0 of its table and the arguments (addresses and sizes, at most 18) from
    place 1 on. alone: the job is done before a second thread would have joined.
    """

    kernel: kernel
    items: int
    arguments: tuple[int, ...]
    number: float = 0.0
    alone: bool = False

    def run(self) -> None:
        """Run it now."""
        run(self.kernel, self.items, self.arguments, self.number, alone=self.alone)


class JobList:
    """Jobs that run one after another, again and again, without the interpreter between them.

    The caller keeps alive what the arguments are addresses of.
    """

    def __init__(self, jobs: Sequence[Job]):
        team = _team()
        rows = [
            (
                job.kernel.address,
                job.items,
                0 if job.alone else team.chunk_for(job.items),
                int(np.float64(job.number).view(np.int64)),
                *job.arguments,
                *_PADDING[len(job.arguments) :],
            )
            for job in jobs
            if job.items
        ]
        self._parts: list[NDArray[np.int64]] = np.array_split(
            np.array(rows, np.int64), max(1, min(_LIST_PARTS, len(rows)))
        )

    def run(self) -> None:
        """Run all of them."""
        team = _team()
        for part in self._parts:
            # More than once: a worker that waits for the interpreter on its way to sleep is not seen yet.
            team.wake()
            _lead_all(team.state_at, part.ctypes.data, len(part))
