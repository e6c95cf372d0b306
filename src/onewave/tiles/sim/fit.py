"""Fit a machine's hand-offs to a measured launch, so that its simulation takes as long, stage by stage."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.sim.timeline import stage_of
from onewave.tiles.sim.trace import Trace

Floats = npt.NDArray[np.float64]

# A hand-off moves every end behind it by as much, unless something else hides part of it.
_ROUNDS = 12
_STEP = 0.7
_CLOSE = 0.99
# A lane's speed also decides what it has read ahead, so a round corrects part of it, at most so much.
_SPEED_ROUNDS, _MAX_A_ROUND = 6, 0.05


def stage_spans(trace: Trace) -> dict[str, float]:
    """From the last end of the stage before to a stage's own last end, in the trace's unit: the median of its layers
    but the first two, if there are more, as there the pipeline still fills."""
    names, group = trace.phase_groups()
    ends = np.full(len(names), -np.inf)
    np.maximum.at(ends, group, trace.end)
    found: dict[str, list[float]] = {}
    before = 0.0
    by_end: list[int] = np.argsort(ends, kind="stable").tolist()
    for place in by_end:
        found.setdefault(stage_of(names[place]), []).append(float(ends[place]) - before)
        before = float(ends[place])
    return {stage: float(np.median(spans[2:] if len(spans) > 2 else spans)) for stage, spans in found.items()}


def fit_hand_offs(measured: Trace, simulate: Callable[[Mapping[str, float]], Trace]) -> dict[str, float]:
    """The hand-off of each stage, in ns, with which `simulate` takes as long as `measured`.

    simulate: a trace of the same program, given the hand-offs by stage. A stage that is simulated slower than it was
    measured, or that follows none, gets 0. Raises InvalidArgumentError when the traces have different stages, a stage
    takes as long whatever its hand-off, or the measured trace has another unit than ns.
    """
    if measured.unit != "ns":
        raise InvalidArgumentError("trace", got=f"times in {measured.unit}", allowed="ns")
    wanted = stage_spans(measured)
    found = dict.fromkeys(wanted, 0.0)
    for _ in range(_ROUNDS):
        spans = stage_spans(simulate(found))
        if set(spans) != set(wanted):
            got, allowed = (", ".join(sorted(stages)) for stages in (spans, wanted))
            raise InvalidArgumentError("simulated stages", got=got, allowed=allowed, next="Fit the same program")
        found = {stage: max(0.0, found[stage] + _STEP * (wanted[stage] - spans[stage])) for stage in wanted}
    return _answered(found, wanted, simulate)


def lane_lags(trace: Trace, stage: str) -> Floats:
    """How much later each lane ends a stage than the median lane, float64 [workers], in the trace's unit: the median of
    the stage's layers but the first two, if there are more; 0 for a lane without a task in it."""
    names, group = trace.phase_groups()
    found: list[Floats] = []
    for place, name in enumerate(names):
        if stage_of(name) == stage:
            mine, ends = group == place, np.full(trace.workers, -np.inf)
            np.maximum.at(ends, trace.worker[mine], trace.end[mine])
            ran = np.isfinite(ends)
            found.append(np.where(ran, ends - np.median(ends[ran]), 0.0))
    return np.median(found[2:] if len(found) > 2 else found, axis=0)


def fit_lane_speeds(measured: Trace, simulate: Callable[[Sequence[float]], Trace], stage: str) -> tuple[float, ...]:
    """The bandwidth of each lane, over an even share, with which `simulate` has the lanes end a stage as far apart as
    `measured` has them.

    simulate: a trace of the same program, given the lanes' speeds. stage: one that streams for long.
    """
    span = stage_spans(measured)[stage]
    wanted, found = lane_lags(measured, stage), np.ones(measured.workers)
    for _ in range(_SPEED_ROUNDS):
        late = (wanted - lane_lags(simulate(found.tolist()), stage)) / span
        found = found * (1 - _STEP * np.clip(late, -_MAX_A_ROUND, _MAX_A_ROUND))
        found = found / found.mean()
    return tuple(found.tolist())


def _answered(
    found: dict[str, float], wanted: Mapping[str, float], simulate: Callable[[Mapping[str, float]], Trace]
) -> dict[str, float]:
    """The hand-offs without those that never had an effect; they grew with every round."""
    trace = simulate(found)
    spans = stage_spans(trace)
    answered = dict(found)
    for stage, cost in found.items():
        if not cost or spans[stage] > _CLOSE * wanted[stage]:
            continue
        # Others may hide a hand-off, but not one that is longer than the launch.
        longer = simulate({**found, stage: cost + trace.makespan})
        if not np.array_equal(longer.end, trace.end):
            continue
        if _follows(trace, stage):
            raise InvalidArgumentError(
                f"stage {stage}",
                got=f"{spans[stage]:,.0f} ns whatever its hand-off",
                allowed=f"{wanted[stage]:,.0f} ns",
                next="Let simulate hand it to the machine under the names of the stage's tasks.",
            )
        answered[stage] = 0.0
    return answered


def _follows(trace: Trace, stage: str) -> bool:
    """Does a stage take over from another, on another worker? Not if all its layers begin before another has ended."""
    names, group = trace.phase_groups()
    starts = np.full(len(names), np.inf)
    np.minimum.at(starts, group, trace.start)
    mine = np.array([stage_of(name) == stage for name in names])
    ended = float(trace.end[~mine[group]].min(initial=np.inf))
    return trace.workers > 1 and float(starts[mine].max()) >= ended
