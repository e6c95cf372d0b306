"""Which worker runs which task when, and what each waits for: the plan that `verify` proves and `lower` writes down.

A `Program` says what must be computed: tasks in program order with the tiles they touch. A `Schedule` adds workers'
queues (or one ticket order), the counters that tasks post and wait for, and where each tile lives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.graph import MAX_ACCESSES, MAX_TASKS, TileGraph

Ints = npt.NDArray[np.int64]


class Mode(Enum):
    """static: each worker has a queue of its own. ticket: a free worker takes the next task of one common order."""

    STATIC = "static"
    TICKET = "ticket"


@dataclass(frozen=True)
class Csr:
    """Rows of pairs: row i owns entries start[i] to start[i + 1] of `first` and `second`."""

    start: Ints
    first: Ints
    second: Ints

    @staticmethod
    def build(num_rows: int, row: Ints, first: Ints, second: Ints) -> Csr:
        """Sort entries by row, keeping their order inside one."""
        by_row = np.argsort(row, kind="stable")
        start = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row, minlength=num_rows), out=start[1:])
        return Csr(start, first[by_row], second[by_row])

    @cached_property
    def row(self) -> Ints:
        """The row of each entry."""
        return np.repeat(np.arange(len(self.start) - 1, dtype=np.int64), np.diff(self.start))


@dataclass(frozen=True)
class Syncs:
    """The waits and posts that the workers really perform.

    A task starts when every counter it waits for has reached the value, and posts when it has ended. Counters start
    at 0. waits: (counter, value) a task. posts: (counter, amount) a task.
    """

    waits: Csr
    posts: Csr
    num_counters: int


@dataclass(frozen=True)
class Program:
    """Tasks in program order and the tiles they touch: a read means what the last writer before it left there.

    ids: what people call each task. start, tile, is_write: task i owns accesses start[i] to start[i + 1]. tile_name:
    what people call a tile's number. after: [n, 2] further (earlier, later) pairs. opcodes, phases: a number per task
    into opcode_names and phase_names.
    """

    ids: Sequence[Hashable]
    start: Ints
    tile: Ints
    is_write: npt.NDArray[np.bool_]
    num_tiles: int
    tile_name: Callable[[int], object]
    after: Ints = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    opcodes: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    opcode_names: tuple[str, ...] = ("task",)
    phases: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    phase_names: tuple[str, ...] = ("",)

    @staticmethod
    def from_graph(graph: TileGraph) -> Program:
        """View a graph as a program. A task's name is its opcode; opcodes are numbered as names first occur."""
        opcode_of: dict[str, int] = {}
        phase_of: dict[str, int] = {}
        opcodes: list[int] = []
        phases: list[int] = []
        for task in graph.tasks:
            opcodes.append(opcode_of.setdefault(task.name, len(opcode_of)))
            phases.append(phase_of.setdefault(task.phase, len(phase_of)))

        def name(number: int) -> object:
            tensor, index = graph.tile_at(number)
            return f"{tensor}[{','.join(map(str, index))}]"

        return Program(
            ids=tuple(_readable(task.name, task.id, task.index) for task in graph.tasks),
            start=graph.accesses.start,
            tile=graph.accesses.tile,
            is_write=graph.accesses.is_write,
            num_tiles=graph.num_tiles,
            tile_name=name,
            opcodes=np.array(opcodes, dtype=np.int64),
            opcode_names=tuple(opcode_of) or ("task",),
            phases=np.array(phases, dtype=np.int64),
            phase_names=tuple(phase_of) or ("",),
        )

    @property
    def num_tasks(self) -> int:
        """Tasks in all."""
        return len(self.ids)

    @cached_property
    def access_task(self) -> Ints:
        """The task of each access."""
        return np.repeat(np.arange(self.num_tasks, dtype=np.int64), np.diff(self.start))

    def repeated(self, times: int) -> Program:
        """Run the program several times over the same tiles, as a launch that makes several tokens does.

        Every copy touches the same tiles, so what one token leaves behind the next one must not overtake.
        Raises InvalidArgumentError for times < 1, and for more tasks or accesses in all than a graph may have.
        """
        if times < 1:
            raise InvalidArgumentError("times", got=str(times), allowed="1 or more")
        n, entries = self.num_tasks, len(self.tile)
        if n * times > MAX_TASKS or entries * times > MAX_ACCESSES:
            most = min(MAX_TASKS // max(n, 1), MAX_ACCESSES // max(entries, 1))
            raise InvalidArgumentError(
                "repeated program",
                got=f"{times:,} times {n:,} tasks and {entries:,} tile accesses",
                allowed=f"up to {MAX_TASKS:,} tasks and {MAX_ACCESSES:,} accesses in all",
                next=f"Run it up to {most:,} times.",
            )
        shifts = np.arange(times, dtype=np.int64)
        ends = (self.start[1:][None, :] + shifts[:, None] * entries).reshape(-1)
        after = (self.after[None, :, :] + shifts[:, None, None] * n).reshape(-1, 2)
        return Program(
            ids=tuple(f"{name}@{t}" for t in range(times) for name in self.ids),
            start=np.concatenate((np.zeros(1, dtype=np.int64), ends)),
            tile=np.tile(self.tile, times),
            is_write=np.tile(self.is_write, times),
            num_tiles=self.num_tiles,
            tile_name=self.tile_name,
            after=after,
            opcodes=np.tile(self.opcodes, times),
            opcode_names=self.opcode_names,
            phases=np.tile(self.phases, times),
            phase_names=self.phase_names,
        )


def _readable(name: str, number: int, index: tuple[int, ...]) -> str:
    where = f"[{','.join(map(str, index))}]" if index and "[" not in name else ""
    return f"{name}{where}#{number}"


@dataclass(frozen=True)
class Ring:
    """Slots filled in turn: fill i goes to slot i % slots, once the task that releases fill i - slots has ended.

    fills: the task of each fill; every tile it writes lives in its slot. releases: for each fill, the task whose end
    frees the slot. A bounded buffer of capacity c is a ring of c slots. Raises InvalidArgumentError.
    """

    name: str
    slots: int
    fills: tuple[int, ...]
    releases: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InvalidArgumentError(f"ring {self.name!r}: slots", got=str(self.slots), allowed="1 or more")
        if len(self.fills) != len(self.releases):
            raise InvalidArgumentError(
                f"ring {self.name!r}: releases", got=str(len(self.releases)), allowed=f"{len(self.fills)}, one a fill"
            )
        if len(set(self.fills)) != len(self.fills):
            raise InvalidArgumentError(f"ring {self.name!r}: fills", got="a task twice", allowed="each task once")


@dataclass(frozen=True)
class Schedule:
    """A program with queues, counters and places. Nothing here is trusted: `verify` proves it or says why not.

    queues: task numbers; static: one a worker, in the order it runs them; ticket: one, the order of the tickets.
    co_resident: workers that the machine holds at once. place: the physical slot of each tile number; two tiles in one
    slot share memory. slot_name, counter_name: what people call a slot and a counter. Tasks wait for what `syncs` says
    and for nothing else.
    """

    program: Program
    queues: tuple[Ints, ...]
    mode: Mode
    co_resident: int
    syncs: Syncs
    place: Ints
    slot_name: Callable[[int], object] | None = None
    counter_name: Callable[[int], object] | None = None

    @property
    def num_workers(self) -> int:
        """Queues of a static schedule; in ticket mode any number works, and this is 1."""
        return len(self.queues)


def assign_round_robin(order: Sequence[int] | Ints, workers: int) -> tuple[Ints, ...]:
    """Deal an order out: task i of it goes to worker i % workers. Raises InvalidArgumentError for workers < 1."""
    if workers < 1:
        raise InvalidArgumentError("workers", got=str(workers), allowed="1 or more")
    dealt = np.asarray(order, dtype=np.int64)
    return tuple(dealt[worker::workers] for worker in range(workers))


def share_buffers(graph: TileGraph, buffers: Mapping[str, str]) -> tuple[Ints, Callable[[int], object]]:
    """Put tensors into common buffers: tile i of each tensor mapped to a buffer lives in the buffer's slot i.

    buffers: tensor -> buffer, for the tensors that share one (the activations of every layer, say); the others keep
    their own memory. Returns the place of every tile and the name of every slot. Raises InvalidArgumentError.
    """
    unknown = sorted(set(buffers) - set(graph.tensors))
    if unknown:
        raise InvalidArgumentError("buffers", got=f"unknown tensor {unknown[0]!r}", allowed="the graph's tensors")
    size: dict[tuple[str, str], int] = {}
    for name, tensor in graph.tensors.items():
        home = ("buffer", buffers[name]) if name in buffers else ("tensor", name)
        size[home] = max(size.get(home, 0), tensor.num_tiles)
    starts = dict(zip(size, np.cumsum([0, *size.values()]).tolist(), strict=False))
    parts = [
        starts[("buffer", buffers[name]) if name in buffers else ("tensor", name)] + np.arange(tensor.num_tiles)
        for name, tensor in graph.tensors.items()
    ]
    homes = sorted((start, name) for (_, name), start in starts.items())
    bounds = np.array([start for start, _ in homes], dtype=np.int64)

    def slot_name(slot: int) -> object:
        at = int(np.searchsorted(bounds, slot, side="right")) - 1
        return f"{homes[at][1]}:{slot - homes[at][0]}"

    place = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
    return place, slot_name


def ring_edges(rings: Sequence[Ring]) -> Ints:
    """The (release, fill) pairs that the rings' slots ask for: [n, 2]."""
    pairs = [
        (ring.releases[at - ring.slots], ring.fills[at]) for ring in rings for at in range(ring.slots, len(ring.fills))
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def ring_places(
    program: Program, rings: Sequence[Ring], place: Ints | None = None
) -> tuple[Ints, dict[int, tuple[str, int, int]]]:
    """Move every tile that a ring's fill writes into the fill's slot.

    A fill's k-th tile lies at place k of its slot. Returns the new places and what each new slot is: (ring, slot, k).
    Raises InvalidArgumentError when two fills of different slots write one tile.
    """
    moved = np.arange(program.num_tiles, dtype=np.int64) if place is None else place.copy()
    fresh = int(moved.max()) + 1 if len(moved) else 0
    number: dict[tuple[str, int, int], int] = {}
    given: dict[int, int] = {}
    for ring in rings:
        for at, task in enumerate(ring.fills):
            entries = slice(int(program.start[task]), int(program.start[task + 1]))
            written = dict.fromkeys(program.tile[entries][program.is_write[entries]].tolist())
            for k, tile in enumerate(written):
                slot = number.setdefault((ring.name, at % ring.slots, k), fresh + len(number))
                if given.setdefault(tile, slot) != slot:
                    raise InvalidArgumentError(
                        f"ring {ring.name!r}",
                        got=f"tile {program.tile_name(tile)} in two slots",
                        allowed="a tile of its own for each fill in flight",
                    )
                moved[tile] = slot
    return moved, {slot: key for key, slot in number.items()}
