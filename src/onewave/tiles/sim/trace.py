"""Trace: when every task of a launch waited, started and ended, whether simulated or measured on a GPU.

As JSON: {"format": "onewave-trace", "version": 1, "source": "simulated"|"measured", "unit": "ns"|"us"|"cycles",
"workers": n, "tasks": {"task": [...], "worker": [...], "wait_start": [...], "start": [...], "end": [...],
"name": [...], "phase": [...]}, "report": null or an object (what a simulation knows beyond times: report.py)}.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError, check_one_of
from onewave.base.json_files import parse_json
from onewave.tiles.sim.pictures import Bar, Picture, timeline_picture
from onewave.tiles.sim.report import Report

UNITS: dict[str, float | None] = {"ns": 1.0, "us": 1000.0, "cycles": None}
"""Time units and how many ns each has; None where that depends on the clock."""

MAX_TASKS = 4_000_000
MAX_WORKERS = 65536
MAX_CHARACTERS = 1000
MAX_NUMBER = 2**62
COLUMNS = ("task", "worker", "wait_start", "start", "end", "name", "phase")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a trace, times in its unit. busy, waited: summed over its tasks; first, last: its span.

    running: time during which at least one of its tasks ran; phases that overlap count the common time each.
    """

    phase: str
    tasks: int
    first: float
    last: float
    busy: float
    waited: float
    running: float


@dataclass(frozen=True, eq=False)
class Trace:
    """Tasks in columns of one length, wait_start <= start <= end in `unit`, counted from the launch.

    source: "simulated" or "measured". workers: lanes, whether they ran anything or not. task: ids. worker: 0 to
    workers - 1. name, phase: text per task. report: traffic and energy, None for what was only timed.
    Raises InvalidArgumentError.
    """

    source: str
    unit: str
    workers: int
    task: Ints
    worker: Ints
    wait_start: Floats
    start: Floats
    end: Floats
    name: tuple[str, ...]
    phase: tuple[str, ...]
    report: Report | None = None

    def __post_init__(self) -> None:
        check_one_of("trace: source", self.source, ("simulated", "measured"))
        check_one_of("trace: unit", self.unit, UNITS)
        if not 1 <= self.workers <= MAX_WORKERS:
            raise InvalidArgumentError("trace: workers", got=str(self.workers), allowed=f"1 to {MAX_WORKERS}")
        n = len(self.task)
        for column in COLUMNS:
            if len(getattr(self, column)) != n:
                got = f"{len(getattr(self, column))} entries"
                raise InvalidArgumentError(f"trace: {column}", got=got, allowed=f"{n}, as many as there are tasks")
        if n and (int(self.worker.min()) < 0 or int(self.worker.max()) >= self.workers):
            wrong = self.worker[(self.worker < 0) | (self.worker >= self.workers)]
            raise InvalidArgumentError("trace: worker", got=str(int(wrong[0])), allowed=f"0 to {self.workers - 1}")
        ordered = (self.wait_start >= 0) & (self.wait_start <= self.start) & (self.start <= self.end)
        wrong = np.flatnonzero(~(ordered & np.isfinite(self.end)))
        if len(wrong):
            at = int(wrong[0])
            got = f"{self.wait_start[at]:g}, {self.start[at]:g}, {self.end[at]:g}"
            what = f"trace: times of task {int(self.task[at])}"
            raise InvalidArgumentError(what, got=got, allowed="0 <= wait_start <= start <= end")

    def __len__(self) -> int:
        return len(self.task)

    @classmethod
    def median(cls, traces: Sequence[Trace]) -> Trace:
        """Several launches of one program as one, with the median of each time."""
        first = traces[0]
        times = {name: np.median([getattr(each, name) for each in traces], axis=0) for name in COLUMNS[2:5]}
        return replace(first, **times)

    @property
    def makespan(self) -> float:
        """From the launch to the last task's end."""
        return float(self.end.max()) if len(self) else 0.0

    @property
    def busy(self) -> Floats:
        """Time each worker ran tasks, float64 [workers]."""
        return self._per_worker(self.end - self.start)

    @property
    def idle(self) -> Floats:
        """Time each worker ran nothing until the makespan, float64 [workers]."""
        return self.makespan - self.busy

    @property
    def waited(self) -> Floats:
        """The part of each worker's idle time that it held a task and waited for others, float64 [workers]."""
        return self._per_worker(self.start - self.wait_start)

    @property
    def tail(self) -> float:
        """From the first worker's last end to the makespan; all of it when a worker ran nothing."""
        last = np.zeros(self.workers)
        np.maximum.at(last, self.worker, self.end)
        return self.makespan - float(last.min())

    def phase_groups(self) -> tuple[list[str], Ints]:
        """The names of the phases, sorted, and each task's place among them, int64 [tasks]."""
        names = sorted(set(self.phase))
        number = {name: place for place, name in enumerate(names)}
        return names, np.array([number[name] for name in self.phase], dtype=np.int64)

    def phases(self) -> tuple[PhaseTime, ...]:
        """Times by phase, phases in the order of their first starts."""
        names, group = self.phase_groups()
        found: list[PhaseTime] = []
        for place, name in enumerate(names):
            mine = group == place
            busy, waited = self.end[mine] - self.start[mine], self.start[mine] - self.wait_start[mine]
            span = float(self.start[mine].min()), float(self.end[mine].max())
            running = _covered(self.start[mine], self.end[mine])
            found.append(PhaseTime(name, int(mine.sum()), *span, float(busy.sum()), float(waited.sum()), running))
        return tuple(sorted(found, key=lambda phase: phase.first))

    def to_dict(self) -> dict[str, Any]:
        """The trace as JSON's plain types."""
        tasks: dict[str, Any] = {c: getattr(self, c).tolist() for c in COLUMNS[:5]}
        tasks |= {"name": list(self.name), "phase": list(self.phase)}
        head = {"format": "onewave-trace", "version": 1, "source": self.source, "unit": self.unit}
        report = None if self.report is None else self.report.to_dict()
        return {**head, "workers": self.workers, "tasks": tasks, "report": report}

    def to_json(self) -> str:
        """The trace as one line of JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Trace:
        """Read what to_json wrote. Raises InvalidArgumentError saying what is wrong with anything else."""
        return cls.from_dict(parse_json(text, "trace", allowed="an onewave trace"))

    @classmethod
    def from_dict(cls, document: object) -> Trace:
        """Read what to_dict made. Raises InvalidArgumentError."""
        head = _object("trace", document)
        if head.get("format") != "onewave-trace" or head.get("version") != 1:
            got = f"format {head.get('format')!r:.40}, version {head.get('version')!r:.20}"
            raise InvalidArgumentError("trace", got=got, allowed='format "onewave-trace", version 1')
        tasks = _object("trace: tasks", head.get("tasks"))
        workers, report = head.get("workers"), head.get("report")
        if type(workers) is not int:
            raise InvalidArgumentError("trace: workers", got=repr(workers)[:40], allowed="a whole number")
        ids = _wholes(tasks, "task")
        names = _texts(tasks, "name", len(ids))
        return cls(
            source=str(head.get("source", "measured")),
            unit=str(head.get("unit")),
            workers=workers,
            task=ids,
            worker=_wholes(tasks, "worker"),
            wait_start=_numbers(tasks, "wait_start" if "wait_start" in tasks else "start"),
            start=_numbers(tasks, "start"),
            end=_numbers(tasks, "end"),
            name=names,
            phase=_texts(tasks, "phase", len(ids)) if "phase" in tasks else names,
            report=None if report is None else Report.from_dict(_object("trace: report", report)),
        )

    def to_perfetto(self) -> dict[str, Any]:
        """The trace in Chrome's JSON format, for https://ui.perfetto.dev: a thread a worker, waits as slices.

        Times become microseconds; of cycles, a thousand show as one microsecond.
        """
        scale = (UNITS[self.unit] or 1.0) / 1000
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": w, "name": "thread_name", "args": {"name": f"worker {w}"}}
            for w in range(self.workers)
        ]
        rows = zip(self.task.tolist(), self.worker.tolist(), self.name, self.phase, *self._times(), strict=True)
        for task, worker, name, phase, wait, start, end in rows:
            if start > wait:
                span = {"ts": wait * scale, "dur": (start - wait) * scale}
                events.append({"ph": "X", "pid": 0, "tid": worker, "name": "wait", "cat": "wait", **span})
            span = {"ts": start * scale, "dur": (end - start) * scale}
            args = {"task": task, "phase": phase}
            label = {"name": name or f"task {task}", "cat": phase or "task"}
            events.append({"ph": "X", "pid": 0, "tid": worker, **label, **span, "args": args})
        other = {"source": self.source, "unit": self.unit}
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}

    def show(self) -> Picture:
        """A picture of the timeline, a lane per worker; a notebook draws it."""
        bars = [
            Bar(worker, wait, start, end, f"{name} {task}: {start:g} to {end:g} {self.unit}", phase)
            for task, worker, name, phase, wait, start, end in zip(
                self.task.tolist(), self.worker.tolist(), self.name, self.phase, *self._times(), strict=True
            )
        ]
        lanes = [str(worker) for worker in range(self.workers)]
        return timeline_picture(bars, lanes, self.makespan, self.unit, f"{len(self)} tasks on {self.workers} workers")

    def _per_worker(self, times: Floats) -> Floats:
        return np.bincount(self.worker, weights=times, minlength=self.workers).astype(np.float64)

    def _times(self) -> tuple[list[float], list[float], list[float]]:
        return self.wait_start.tolist(), self.start.tolist(), self.end.tolist()


def compare(a: Trace, b: Trace) -> list[dict[str, Any]]:
    """Set two traces of one program side by side, a row per phase and one named "total" at the end.

    Rows hold phase, and for a and b: tasks, busy and waited time, span; "busy_ratio" is b's over a's (None where a has
    none). Units must agree. Raises InvalidArgumentError.
    """
    if a.unit != b.unit:
        raise InvalidArgumentError("compare", got=f"traces in {a.unit} and {b.unit}", allowed="traces in one unit")
    mine, theirs = ({phase.phase: phase for phase in trace.phases()} for trace in (a, b))
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([*mine, *theirs]):
        nothing = PhaseTime(name, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
        pair = [
            (p.tasks, p.busy, p.waited, p.last - p.first) for p in (mine.get(name, nothing), theirs.get(name, nothing))
        ]
        rows.append(_beside(name, *pair))
    totals = [(len(t), float(t.busy.sum()), float(t.waited.sum()), t.makespan) for t in (a, b)]
    return [*rows, _beside("total", *totals)]


def _beside(phase: str, a: tuple[float, ...], b: tuple[float, ...]) -> dict[str, Any]:
    """A row of compare. a, b: tasks, busy and waited time, span."""
    names = ("tasks", "busy", "waited", "span")
    row = {
        f"{key}_{name}": value for key, side in (("a", a), ("b", b)) for name, value in zip(names, side, strict=True)
    }
    return {"phase": phase, **row, "busy_ratio": b[1] / a[1] if a[1] else None}


def _covered(start: Floats, end: Floats) -> float:
    """Length of the union of intervals."""
    by_start = np.argsort(start, kind="stable")
    start, end = start[by_start], end[by_start]
    reached = np.maximum.accumulate(end)
    begun = np.concatenate((start[:1], np.maximum(start[1:], reached[:-1])))
    return float(np.maximum(reached - begun, 0).sum())


def _object(what: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidArgumentError(what, got=type(value).__name__, allowed="an object")
    return cast("dict[str, object]", value)


def _list(columns: dict[str, object], name: str) -> Sequence[object]:
    value = columns.get(name)
    if not isinstance(value, list):
        raise InvalidArgumentError(f"trace: {name}", got=type(value).__name__, allowed="a list")
    items = cast("list[object]", value)
    if len(items) > MAX_TASKS:
        raise InvalidArgumentError(f"trace: {name}", got=f"{len(items):,} entries", allowed=f"up to {MAX_TASKS:,}")
    return items


def _wholes(columns: dict[str, object], name: str) -> Ints:
    items = _list(columns, name)
    for item in items:
        if type(item) is not int or abs(item) >= MAX_NUMBER:
            raise InvalidArgumentError(f"trace: {name}", got=repr(item)[:40], allowed="whole numbers below 2^62")
    return np.array(items, dtype=np.int64)


def _numbers(columns: dict[str, object], name: str) -> Floats:
    items = _list(columns, name)
    for item in items:
        if type(item) not in (int, float) or not abs(cast("float", item)) < MAX_NUMBER:  # nor is NaN below it
            raise InvalidArgumentError(f"trace: {name}", got=repr(item)[:40], allowed="finite numbers below 2^62")
    return np.array(items, dtype=np.float64)


def _texts(columns: dict[str, object], name: str, count: int) -> tuple[str, ...]:
    items = _list(columns, name) if name in columns else [""] * count
    if not all(isinstance(item, str) for item in items):
        raise InvalidArgumentError(f"trace: {name}", got="something else", allowed="texts")
    texts = tuple(cast("Sequence[str]", items))
    longest = max(map(len, texts), default=0)
    if longest > MAX_CHARACTERS:
        allowed = f"up to {MAX_CHARACTERS:,}"
        raise InvalidArgumentError(f"trace: {name}", got=f"a text of {longest:,} characters", allowed=allowed)
    return texts
