"""The JSON form of a schedule, for `onewave tiles verify FILE`.

{"tasks": [{"id", "reads": [tile...], "writes": [tile...], "after": [id...]}], "workers": [[id...], ...],
 "co_resident": n, "mode": "static" | "ticket"}

Ids are texts or integers; tiles are texts, integers or lists of those. The order of the tasks is program order: a
reader reads what the last writer before it in the list left. What a task waits for is: the last writer of each tile it
reads, and the tasks in its `after`. Nothing else is waited for. So a task that overwrites a tile must come after that
tile's readers and its former writer by other means (`after`, a chain of waits, its place in a worker's queue); where it
doesn't, that is a race. workers: static, one queue a worker; ticket, the order of the tickets (several lists are read
one after the other; left out, or without a single id, it is program order).

More, where the plan has it:
  task "wait": n               the number of tasks it waits for, as its counter is set up (checked against the graph)
  task "waits", "posts"        [[counter, value]...] and [[counter, amount]...]: the counters as they really are. If any
                               task has one of them, tasks wait for these counters only, and reads and `after` are what
                               they must bring about.
  "rings": [{"name", "slots", "fills": [id...], "releases": [id...]}]   fill i takes slot i % slots and waits for the
                               release of fill i - slots; the tiles that it writes live in the slot. A bounded buffer of
                               capacity c is a ring of c slots.
  "buffers": {name: [tile...]} tiles that share one place in memory
  "name", "title", "description", "version", "comment" and a task's "phase", "flops", "index", "opcode"    ignored
"""

import gc
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from onewave.base.errors import InvalidArgumentError
from onewave.base.json_files import parse_json
from onewave.tiles.graph.graph import linked
from onewave.tiles.order.schedule import Csr, Ints, Mode, Program, Ring, Schedule, Syncs, ring_edges, ring_places
from onewave.tiles.sim.machine import MAX_WORKERS

MAX_FILE_BYTES = 256 << 20
"""Larger files are refused: parsed they would take several GiB."""

IGNORED = {"name", "phase", "flops", "index", "opcode", "comment", "title", "description", "version"}
TASK_KEYS = {"id", "reads", "writes", "after", "wait", "waits", "posts"} | IGNORED
FILE_KEYS = {"tasks", "workers", "co_resident", "mode", "rings", "buffers"} | IGNORED
MAX_NUMBER = 2**31 - 1
PLAIN = frozenset({str, int})
DEEPEST_TILE = 16


def parse_schedule(text: bytes) -> Schedule:
    """Read a schedule from JSON text. Raises InvalidArgumentError, one line, for anything malformed."""
    if len(text) > MAX_FILE_BYTES:
        raise InvalidArgumentError("file size", got=f"over {MAX_FILE_BYTES >> 20} MiB", allowed="smaller schedules")
    # Millions of small objects and not one cycle: the collector would take half of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        data = parse_json(text, "schedule")
        return _Reader(_mapping(data, "the file", FILE_KEYS)).schedule()
    finally:
        if collecting:
            gc.enable()


def _bad(what: str, got: object, allowed: str | None = None) -> InvalidArgumentError:
    shown = got if isinstance(got, str) else json.dumps(got, default=str)
    return InvalidArgumentError(what, got=shown if len(shown) <= 200 else shown[:197] + "...", allowed=allowed)


def _mapping(value: object, what: str, keys: set[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(what, _kind(value), "an object")
    found = cast("dict[str, Any]", value)
    if keys is not None and not found.keys() <= keys:
        raise _bad(f"{what}: unknown key", min(found.keys() - keys), ", ".join(sorted(keys - IGNORED)))
    return found


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(what, _kind(value), "a list")
    return cast("list[Any]", value)


def _number(value: object, what: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(what, _kind(value), "an integer")
    if not least <= value <= MAX_NUMBER:
        raise _bad(what, "out of range" if value > MAX_NUMBER else str(value), f"{least} to {MAX_NUMBER}")
    return value


def _kind(value: object) -> str:
    names = (("an object", dict), ("a list", list), ("a text", str), ("true or false", bool), ("null", type(None)))
    return next((name for name, kind in names if isinstance(value, kind)), "a number")


def _is_name(value: object) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _tile(value: object, depth: int = 0) -> Hashable:
    if _is_name(value):
        return cast("str | int", value)
    if isinstance(value, list):
        parts = cast("list[str | int]", value)
        # The common case first: files of 100,000 tasks hold a million tiles. (The types matter: True == 1.)
        if PLAIN.issuperset(map(type, parts)):
            return tuple(parts)
        if depth < DEEPEST_TILE:
            return tuple(_tile(part, depth + 1) for part in parts)
    got = "lists nested too deeply" if isinstance(value, list) else _kind(value)
    raise _bad("tile", got, "a text, an integer or a list of those")


def _plain(tile: Hashable) -> object:
    return [_plain(part) for part in cast("tuple[Hashable, ...]", tile)] if isinstance(tile, tuple) else tile


@dataclass
class _Task:
    """One task as the file gives it, ids and tiles already numbered."""

    reads: list[int]
    writes: list[int]
    after: list[int]
    wait: int | None
    waits: list[tuple[Hashable, int]]
    posts: list[tuple[Hashable, int]]


def _read_after_write(program: Program) -> Ints:
    """The last writer before each read of a tile, and the reader: [n, 2]."""
    by_tile = np.argsort(program.tile, kind="stable")
    task = program.access_task[by_tile]
    (written, read), *_ = linked(program.tile[by_tile], task, program.is_write[by_tile])
    return np.stack((task[written], task[read]), axis=1)


class _Reader:
    """Turns the parsed file into a schedule."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.ids: dict[Hashable, int] = {}
        self.tiles: dict[Hashable, int] = {}
        self.counters: dict[Hashable, int] = {}

    def schedule(self) -> Schedule:
        for key in ("tasks", "co_resident"):
            if key not in self.data:
                raise _bad("the file", f"no {key!r}", "an object with tasks, workers, co_resident and mode")
        mode = self._mode()
        tasks = self._tasks()
        rings = self._rings()
        explicit = any("waits" in task or "posts" in task for task in self.data["tasks"])
        program = self._program(tasks, ring_edges(rings) if explicit else np.zeros((0, 2), dtype=np.int64))
        syncs = self._explicit(tasks) if explicit else self._implicit(program, tasks, ring_edges(rings))
        names = list(self.counters)
        ids = program.ids
        place, slot_name = self._places(program, rings)
        return Schedule(
            program,
            self._queues(mode),
            mode,
            _number(self.data["co_resident"], "co_resident"),
            syncs,
            place,
            slot_name,
            (lambda k: _plain(names[k])) if explicit else (lambda k: f"of {ids[k]}"),
        )

    def _mode(self) -> Mode:
        mode = self.data.get("mode", "static")
        if mode not in ("static", "ticket"):
            raise _bad("mode", mode, "static, ticket")
        return Mode(mode)

    def _tasks(self) -> list[_Task]:
        given = [_mapping(task, "task", TASK_KEYS) for task in _list(self.data["tasks"], "tasks")]
        for at, task in enumerate(given):
            name = task.get("id")
            if not _is_name(name):
                raise _bad(f"task {at}: id", "none" if "id" not in task else _kind(name), "a text or an integer")
            if self.ids.setdefault(cast("str | int", name), at) != at:
                raise _bad("task id twice", name)
        return [self._task(task) for task in given]

    def _task(self, task: dict[str, Any]) -> _Task:
        name = task["id"]
        reads, writes, after = (self._part(task, key) for key in ("reads", "writes", "after"))
        return _Task(
            reads=[self._tile_number(tile) for tile in reads],
            writes=[self._tile_number(tile) for tile in writes],
            after=[self._id(other, f"task {name}: after") for other in after],
            wait=_number(task["wait"], f"task {name}: wait") if "wait" in task else None,
            waits=self._counts(task, "waits", "value") if "waits" in task else [],
            posts=self._counts(task, "posts", "amount") if "posts" in task else [],
        )

    def _part(self, task: dict[str, Any], key: str) -> list[Any]:
        found = task.get(key, ())
        return [] if found == () else _list(found, f"task {task['id']}: {key}")

    def _tile_number(self, tile: object) -> int:
        return self.tiles.setdefault(_tile(tile), len(self.tiles))

    def _id(self, name: object, what: str) -> int:
        found = self.ids.get(cast("str | int", name)) if _is_name(name) else None
        if found is None:
            raise _bad(f"{what}: unknown task", name if _is_name(name) else _kind(name), "ids of the tasks list")
        return found

    def _counts(self, task: dict[str, Any], key: str, amount: str) -> list[tuple[Hashable, int]]:
        found: list[tuple[Hashable, int]] = []
        what = f"task {task['id']}: {key}"
        for entry in _list(task.get(key, []), what):
            if isinstance(entry, dict):
                named = _mapping(cast("object", entry), what, {"counter", amount})
                pair = [named.get("counter"), named.get(amount)]
            else:
                pair = _list(entry, what)
            if len(pair) != 2 or not _is_name(pair[0]):
                raise _bad(what, pair, f"[counter, {amount}] pairs")
            found.append((pair[0], _number(pair[1], f"{what}: {amount}")))
        return found

    def _rings(self) -> list[Ring]:
        found: list[Ring] = []
        for at, entry in enumerate(_list(self.data.get("rings", []), "rings")):
            ring = _mapping(entry, f"ring {at}", {"name", "slots", "fills", "releases"})
            name = str(ring.get("name", at))
            lists = [
                tuple(self._id(i, f"ring {name}: {key}") for i in _list(ring.get(key), f"ring {name}: {key}"))
                for key in ("fills", "releases")
            ]
            found.append(Ring(name, _number(ring.get("slots"), f"ring {name}: slots", 1), *lists))
        return found

    def _program(self, tasks: list[_Task], required: Ints) -> Program:
        start, tile, is_write = [0], list[int](), list[bool]()
        for task in tasks:
            tile += task.reads + task.writes
            is_write += [False] * len(task.reads) + [True] * len(task.writes)
            start.append(len(tile))
        after = [(other, at) for at, task in enumerate(tasks) for other in task.after]
        names = list(self.tiles)
        return Program(
            ids=tuple(self.ids),
            start=np.array(start, dtype=np.int64),
            tile=np.array(tile, dtype=np.int64),
            is_write=np.array(is_write, dtype=np.bool_),
            num_tiles=len(names),
            tile_name=lambda number: _plain(names[number]),
            after=np.concatenate((np.array(after, dtype=np.int64).reshape(-1, 2), required)),
        )

    def _explicit(self, tasks: list[_Task]) -> Syncs:
        sides: list[Csr] = []
        if any(task.wait is not None for task in tasks):
            raise _bad("wait", "beside waits and posts", "one of the two forms in a file")
        for entries in ([task.waits for task in tasks], [task.posts for task in tasks]):
            flat = [
                (at, self.counters.setdefault(counter, len(self.counters)), count)
                for at, row in enumerate(entries)
                for counter, count in row
            ]
            columns = np.array(flat, dtype=np.int64).reshape(-1, 3).T
            sides.append(Csr.build(len(tasks), *columns))
        return Syncs(*sides, num_counters=len(self.counters))

    def _implicit(self, program: Program, tasks: list[_Task], resources: Ints) -> Syncs:
        """Each task has a counter of its own; every task that it waits for posts 1 to it."""
        n = len(tasks)
        after = np.array([(other, at) for at, task in enumerate(tasks) for other in task.after], dtype=np.int64)
        pairs = np.concatenate((resources, after.reshape(-1, 2), _read_after_write(program)))
        producer, consumer = np.divmod(np.unique(pairs[:, 0] * max(1, n) + pairs[:, 1]), max(1, n))
        value = np.bincount(consumer, minlength=n)
        for at, task in enumerate(tasks):
            if task.wait is not None:
                value[at] = task.wait
        waiting = np.flatnonzero((value > 0) | (np.bincount(consumer, minlength=n) > 0))
        ones = np.ones(len(producer), dtype=np.int64)
        return Syncs(
            Csr.build(n, waiting, waiting, value[waiting]), Csr.build(n, producer, consumer, ones), num_counters=n
        )

    def _queues(self, mode: Mode) -> tuple[Ints, ...]:
        given = self.data.get("workers")
        if given is None:
            if mode is Mode.STATIC:
                raise _bad("the file", "no 'workers'", "one list of task ids a worker")
            return (np.arange(len(self.ids), dtype=np.int64),)
        queues: list[Ints] = []
        listed = _list(given, "workers")
        if len(listed) > MAX_WORKERS:
            raise _bad("workers", f"{len(listed):,}", f"up to {MAX_WORKERS:,}")
        for at, queue in enumerate(listed):
            tasks = [self._id(name, f"worker {at}") for name in _list(queue, f"worker {at}")]
            queues.append(np.array(tasks, dtype=np.int64))
        if mode is Mode.TICKET:
            tickets = np.concatenate([*queues, np.zeros(0, dtype=np.int64)])
            return (tickets if len(tickets) else np.arange(len(self.ids), dtype=np.int64),)
        return tuple(queues)

    def _places(self, program: Program, rings: list[Ring]) -> tuple[Ints, Callable[[int], object] | None]:
        place = np.arange(program.num_tiles, dtype=np.int64)
        names: dict[int, str] = {}
        placed: dict[int, str] = {}
        for at, (name, tiles) in enumerate(_mapping(self.data.get("buffers", {}), "buffers", None).items()):
            slot = program.num_tiles + at
            names[slot] = name
            for tile in _list(tiles, f"buffer {name}"):
                number = self.tiles.get(_tile(tile))
                if number is None:
                    raise _bad(f"buffer {name}: unknown tile", tile, "tiles that a task reads or writes")
                if placed.setdefault(number, name) != name:
                    raise _bad(f"buffer {name}", tile, f"tiles of one buffer only (it is in {placed[number]} too)")
                place[number] = slot
        if rings:
            before = place
            place, slots = ring_places(program, rings, place)
            both = [tile for tile in placed if place[tile] != before[tile]]
            if both:
                what = f"buffer {placed[both[0]]}"
                raise _bad(what, program.tile_name(both[0]), "tiles that no ring's fill writes: they lie in its slot")
            names |= {slot: f"{ring} slot {number}" for slot, (ring, number, _) in slots.items()}
        return place, names.get if names else None
