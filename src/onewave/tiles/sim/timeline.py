"""Where the time of a launch goes: stages one after another, the hand-offs between them, and the late workers."""

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from onewave.tiles.sim.trace import Trace


@dataclass(frozen=True)
class StageTime:
    """One stage, averaged over its layers; times in the trace's unit.

    after: the stage before it. hand_off: from the last end of the stage before to this one's first start; below 0 where
    tasks begin before that (and wait inside). middle_hand_off: to the median start. run: of the median task. late: from
    the median end to the last.
    """

    stage: str
    after: str
    layers: int
    tasks: int
    hand_off: float
    middle_hand_off: float
    run: float
    late: float


@dataclass(frozen=True)
class Timeline:
    """stages: in the order of their first starts. period: median time from a layer's first stage to the next layer's;
    None with fewer than two layers. makespan: of the launch."""

    unit: str
    makespan: float
    period: float | None
    stages: tuple[StageTime, ...]


def timeline(trace: Trace) -> Timeline:
    """Take a trace apart by stage, each averaged over its layers but the first two, if there are more: there the
    pipeline still fills.

    Where several stages end in numbers, the numbers are layers, as in a wave's traces. Else the layers of a simulated
    trace are the times that a phase comes in program order, told apart by what comes next: a norm before qkv is another
    stage than one before ffn. Else each phase is a stage of one layer.
    """
    names, group = _stages(trace)
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group, minlength=len(names))))[:-1]
    firsts = [float(trace.start[mine].min()) for mine in members]
    order = sorted(range(len(names)), key=lambda place: firsts[place])
    found: dict[str, list[StageTime]] = {}
    for before, place in pairwise((None, *order)):
        assert place is not None
        last = 0.0 if before is None else float(trace.end[members[before]].max())
        start, end = trace.start[members[place]], trace.end[members[place]]
        stage = StageTime(
            stage=names[place],
            after="" if before is None else names[before],
            layers=1,
            tasks=len(start),
            hand_off=float(start.min()) - last,
            middle_hand_off=float(np.median(start)) - last,
            run=float(np.median(end - start)),
            late=float(end.max() - np.median(end)),
        )
        found.setdefault(stage.stage, []).append(stage)
    stages = tuple(_mean(layers) for layers in found.values())
    starts = [firsts[place] for place in order if names[place] == stages[0].stage]
    period = float(np.median(np.diff(starts))) if len(starts) > 1 else None
    return Timeline(trace.unit, trace.makespan, period, stages)


def _stages(trace: Trace) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The stage of each group of tasks, a layer of it each, and every task's group."""
    phases, group = trace.phase_groups()
    if len({stage_of(phase) for phase in phases if stage_of(phase) != phase}) > 1:
        return [stage_of(phase) for phase in phases], group
    if trace.source != "simulated":  # whose task ids need not be in program order
        return phases, group
    by_task = np.argsort(trace.task, kind="stable")
    begins = np.flatnonzero(np.diff(group[by_task], prepend=-1))
    runs: list[str] = [phases[place] for place in group[by_task[begins]]]
    followers: dict[str, set[str]] = {}
    for phase, following in pairwise(runs):
        followers.setdefault(phase, set()).add(following)
    names = [
        f"{phase} before {following}" if following and len(followers[phase]) > 1 else phase
        for phase, following in zip(runs, (*runs, "")[1:], strict=True)
    ]
    of_task = np.empty_like(group)
    of_task[by_task] = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(group)))
    return names, of_task


def stage_of(phase: str) -> str:
    """A phase's name without its layer's number."""
    return re.sub(r"\d+$", "", phase) or phase


def _mean(layers: list[StageTime]) -> StageTime:
    """Return the mean times of a stage's layers, without the first two if there are more."""
    counted = layers[2:] if len(layers) > 2 else layers

    def mean(name: str) -> float:
        return float(np.mean([getattr(layer, name) for layer in counted]))

    times = {name: mean(name) for name in ("hand_off", "middle_hand_off", "run", "late")}
    return replace(counted[-1], layers=len(layers), **times)
