"""The Decode page's questions: a step's plan with a person's changes, proved and simulated, and the plan as a file.

The step is the one that the engine launches (models/llama_plan); its time is predicted by costs fitted to a measured
launch, as `onewave bench predict` and `tiles simulate plan.json` predict it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from onewave.base.errors import InvalidArgumentError, UnsupportedError, VerificationError
from onewave.base.gpus import GPUS
from onewave.base.weight_formats import WEIGHT_BYTES, find_format
from onewave.lab.fields import choice, whole
from onewave.models.config.read import builtin_config, builtin_models
from onewave.models.llama_plan import (
    MAX_BATCH,
    STREAM,
    DealtStep,
    DecodePlan,
    DecodeStep,
    StepChanges,
    deal_decode,
    workers_for,
)
from onewave.models.step_plan import StepPlan, deal_plan, plan_of, prove_dealt
from onewave.models.wave_prediction import WaveCosts, kept_costs, predict_plan
from onewave.tiles.sim.timeline import stage_of
from onewave.tiles.sim.trace import Trace
from onewave.wave.plan.operations import Attention, Operation

STAGES = ("qkv", "gate_up", "head", STREAM)
"""Stages whose row blocks can be moved."""
MAX_MOVES = 400
MAX_SHOWN_LAYERS = 128
# Extra time of a hand-off between two GPUs, ns (measured over NVLink, every word written to both).
_BETWEEN_GPUS = 300.0


@dataclass(frozen=True)
class _Question:
    """A question from the page. layers: of the step, from the first on. turns: (worker, place, place), tasks of a queue
    in each other's place. bandwidth, hand_off: factors. gpus: that share rows."""

    step: DecodeStep
    model: str
    context: int
    workers: int
    layers: int
    changes: StepChanges
    turns: tuple[tuple[int, int, int], ...]
    bandwidth: float
    hand_off: float
    gpus: int

    @property
    def shown(self) -> DecodeStep:
        """The step cut to the layers that are shown."""
        return replace(self.step, config=self.step.config.of_layers(self.layers))

    def costs(self) -> WaveCosts:
        """Those of an H200, as the page bends them."""
        kept = kept_costs()

        def bent(found: Mapping[str, float]) -> dict[str, float]:
            more = _BETWEEN_GPUS if self.gpus > 1 else 0.0
            return {stage: cost * self.hand_off + more for stage, cost in found.items()}

        rate = kept.memory_bandwidth * self.bandwidth * self.gpus
        return replace(kept, memory_bandwidth=rate, hand_offs=bent(kept.hand_offs), several=bent(kept.several))

    def planned(self, step: DecodeStep) -> tuple[StepPlan, DealtStep]:
        """The plan with all changes. Raises VerificationError, InvalidArgumentError, UnsupportedError."""
        dealt = deal_decode(step, workers=self.workers, context=self.context, changes=self.changes)
        plan = plan_of(dealt, model=self.model)
        if not self.turns:
            return plan, dealt
        queues = [list(queue) for queue in plan.queues]
        for worker, first, second in self.turns:
            queue = queues[worker] if worker < len(queues) else []
            if max(first, second) >= len(queue):
                raise InvalidArgumentError("turns", got=f"place {max(first, second)}", allowed=f"below {len(queue)}")
            queue[first], queue[second] = queue[second], queue[first]
        plan = replace(plan, queues=tuple(map(tuple, queues)))
        return plan, deal_plan(step.config, plan, context=self.context)


def choices() -> dict[str, Any]:
    models = {name: builtin_config(name).num_layers for name in builtin_models()}
    return {"models": models, "weights": list(WEIGHT_BYTES), "stages": list(STAGES), "sms": GPUS["H200"].sms}


def step(given: Mapping[str, Any]) -> dict[str, Any]:
    """Prove and simulate a step's first layers, or all of them. Returns the trace, what each task waits for longest,
    row blocks by stage and worker, the first queue entries, the proof and the predicted time.

    A plan that can't be proved comes back without a trace, with its witness. Raises InvalidArgumentError,
    UnsupportedError.
    """
    asked = _read(given)
    try:
        plan, dealt = asked.planned(asked.shown)
        proved = prove_dealt(dealt)
    except VerificationError as error:
        return {"proof": {"ok": False, "kind": error.kind, "message": str(error), "witness": error.witness}}
    trace = predict_plan(proved, asked.costs())
    shares = _shares(dealt)
    return {
        "proof": {"ok": True, "message": f"{len(dealt.graph.tasks):,} tasks proved: no deadlock, no race, each once"},
        "trace": trace.to_dict(),
        "waits": _waits(dealt, proved, trace),
        "shares": shares,
        "queues": [list(queue[:24]) for queue in plan.queues],
        "layers": asked.layers,
        "all_layers": asked.step.config.num_layers,
        "step_ms": trace.makespan * 1e-6,
        "whole": asked.layers == asked.step.config.num_layers,
        "workers": plan.workers,
        "ring": plan.ring,
        "held": plan.held,
    }


def plan_file(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole step's plan with its changes, as `onewave tiles verify` and `bench wave --plan` read it."""
    asked = _read(given)
    plan, _ = asked.planned(asked.step)
    return {"plan": plan.to_json()}


def _read(given: Mapping[str, Any]) -> _Question:
    model = choice(given, "model", "llama-3.2-1b", builtin_models())
    config = builtin_config(model)
    weights = choice(given, "weights", "compact", WEIGHT_BYTES)
    asked = DecodeStep(config, whole(given, "batch", 1, MAX_BATCH), find_format(weights))
    context = whole(given, "context", 512, 1_000_000, least=0)
    gpus, sms = whole(given, "gpus", 1, 8), whole(given, "sms", GPUS["H200"].sms, 512)
    most = workers_for(asked, available=sms) * gpus
    layers = min(whole(given, "layers", 2, MAX_SHOWN_LAYERS), config.num_layers)
    numbers = {name: _optional(given, name) for name in ("held", "ring", "splits")}
    changes = StepChanges(_moves(given.get("moves", []), most), whole(given, "turn", 0, most - 1, least=0), **numbers)
    turns = _triples("turns", given.get("turns", []))
    bandwidth, hand_off = (whole(given, name, 100, 1000, least=10) / 100 for name in ("bandwidth", "hand_off"))
    return _Question(asked, model, context, most, layers, changes, turns, bandwidth, hand_off, gpus)


def _optional(given: Mapping[str, Any], name: str) -> int | None:
    return None if given.get(name) in (None, "") else whole(given, name, 0, 64, least=0)


def _moves(found: object, workers: int) -> tuple[tuple[str, int, int], ...]:
    moves: list[tuple[str, int, int]] = []
    for entry in _entries("moves", found):
        stage, source, target = entry
        if stage not in STAGES or any(type(at) is not int or not 0 <= at < workers for at in (source, target)):
            allowed = f"[stage, SM, SM]: {', '.join(STAGES)}, 0 to {workers - 1}"
            raise InvalidArgumentError("moves", got=repr(entry)[:60], allowed=allowed)
        moves.append((stage, source, target))
    return tuple(moves)


def _triples(name: str, found: object) -> tuple[tuple[int, int, int], ...]:
    entries = _entries(name, found)
    for entry in entries:
        if any(type(at) is not int or not 0 <= at < 1 << 20 for at in entry):
            raise InvalidArgumentError(name, got=repr(entry)[:60], allowed="[SM, place, place]")
    return tuple((a, b, c) for a, b, c in entries)


def _entries(name: str, found: object) -> list[list[Any]]:
    entries: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [None]
    if len(entries) > MAX_MOVES:
        raise UnsupportedError(name, got=f"{len(entries)} of them", allowed=f"up to {MAX_MOVES}")
    if not all(isinstance(entry, list) and len(cast("list[Any]", entry)) == 3 for entry in entries):
        raise InvalidArgumentError(name, got=repr(entries)[:60], allowed="lists of three")
    return entries


def _shares(dealt: DealtStep) -> dict[str, list[int]]:
    """Row blocks of each worker, by stage, of the first layer."""
    found: dict[str, list[int]] = {}
    for worker, queue in enumerate(dealt.queues):
        for task in queue:
            made = dealt.graph.tasks[task]
            if made.name in ("qkv0", "gate_up0", "o0", "head"):
                stage = {"o": STREAM}.get(stage_of(made.name), stage_of(made.name))
                found.setdefault(stage, [0] * len(dealt.queues))[worker] += made.index[1]
    return found


def _waits(dealt: DealtStep, proved: DecodePlan, trace: Trace) -> list[str]:
    """Return each task's longest wait, in the trace's order of tasks: "rows 512 to 519 of o0 from SM 4"."""
    edges, tasks = proved.graph.edges, proved.graph.tasks
    worker = np.zeros(len(tasks), dtype=np.int64)
    end = np.zeros(len(tasks))
    worker[trace.task], end[trace.task] = trace.worker, trace.end
    last = np.full(len(tasks), -1, dtype=np.int64)
    foreign = worker[edges.producer] != worker[edges.consumer]
    producers, consumers = edges.producer[foreign], edges.consumer[foreign]
    order = np.argsort(end[producers], kind="stable")  # the latest is written last
    last[consumers[order]] = producers[order]

    def said(task: int) -> str:
        source = int(last[task])
        if source < 0:
            return ""
        made, operation = tasks[source], dealt.operations[tasks[source].name]
        first, blocks, part = made.index
        if isinstance(operation, Operation):
            height = dealt.shape.piece if operation.weight is None else dealt.shape.rows
            what = f"rows {first * height} to {(first + blocks) * height - 1} of {made.name}"
        else:
            kind = "split" if isinstance(operation, Attention) else "part"
            what = f"{kind} {part} of unit {first} of {made.name}"
        return f"{what} from SM {int(worker[source])}"

    return [said(int(task)) for task in trace.task]
