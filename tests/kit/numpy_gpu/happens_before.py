"""Vector clocks for the kernels that run in NumPy: every access to shared memory must be ordered with those before it.

An agent is a partition's warps taken as one thread, or a unit that works beside them: each mbarrier's copies by TMA,
and a partition's products and TMA stores. What one agent has done another may rely on once it has heard of it: through
an mbarrier's or a named barrier's arrivals and waits, through the start and the end of partitions, or, of its own
units, through a wait for them. Two accesses to one place of which either writes, and neither agent has heard of the
other's, are a Race, in whichever order they happened to run this time. TMA and products see what threads have written,
and TMA writes behind what they have read, only if a thread that knew of it has passed fence_async_shared since.

Inside a partition nothing is ordered here: that its threads wait for each other between an access and the one thread's
arrival is read from the compiled code (tests/kit/analysers/ptx_arrivals.py).
Source: Flanagan & Freund 2009, FastTrack, doi:10.1145/1542476.1542490.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

LIMIT = 256
THREADS, UNITS = 0, 1
"""Rows of a clock: what agents have done, and what of it TMA and products see."""


class Race(AssertionError):
    """Two accesses that nothing orders."""


class Region:
    """One allocation, in cells of `unit` bytes: who wrote each last and when, and when each agent last read it.

    Cells that were always accessed together are kept as one run; `starts` holds the first cell of each.
    """

    def __init__(self, data: np.ndarray, unit: int):
        self.first, self.end, self.unit = address(data), address(data) + data.nbytes, unit
        self.starts = [0]
        self.writer, self.written = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.read: dict[int, np.ndarray] = {}
        self.known: dict[tuple[int, int], slice] = {}  # what `runs` answers until a run is cut in two

    def runs(self, at: int, nbytes: int) -> slice:
        """The runs that make up `nbytes` from address `at` on."""
        found = self.known.get((at, nbytes))
        if found is None:
            first = (at - self.first) // self.unit
            begin = self._run_from(first)
            found = slice(begin, self._run_from(first + -(-nbytes // self.unit)))
            self.known[at, nbytes] = found
        return found

    def _run_from(self, cell: int) -> int:
        """The run that begins with a cell; the one that holds it is cut in two if need be."""
        at = bisect_left(self.starts, cell)
        if at == len(self.starts) or self.starts[at] != cell:
            self.known.clear()
            self.starts.insert(at, cell)
            self.writer, self.written = (_twice(a, at - 1) for a in (self.writer, self.written))
            self.read = {reader: _twice(a, at - 1) for reader, a in self.read.items()}
        return at


def _twice(values: np.ndarray, at: int) -> np.ndarray:
    """values, with the one at `at` a second time behind it. (np.insert takes ten times as long.)"""
    return np.concatenate((values[: at + 1], values[at:]))


class Block:
    """All agents of a block and its shared memory."""

    def __init__(self) -> None:
        self.lock, self.names, self.regions = threading.RLock(), list[str](), list[Region]()

    def number(self, name: str) -> int:
        with self.lock:
            self.names.append(name)
            assert len(self.names) <= LIMIT
            return len(self.names) - 1

    def touch(self, number: int, clock: np.ndarray, parts: Iterable[np.ndarray], row: int, *, writing: bool) -> None:
        """Record an access by agent `number`, which knows `clock`. row: as what it accesses, THREADS or UNITS."""
        with self.lock:
            for data in parts:
                place = address(data)
                region = next(r for r in self.regions if r.first <= place < r.end)
                cells = region.runs(place, data.nbytes)
                unseen = region.written[cells] > clock[row][region.writer[cells]]
                if unseen.any():
                    self._complain(number, writing, "wrote", int(region.writer[cells][unseen.argmax()]))
                if not writing:
                    if number not in region.read:
                        region.read[number] = np.zeros_like(region.written)
                    region.read[number][cells] = clock[THREADS, number]
                    continue
                for reader, at in region.read.items():
                    if (at[cells] > clock[row, reader]).any():
                        self._complain(number, writing, "read", reader)
                region.writer[cells], region.written[cells] = number, clock[THREADS, number]

    def _complain(self, number: int, writing: bool, did: str, other: int) -> None:
        what = "writes" if writing else "reads"
        raise Race(f"{self.names[number]} {what} what {self.names[other]} {did}, with nothing between the two")


class Agent:
    """A partition. Its own count rises whenever it tells others what it has done so far."""

    def __init__(self, block: Block, name: str, clock: np.ndarray | None = None):
        self.block, self.name, self.number = block, name, block.number(name)
        self.clock = np.zeros((2, LIMIT), np.int64) if clock is None else clock
        self.units: dict[str, Units] = {}
        self.step()

    def step(self) -> None:
        self.clock[THREADS, self.number] += 1

    def hear(self, clock: np.ndarray | None) -> None:
        if clock is not None:
            np.maximum(self.clock, clock, out=self.clock)

    def tell(self) -> np.ndarray:
        told = self.clock.copy()
        self.step()
        return told


class Units:
    """Work that a partition has others do beside it, and waits for in the order of issue: "products" or "stores"."""

    def __init__(self, agent: Agent, name: str):
        self.agent, self.number, self.count = agent, agent.block.number(f"{name} of {agent.name}"), 0

    @staticmethod
    def here(name: str) -> "Units | None":
        """Those of the partition whose thread this is."""
        agent = _agent()
        if agent is not None and name not in agent.units:
            agent.units[name] = Units(agent, name)
        return agent.units[name] if agent is not None else None

    def issue(self, parts: Iterable[np.ndarray]) -> None:
        """One that reads these."""
        self.count += 1
        clock = self.agent.tell()
        clock[:, self.number] = self.count
        self.agent.block.touch(self.number, clock, parts, UNITS, writing=False)

    def wait(self, pending: int) -> None:
        """Until all but the last `pending` ones have ended."""
        row = self.agent.clock[:, self.number]
        np.maximum(row, self.count - pending, out=row)


class Heard:
    """Knowledge of those that have arrived at a barrier: phase by phase."""

    def __init__(self) -> None:
        self.coming: np.ndarray | None = None
        self.ended: np.ndarray | None = None
        self.number: int | None = None
        self.copies = 0

    def arrive(self, clock: np.ndarray | None = None) -> None:
        """The thread that is here arrives; or whatever knows `clock`."""
        agent = _agent()
        if agent is not None:
            told = agent.tell() if clock is None else clock
            self.coming = told if self.coming is None else np.maximum(self.coming, told)

    def end_phase(self) -> None:
        self.ended, self.coming = self.coming, None

    def acquire(self) -> None:
        agent = _agent()
        if agent is not None:
            agent.hear(self.ended)


class _Here(threading.local):
    agent: Agent | None = None


_HERE = _Here()


def _agent() -> Agent | None:
    return _HERE.agent


def address(data: np.ndarray) -> int:
    return data.__array_interface__["data"][0]


def begin() -> None:
    """A new block, whose first partition is the thread that is here."""
    _HERE.agent = Agent(Block(), "the kernel's start")


def allocate(data: np.ndarray, unit: int) -> np.ndarray:
    """data, shared memory of this block from now on. unit: bytes that are always accessed together."""
    agent = _agent()
    if agent is not None:
        agent.block.regions.append(Region(data, unit))
    return data


def reads(*parts: np.ndarray) -> None:
    """The threads that are here read these."""
    agent = _agent()
    if agent is not None:
        agent.block.touch(agent.number, agent.clock, parts, THREADS, writing=False)


def writes(*parts: np.ndarray) -> None:
    """The threads that are here write these."""
    agent = _agent()
    if agent is not None:
        agent.block.touch(agent.number, agent.clock, parts, THREADS, writing=True)


def partition() -> str:
    """The name of the partition whose thread this is."""
    agent = _agent()
    return "" if agent is None else agent.name


def fence() -> None:
    """TMA and products see whatever the threads that are here know of."""
    agent = _agent()
    if agent is not None:
        np.maximum(agent.clock[UNITS], agent.clock[THREADS], out=agent.clock[UNITS])
        agent.step()


def bring(heard: Heard, *parts: np.ndarray) -> np.ndarray | None:
    """A copy by TMA into these that arrives at the barrier; returns what its arrival tells."""
    agent = _agent()
    if agent is None:
        return None
    with agent.block.lock:
        if heard.number is None:
            heard.number = agent.block.number("a copy by TMA")
        heard.copies += 1
        clock = agent.tell()
        clock[:, heard.number] = heard.copies
        agent.block.touch(heard.number, clock, parts, UNITS, writing=True)
    return clock


def agents_of(
    parts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], run: Callable[[list[Callable[[], None]]], None]
) -> None:
    """Run partitions (function, arguments) by `run`, each as an agent that knows what the thread here knows."""
    parent = _agent()
    if parent is None:
        run([lambda f=f, a=a: f(*a) for f, a in parts])
        return
    told = parent.tell()
    agents = [Agent(parent.block, f"{f.__name__} ({i})", told.copy()) for i, (f, _) in enumerate(parts)]

    def entered(agent: Agent, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        _HERE.agent = agent
        call(*arguments)

    run([lambda x=x, f=f, a=a: entered(x, f, a) for x, (f, a) in zip(agents, parts, strict=True)])
    for agent in agents:
        parent.hear(agent.clock)
