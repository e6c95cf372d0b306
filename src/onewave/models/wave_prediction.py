"""A decode step of one wave, simulated: what its plan should take, before or without a card.

The simulator knows a plan's bytes and their order; what a hand-off between stages costs was fitted to a measured launch
(tiles.fit) and is kept in wave_costs.json with where it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onewave.base.errors import InvalidArgumentError
from onewave.models.config import ModelConfig
from onewave.models.llama_plan import DecodePlan, plan_decode
from onewave.tiles.fit import fit_hand_offs
from onewave.tiles.machine import Machine
from onewave.tiles.simulate import simulate
from onewave.tiles.timeline import stage_of
from onewave.tiles.trace import Trace

__all__ = ["WaveCosts", "fit_costs", "kept_costs", "predict_step"]

_MOST_COST = 1e12
_KEPT = Path(__file__).with_name("wave_costs.json")


@dataclass(frozen=True)
class WaveCosts:
    """What a step costs on a card. hand_offs: ns by stage, from the last producer's end to a task's start.
    memory_bandwidth: bytes/ns, the read ceiling. source: what they were fitted to, for people."""

    memory_bandwidth: float
    hand_offs: Mapping[str, float] = field(default_factory=dict[str, float])
    source: str = ""

    def to_json(self) -> str:
        """As kept_costs reads it."""
        hand_offs = {stage: round(cost, 1) for stage, cost in self.hand_offs.items()}
        facts = {"source": self.source, "memory_bandwidth": self.memory_bandwidth, "hand_offs": hand_offs}
        return json.dumps(facts, indent=2) + "\n"


def kept_costs(path: Path = _KEPT) -> WaveCosts:
    """The costs in a file, by default those of an H200. Raises InvalidArgumentError."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        hand_offs = {stage: _number(stage, cost) for stage, cost in facts["hand_offs"].items()}
        if not isinstance(facts["source"], str):
            raise TypeError("source is no text")
        return WaveCosts(_number("memory_bandwidth", facts["memory_bandwidth"]), hand_offs, facts["source"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        allowed = "JSON with source, memory_bandwidth and hand_offs, as `bench predict --fit` writes it"
        got = f"{path}: {str(error)[:200]}"
        raise InvalidArgumentError("costs", got=got, allowed=allowed) from error


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST_COST:
        raise TypeError(f"{name} is no number below {_MOST_COST:g}")
    return float(value)


def predict_step(config: ModelConfig, costs: WaveCosts, *, batch: int, workers: int = 132) -> Trace:
    """Simulate one step of up to `batch` sequences, without keys in their caches. Raises UnsupportedError for what does
    not run as one wave, InvalidArgumentError for costs of a stage that a step has not."""
    plan = plan_decode(config, batch=batch, workers=workers)
    stages = {stage_of(task.phase) for task in plan.graph.tasks} | {"combine"}  # of several sequences
    unknown = sorted(set(costs.hand_offs) - stages)
    if unknown:
        raise InvalidArgumentError("costs", got=", ".join(unknown), allowed=", ".join(sorted(stages)))
    return _simulated(plan, costs)


def fit_costs(config: ModelConfig, measured: Trace, *, batch: int, memory_bandwidth: float, source: str) -> WaveCosts:
    """Costs with which a step's simulation takes as long as it was measured to, stage by stage.

    measured: of the same model and batch. Raises InvalidArgumentError and UnsupportedError.
    """
    plan = plan_decode(config, batch=batch, workers=measured.workers)
    if len(plan.graph.tasks) != len(measured.task):
        got = f"{len(measured.task):,} tasks"
        raise InvalidArgumentError("trace", got=got, allowed=f"{len(plan.graph.tasks):,}, of this model and batch")
    found = fit_hand_offs(measured, lambda given: _simulated(plan, WaveCosts(memory_bandwidth, given)))
    return WaveCosts(memory_bandwidth, found, source)


def _simulated(plan: DecodePlan, costs: WaveCosts) -> Trace:
    tasks = plan.graph.tasks
    machine = Machine(
        workers=plan.program.workers,
        queues="static",
        memory_bandwidth=costs.memory_bandwidth,
        task_ns=0.0,
        # Adding up slices belongs to its product's stage, which has one hand-off.
        hand_offs={
            task.name: 0.0 if task.name.endswith("_sum") else costs.hand_offs.get(stage_of(task.phase), 0.0)
            for task in tasks
        },
        ahead_bytes=plan.program.shape.ring * plan.program.shape.tile_bytes,
    )
    queues = [plan.table.task[queue].tolist() for queue in plan.table.queues]
    return simulate(plan.graph, np.arange(len(tasks)), machine, queues=queues)
