"""Predict a wave's decode step by simulating its plan, without a GPU.

The simulator knows a plan's bytes and their order. Hand-off costs between stages are fitted to a measured launch
(tiles.sim.fit); wave_costs.json keeps them with their source.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from onewave.base.errors import InvalidArgumentError
from onewave.base.json_files import parse_json, read_bounded
from onewave.models.llama_plan import DealtStep, DecodePlan, DecodeStep, deal_decode, plan_decode, workers_for
from onewave.tiles.sim.fit import fit_hand_offs, fit_lane_speeds, stage_spans
from onewave.tiles.sim.machine import H200_LEVELS, Machine
from onewave.tiles.sim.simulate import simulate
from onewave.tiles.sim.timeline import stage_of
from onewave.tiles.sim.trace import Trace

_MAX_COST = 1e12
_MAX_BYTES = 1 << 20
# Bytes/ns that an SM gets from L2 by asynchronous copies, observed on an H200
# (docs/log/wave.md, "Bandwidth of an SM").
_CACHE_BANDWIDTH = 50.0
_KEPT = Path(__file__).with_name("wave_costs.json")


@dataclass(frozen=True)
class WaveCosts:
    """Costs of a step on one GPU.

    hand_offs: ns by stage, from the last end of a producer on another worker to a task's start. several: the same for
    several sequences; empty where only one was measured. memory_bandwidth: bytes/ns, the read ceiling. pace: the share
    of it that is left, by tiles in flight beyond the wave's own number; beyond those that were measured the nearest
    holds. speeds: the bandwidth of each thread block's SM, over an even share; empty where all are as fast. source: the
    measurement that they were fitted to.
    """

    memory_bandwidth: float
    hand_offs: Mapping[str, float] = field(default_factory=dict[str, float])
    source: str = ""
    several: Mapping[str, float] = field(default_factory=dict[str, float])
    pace: Mapping[int, float] = field(default_factory=dict[int, float])
    speeds: tuple[float, ...] = ()

    def bandwidth(self, more_in_flight: int) -> float:
        """Bytes/ns with so many more tiles in flight."""
        known = {0: 1.0, **self.pace}
        return self.memory_bandwidth * known[min(known, key=lambda each: (abs(each - more_in_flight), each))]

    def of_batch(self, batch: int) -> Mapping[str, float]:
        """Hand-offs of a step of so many sequences."""
        return self.several if batch > 1 and self.several else self.hand_offs

    def to_json(self) -> str:
        """As kept_costs reads it."""
        facts: dict[str, Any] = {"source": self.source, "memory_bandwidth": self.memory_bandwidth}
        for name, costs in (("hand_offs", self.hand_offs), ("several", self.several)):
            facts[name] = {stage: round(cost, 1) for stage, cost in costs.items()}
        facts["pace"] = {str(more): round(share, 3) for more, share in self.pace.items()}
        speeds = json.dumps([round(speed, 4) for speed in self.speeds])
        return json.dumps(facts, indent=2).removesuffix("\n}") + f',\n  "speeds": {speeds}\n}}\n'


def kept_costs(path: Path = _KEPT) -> WaveCosts:
    """The costs in a file, by default those of an H200. Raises InvalidArgumentError."""
    allowed = "JSON with source, memory_bandwidth and hand_offs, as `bench predict --fit` writes it"
    found: object = parse_json(read_bounded(path, "costs", _MAX_BYTES), f"costs: {path}", allowed=allowed)
    try:
        if not isinstance(found, dict) or not {"source", "memory_bandwidth", "hand_offs"} <= found.keys():
            raise TypeError("something else")
        facts = cast("dict[str, Any]", found)
        hand_offs, several = (
            {stage: _number(stage, cost) for stage, cost in costs.items()}
            for costs in (facts["hand_offs"], facts.get("several", {}))
        )
        if not isinstance(facts["source"], str):
            raise TypeError("source is no text")
        pace = {int(more): _number(more, share) for more, share in facts.get("pace", {}).items()}
        bandwidth = _number("memory_bandwidth", facts["memory_bandwidth"])
        speeds = tuple(_number("speeds", speed) for speed in facts.get("speeds", ()))
        return WaveCosts(bandwidth, hand_offs, facts["source"], several, pace, speeds)
    except (ValueError, TypeError, AttributeError) as error:
        got = f"{path}: {str(error)[:200]}"
        raise InvalidArgumentError("costs", got=got, allowed=allowed) from error


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MAX_COST:
        raise TypeError(f"{name} is no number below {_MAX_COST:g}")
    return float(value)


def predict_step(step: DecodeStep, costs: WaveCosts, *, workers: int = 132, context: int = 0) -> Trace:
    """Simulate a step's plan that the engine launches by itself.

    workers: SMs of the device. context: tokens in each cache. Raises UnsupportedError for what does not run as one
    wave, InvalidArgumentError for costs of a stage that a step lacks.
    """
    blocks = workers_for(step, available=workers)
    return predict_plan(plan_decode(step, workers=blocks, context=context), costs)


def predict_plan(plan: DecodePlan | DealtStep, costs: WaveCosts) -> Trace:
    """Simulate a step. A dealt one, which nothing has proved, keeps program order.

    Raises InvalidArgumentError for costs of a stage that it lacks, and where it would wait for ever.
    """
    stages = {stage_of(task.phase) for task in plan.graph.tasks} | {"combine"}  # of several sequences
    unknown = sorted({*costs.hand_offs, *costs.several} - stages)
    if unknown:
        raise InvalidArgumentError("costs", got=", ".join(unknown), allowed=", ".join(sorted(stages)))
    return _simulated(plan, costs.of_batch(plan.step.batch), costs.bandwidth(plan.more_in_flight), costs.speeds)


def fit_costs(step: DecodeStep, measured: Trace, *, context: int, memory_bandwidth: float, source: str) -> WaveCosts:
    """Costs with which a step's simulation takes as long as it was measured to, stage by stage and SM by SM.

    measured: of the same step, after `context` tokens, whose keys are no part of a hand-off. Raises
    InvalidArgumentError and UnsupportedError.
    """
    plan = deal_decode(step, workers=measured.workers, context=context)
    if len(plan.graph.tasks) != len(measured.task):
        got = f"{len(measured.task):,} tasks"
        raise InvalidArgumentError("trace", got=got, allowed=f"{len(plan.graph.tasks):,}, of this model and batch")

    def hand_offs(speeds: Sequence[float]) -> dict[str, float]:
        return fit_hand_offs(measured, lambda given: _simulated(plan, given, memory_bandwidth, speeds))

    # By the head's rows, mostly the longest stretch of weights without a hand-off; each lane begins them with a full
    # ring, as long as what makes the slowest SM late is still part of their hand-off.
    found, spans, speeds = hand_offs(()), stage_spans(measured), ()
    if max(spans, key=lambda each: spans[each]) == "head":
        costs = found
        speeds = fit_lane_speeds(measured, lambda given: _simulated(plan, costs, memory_bandwidth, given), "head")
        found = hand_offs(speeds)
    return WaveCosts(memory_bandwidth, found, source, speeds=speeds)


def _simulated(
    plan: DecodePlan | DealtStep,
    hand_offs: Mapping[str, float],
    memory_bandwidth: float,
    speeds: Sequence[float],
) -> Trace:
    tasks = plan.graph.tasks
    if isinstance(plan, DecodePlan):
        queues, order, shape = [plan.table.task[q].tolist() for q in plan.table.queues], plan.order, plan.program.shape
    else:
        queues, order, shape = plan.queues, np.arange(len(tasks)), plan.shape
    machine = Machine(
        workers=len(queues),
        queues="static",
        memory_bandwidth=memory_bandwidth,
        levels=(replace(H200_LEVELS[0], bandwidth=_CACHE_BANDWIDTH * len(queues)),),
        task_ns=0.0,
        # Adding up slices belongs to its product's stage, which has one hand-off.
        hand_offs={
            task.name: 0.0 if task.name.endswith("_sum") else hand_offs.get(stage_of(task.phase), 0.0) for task in tasks
        },
        ahead_bytes=shape.ring * shape.tile_bytes,
        lane_speeds=tuple(speeds),
    )
    return simulate(plan.graph, order, machine, queues=queues)
