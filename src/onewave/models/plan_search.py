"""Search plans of a decode step for one that is predicted to be faster than the wave's own. Needs no torch.

A candidate is the wave's own plan with StepChanges: row blocks moved between workers, attention moved on to other
workers, other splits and slices, tiles held and rings. Each is simulated on the first layers of the model, by costs
fitted to a measured launch, and from the best ones others are drawn; half of the moves take a row block from a worker
that ends late and give it to one that ends early. The best, and then the best ones that a measurement can tell from
those before, are dealt out whole, proved, and simulated whole.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from onewave.base.errors import OnewaveError
from onewave.models.llama_plan import STREAM, DecodePlan, DecodeStep, StepChanges, deal_decode, workers_for
from onewave.models.step_plan import StepPlan, check_ring, plan_of, prove_dealt
from onewave.models.wave_prediction import WaveCosts, kept_costs, predict_plan
from onewave.tiles.sim.fit import Floats, lane_lags

# Layers of a trial: the first differ from the rest, as the pipeline still fills.
_LAYERS = 3
# Candidates from which others are drawn.
_FRONT = 8
# Workers at each end that a move is sampled from: those that end a stage last, and those that end it first.
_ENDS = 12
# Largest share of the time limit for dealing out, proving and simulating the best candidates whole.
_PROOF_SHARE = 0.5
_STAGES = ("qkv", "gate_up", "head", STREAM)


@dataclass(frozen=True)
class Asked:
    """The step to search for, its model's name, number of SMs and tokens before it.

    same_bits: only plans that round as the wave's own does.
    """

    step: DecodeStep
    model: str
    workers: int
    context: int
    same_bits: bool = True


@dataclass(frozen=True)
class Candidate:
    """changes, workers: of the plan. seconds: predicted, of the first layers or of the whole step. late: how much later
    than the median each worker ends a stage of _STAGES, ns."""

    changes: StepChanges
    workers: int
    seconds: float
    late: Mapping[str, Floats] = field(default_factory=dict[str, Floats], compare=False)

    @property
    def knobs(self) -> frozenset[str]:
        """The changes that differ from the wave's own plan, except the number of workers."""
        own = StepChanges()
        return frozenset(
            each.name for each in fields(own) if getattr(self.changes, each.name) != getattr(own, each.name)
        )


@dataclass(frozen=True)
class FoundPlan:
    """A plan that was proved, with its predicted seconds."""

    plan: StepPlan
    proved: DecodePlan
    candidate: Candidate


@dataclass(frozen=True)
class PlanSearch:
    """own: the wave's own plan. found: others, the fastest first, as far apart as asked. tried: candidates that were
    simulated; refused: those that can't be dealt out or proved. seconds: of the search."""

    own: FoundPlan
    found: tuple[FoundPlan, ...]
    tried: int
    refused: int
    seconds: float


def search_plans(
    asked: Asked,
    *,
    time_limit: float,
    keep: int = 5,
    apart: float = 0.003,
    seed: int = 0,
    costs: WaveCosts | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> PlanSearch:
    """Search for so many seconds, or a little longer where the first trials take that. keep: plans that are returned.
    apart: by how much of its time each of them is predicted to be slower than the one before, at least.

    The same seed finds the same plans, if it has time for as many trials. Raises UnsupportedError for what does not run
    as one wave.
    """
    began, costs, draw = time.perf_counter(), costs or kept_costs(), random.Random(seed)
    config = asked.step.config
    workers = workers_for(asked.step, available=asked.workers)
    few = min(_LAYERS, config.num_layers)
    shallow = replace(asked.step, config=config.of_layers(few))

    def tried(changes: StepChanges, workers: int) -> Candidate:
        dealt = deal_decode(shallow, workers=workers, context=asked.context, changes=changes)
        check_ring(dealt.shape)
        step = predict_plan(dealt, costs)
        late = {stage: lane_lags(step, {STREAM: "down"}.get(stage, stage)) for stage in _STAGES}
        return Candidate(changes, workers, step.makespan * 1e-9, late)

    def proved(changes: StepChanges, workers: int) -> FoundPlan:
        dealt = deal_decode(asked.step, workers=workers, context=asked.context, changes=changes)
        made = prove_dealt(dealt)
        seconds = predict_plan(made, costs).makespan * 1e-9
        return FoundPlan(plan_of(dealt, model=asked.model), made, Candidate(changes, workers, seconds))

    show("the wave's own plan")
    own = proved(StepChanges(), workers)
    whole = time.perf_counter() - began
    until = began + time_limit - min(_PROOF_SHARE * time_limit, keep * whole)
    front = [tried(StepChanges(), workers)]
    first, seen, count, refused = front[0].seconds, {front[0].changes}, 1, 0
    others: list[Candidate] = []
    while time.perf_counter() < until:
        base = front[min(int(draw.expovariate(0.6)), len(front) - 1)]
        changes, sms = _drawn(base, asked, draw, workers)
        if changes in seen and sms == base.workers:
            continue
        seen.add(changes)
        count += 1
        try:
            made = tried(changes, sms)
        except OnewaveError:
            refused += 1
            continue
        # As long as another one, to the bit: the change has no effect.
        if made.seconds != first:
            others.append(replace(made, late={}))
        if all(made.seconds != each.seconds for each in front):
            front = sorted([*front, made], key=lambda each: each.seconds)[:_FRONT]
        show(f"{count} tried, the best {front[0].seconds / first:.4f} of the wave's own, first {few} layers")
    found: list[FoundPlan] = []
    for each in spread(others, keep, apart):
        show(f"proving plan {len(found) + 1}")
        found.append(proved(each.changes, each.workers))
    found.sort(key=lambda each: each.candidate.seconds)
    return PlanSearch(own, tuple(found), count, refused, time.perf_counter() - began)


def spread(candidates: Sequence[Candidate], keep: int, apart: float) -> list[Candidate]:
    """Choose the fastest, then up to `keep` in all of which each is slower than the one before by the share `apart` of
    its time. Among those that are about as fast, one that changes something else than the chosen ones comes first."""
    rest, found = sorted(candidates, key=lambda each: each.seconds), list[Candidate]()
    while rest and len(found) < keep:
        alike = [each for each in rest if each.seconds <= rest[0].seconds * (1 + apart)]
        known = {(each.knobs, each.workers) for each in found}
        found.append(next((each for each in alike if found and (each.knobs, each.workers) not in known), rest[0]))
        rest = [each for each in rest if each.seconds > found[-1].seconds * (1 + apart)]
    return found


def _drawn(base: Candidate, asked: Asked, draw: random.Random, most: int) -> tuple[StepChanges, int]:
    """A candidate beside another one."""
    changes, workers = base.changes, base.workers
    kinds = ["moves"] * 6 + ["turn", "workers", "ring", "held"] + ([] if asked.same_bits else ["splits", "slices"])
    kind = draw.choice(kinds)
    if kind == "moves":
        moves = tuple(_move(base, draw) for _ in range(draw.choice((1, 1, 2, 4, 8))))
        kept = changes.moves if draw.random() < 0.8 else changes.moves[: draw.randrange(len(changes.moves) + 1)]
        return replace(changes, moves=kept + moves), workers
    if kind == "turn":
        return replace(changes, turn=draw.randrange(workers)), workers
    if kind == "workers":
        # Moves name workers by number.
        return replace(changes, moves=()), draw.randint(most * 15 // 16, most)
    if kind == "ring":
        return replace(changes, ring=draw.randint(4, 12)), workers
    if kind == "held":
        return replace(changes, held=draw.choice((0, 2, 4))), workers
    if kind == "splits":
        return replace(changes, splits=draw.choice((1, 2, 4, 8, 16))), workers
    return replace(changes, slices=draw.choice((1, 2, 3, 4))), workers


def _move(base: Candidate, draw: random.Random) -> tuple[str, int, int]:
    """A move between any two workers, or from a late one to an early one."""
    stage = draw.choice(_STAGES)
    if draw.random() < 0.5:
        return stage, draw.randrange(base.workers), draw.randrange(base.workers)
    order: list[int] = np.argsort(base.late[stage], kind="stable").tolist()
    return stage, draw.choice(order[-_ENDS:]), draw.choice(order[:_ENDS])
