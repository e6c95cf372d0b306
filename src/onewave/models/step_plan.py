"""A decode step's plan as a file, which a person or a search may change. Needs no torch.

A file is JSON: which model's step it is, for how many sequences and in which weight format; `splits` of a sequence's
keys and `slices` of the K of `down`, which decide about rounding; `held`, `ring`, `flight` and `sooner`, which pace the
loading of weights (wave/plan/layout.py, pace.py); and `queues`, a list of tasks for each worker, in its order:

    "qkv0 12-17"            row blocks 12 to 17 of the first layer's q, k and v
    "down0 3-4 slice 1"     the same of one slice of K
    "down0_sum 8"           a piece of rows of which slices are added up
    "attend0 5 split 2"     a unit (sequence * groups of heads + group) over one split of its keys
    "combine0 5 part 0"     the splits of a unit's heads, merged

A plan runs only if it is proved: every row block once, no cycle of waits, no race, no hand-off that the kernel lacks,
and a ring that shared memory holds. Two plans with the same splits and slices give the same bits.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, UnsupportedError, VerificationError, check_one_of, shown
from onewave.base.json_files import in_file, parse_json, read_bounded
from onewave.base.weight_formats import WEIGHT_BYTES, find_format, name_of
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama_plan import (
    DealtStep,
    DecodePlan,
    DecodeStep,
    StepChanges,
    check_context,
    check_workers,
    step_parts,
)
from onewave.tiles.graph.graph import Task
from onewave.wave.plan.deal import Deal
from onewave.wave.plan.layout import MAX_SPLITS, TileShape
from onewave.wave.plan.operations import AnyOperation, Attention, HeadGroups, Operation
from onewave.wave.plan.pace import Pace
from onewave.wave.plan.program import WaveProgram
from onewave.wave.plan.slices import slice_bounds

MAX_FILE_BYTES = 64 << 20
"""Larger files are refused."""
_KIND = "decode step"
_TASK = re.compile(r"([a-z_0-9]{1,40}) ([0-9]{1,7})(?:-([0-9]{1,7}))?(?: (slice|split|part) ([0-9]{1,4}))?", re.ASCII)
_Index = tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """The contents of a plan file; see above. model: a name for people. config: the digest of the model's sizes.
    weights: a key of WEIGHT_BYTES. batch: most sequences. flight, sooner: of the Pace. queues: tasks by worker, in
    order."""

    model: str
    config: str
    batch: int
    weights: str
    splits: int
    slices: int
    held: int
    ring: int
    flight: int
    sooner: int
    queues: tuple[tuple[str, ...], ...]

    @property
    def workers(self) -> int:
        """Thread blocks of its launch."""
        return len(self.queues)

    def to_json(self) -> str:
        """As read_plan reads it, a queue a line."""
        facts = {"plan": _KIND} | {name: value for name, value in asdict(self).items() if name != "queues"}
        head = json.dumps(facts, indent=1).removesuffix("\n}")
        queues = ",\n".join(f"  {json.dumps(queue)}" for queue in self.queues)
        return f'{head},\n "queues": [\n{queues}\n ]\n}}\n'

    def rounds_as(self, other: "StepPlan") -> bool:
        """Whether the two plans of one model's step give the same bits."""
        return (self.splits, self.slices) == (other.splits, other.slices)


def is_plan(text: bytes) -> bool:
    """Whether a file is a decode step's plan, right or wrong, and no schedule: those have no such key but of a list."""
    return re.search(rb'"plan"\s*:\s*"', text) is not None


def read_plan(text: bytes) -> StepPlan:
    """Read a plan's file. Nothing is proved here. Raises InvalidArgumentError."""
    found: object = parse_json(text, "plan", allowed=_allowed())
    names = [field.name for field in fields(StepPlan)]
    if not isinstance(found, dict) or set(cast("dict[str, Any]", found)) != {"plan", *names}:
        keys = ", ".join(map(str, cast("dict[Any, Any]", found)))[:100] if isinstance(found, dict) else shown(found)
        raise InvalidArgumentError("plan", got=keys, allowed=_allowed())
    facts = cast("dict[str, Any]", found)
    if facts.pop("plan") != _KIND:
        raise InvalidArgumentError("plan: plan", got="another kind", allowed=repr(_KIND))
    for name in ("model", "config"):
        if not isinstance(facts[name], str):
            raise InvalidArgumentError(f"plan: {name}", got=shown(facts[name]), allowed="a text")
    for name in ("batch", "splits", "slices", "held", "ring", "flight", "sooner"):
        if type(facts[name]) is not int or not 0 <= facts[name] < 1 << 16:
            raise InvalidArgumentError(f"plan: {name}", got=shown(facts[name]), allowed="a whole number from 0")
    check_one_of("plan: weights", facts["weights"], WEIGHT_BYTES)
    facts["queues"] = _queues(facts["queues"])
    return StepPlan(**facts)


def open_plan(file: str | PathLike[str]) -> StepPlan:
    """Read a plan's file by its name. Raises InvalidArgumentError."""
    text = read_bounded(file, "plan", MAX_FILE_BYTES)
    with in_file(file):
        return read_plan(text)


def _allowed() -> str:
    return f"JSON with plan, {', '.join(field.name for field in fields(StepPlan))}, as `tiles plan` writes it"


def _queues(found: object) -> tuple[tuple[str, ...], ...]:
    queues: list[Any] = cast("list[Any]", found) if isinstance(found, list) else []
    if not queues or not all(isinstance(queue, list) for queue in queues):
        raise InvalidArgumentError("plan: queues", got=shown(cast("object", found)), allowed="a list of lists of tasks")
    for worker, queue in enumerate(cast("list[list[Any]]", queues)):
        for task in queue:
            if not isinstance(task, str):
                raise InvalidArgumentError(f"plan: queue {worker}", got=shown(task), allowed="texts")
    return tuple(map(tuple, queues))


def plan_of(dealt: DealtStep, *, model: str) -> StepPlan:
    """Write down a step that was dealt. model: its name in the file."""
    tasks = dealt.graph.tasks
    slices = max(o.slices for o in dealt.operations.values() if isinstance(o, Operation))
    return StepPlan(
        model=model,
        config=digest_of(dealt.step.config),
        batch=dealt.shape.batch,
        weights=name_of(dealt.step.weight_format),
        splits=dealt.groups.splits,
        slices=slices,
        held=dealt.shape.held,
        ring=dealt.shape.ring,
        flight=dealt.pace.flight,
        sooner=dealt.pace.sooner,
        queues=tuple(tuple(_text(tasks[task], dealt.operations) for task in queue) for queue in dealt.queues),
    )


def digest_of(config: ModelConfig) -> str:
    """The digest by which a plan knows its model: of all sizes, none of the weights."""
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


def deal_plan(config: ModelConfig, plan: StepPlan, *, context: int = 0) -> DealtStep:
    """Deal a step out as a plan says, for another proof than prove_plan's. context: tokens in each cache.

    Raises InvalidArgumentError for another model's plan or a task that there is not, VerificationError (once, memory)
    and UnsupportedError.
    """
    if plan.config != digest_of(config):
        got = f"{shown(plan.model)}, sizes {shown(plan.config)}"
        raise InvalidArgumentError("plan: model", got=got, allowed=f"a plan of this model's sizes, {digest_of(config)}")
    check_workers(plan.workers)
    check_context(context)
    step = DecodeStep(config, plan.batch, find_format(plan.weights))
    operations, groups, shape = _parts(step, plan)
    deal = Deal(operations, shape, plan.workers, shape.batch, by_writer=True, context=context)
    found = [_task_of(text, worker, operations) for worker, queue in enumerate(plan.queues) for text in queue]
    by_name: dict[str, list[tuple[_Index, int, int]]] = {name: [] for name in operations}
    for at, (name, index, worker) in enumerate(found):
        by_name[name].append((index, worker, at))
    numbers = [0] * len(found)
    for name, operation in operations.items():
        # A worker's results of one product share a tile: its tasks are numbered in the order in which they write it.
        tasks = by_name[name] if isinstance(operation, Operation) else sorted(by_name[name])
        _check_once(deal, name, [(index, worker) for index, worker, _ in tasks])
        for index, worker, at in tasks:
            if isinstance(operation, Operation):
                numbers[at] = deal.task(worker, name, *index)
            else:
                numbers[at] = deal.unit(worker, name, index[0], index[2])
    ordered = iter(numbers)
    queues = tuple(tuple(next(ordered) for _ in queue) for queue in plan.queues)
    return DealtStep(step, deal.build.graph(), queues, operations, shape, groups, Pace(plan.flight, plan.sooner))


def prove_plan(config: ModelConfig, plan: StepPlan, *, context: int = 0) -> DecodePlan:
    """Prove a plan and lay it out for the kernel. Raises what deal_plan and prove_dealt raise."""
    return prove_dealt(deal_plan(config, plan, context=context))


def prove_dealt(dealt: DealtStep) -> DecodePlan:
    """Prove a step that was dealt by a plan, and lay it out for the kernel.

    Where the default proof, by stages, finds a cycle, the exact one, tile by tile, decides. Raises VerificationError
    with what shows that the plan can't run, UnsupportedError.
    """
    check_ring(dealt.shape)
    try:
        return dealt.proved()
    except VerificationError as error:
        if error.kind != "deadlock":
            raise
    return dealt.proved("tile")


def check_ring(shape: TileShape) -> None:
    """Refuse a ring in which the multiplying warps would wait for ever. Raises VerificationError (memory).

    Of 4-bit weights and beside digits they take tiles of two row blocks at a time, a chunk apart
    (kernel/widen/groups.add_two).
    """
    if (shape.digits or shape.weight_bytes < 1) and shape.ring <= shape.chunk:
        message = f"a ring of {shape.ring} tiles has no room for tiles of two row blocks, {shape.chunk} apart"
        raise VerificationError("memory", message, {"ring": shape.ring, "chunk": shape.chunk})


def _parts(step: DecodeStep, plan: StepPlan) -> tuple[dict[str, AnyOperation], HeadGroups, TileShape]:
    """Operations, groups of heads and the tiling that a plan asks for."""
    if plan.splits not in (powers := [1 << i for i in range(MAX_SPLITS.bit_length())]):
        raise InvalidArgumentError("plan: splits", got=str(plan.splits), allowed=", ".join(map(str, powers)))
    operations, shape, groups = step_parts(step, splits=plan.splits, slices=plan.slices)
    slice_bounds(step.config.intermediate_size, plan.slices, shape)  # refuses more than there are tiles
    shape = StepChanges(held=plan.held, ring=plan.ring).of_shape(shape)
    if not 1 <= plan.flight <= plan.ring or plan.sooner >= plan.ring:
        got = f"flight {plan.flight}, sooner {plan.sooner}"
        raise InvalidArgumentError("plan: pace", got=got, allowed=f"flight 1 to {plan.ring}, sooner below {plan.ring}")
    return operations, groups, shape


def _text(task: Task, operations: Mapping[str, AnyOperation]) -> str:
    operation, (first, blocks, part) = operations[task.name], task.index
    if isinstance(operation, Operation):
        run = f"{task.name} {first}" + (f"-{first + blocks - 1}" if blocks > 1 else "")
        return run + (f" slice {part}" if operation.weight is not None and operation.slices > 1 else "")
    return f"{task.name} {first} {'split' if isinstance(operation, Attention) else 'part'} {part}"


def _task_of(text: str, worker: int, operations: Mapping[str, AnyOperation]) -> tuple[str, _Index, int]:
    """The operation's name, the task's index and its worker."""
    found = _TASK.fullmatch(text)
    where = f"plan: queue {worker}"
    if found is None:
        allowed = "as 'qkv0 12-17', 'down0 3 slice 1', 'attend0 5 split 2'"
        raise InvalidArgumentError(where, got=shown(text), allowed=allowed)
    name, first, last, kind, part = found[1], int(found[2]), int(found[3] or found[2]), found[4], int(found[5] or 0)
    if name not in operations:
        raise InvalidArgumentError(where, got=shown(text), allowed=f"tasks of {', '.join(list(operations)[:6])}, ...")
    operation = operations[name]
    if isinstance(operation, Operation):
        right = (None, "slice") if operation.weight is not None else (None,)
    else:
        right = ("split",) if isinstance(operation, Attention) else ("part",)
    if kind not in right or last < first or (last > first and not isinstance(operation, Operation)):
        allowed = "row blocks from the first to the last" if isinstance(operation, Operation) else f"one {right[0]}"
        raise InvalidArgumentError(where, got=shown(text), allowed=allowed)
    return name, (first, last - first + 1, part), worker


def _check_once(deal: Deal, name: str, tasks: Sequence[tuple[_Index, int]]) -> None:
    """Refuse an operation of which a part is missing, planned twice, or not there. Raises VerificationError."""
    operation = deal.operations[name]
    if isinstance(operation, Operation):
        count = operation.rows // deal.height(operation)
        parts = range(1 if operation.weight is None else operation.slices)
        wanted = {(block, part) for part in parts for block in range(count)}
        what, of = "row block" if operation.weight is not None else "piece", "slice"
    else:
        wanted, what = set(deal.units_of(name)), "unit"
        of = "split" if isinstance(operation, Attention) else "part"

    def refused(at: int, part: int, workers: list[int]) -> VerificationError:
        said = "workers " + ", ".join(map(str, workers)) if workers else "no worker"
        more = "" if (at, part) in wanted else ", but there is none"
        witness = {"operation": name, what: at, of: part, "workers": workers}
        return VerificationError("once", f"{what} {at} of {name}, {of} {part}, is planned by {said}{more}", witness)

    planned: dict[tuple[int, int], int] = {}
    for (first, count, part), worker in tasks:
        for at in range(first, first + count):
            workers = [planned[at, part], worker] if (at, part) in planned else [worker]
            if len(workers) > 1 or (at, part) not in wanted:
                raise refused(at, part, workers)
            planned[at, part] = worker
    if missing := wanted - planned.keys():
        raise refused(*min(missing), [])


def check_plan_fits(plan: StepPlan, *, batch: int, weights: str) -> None:
    """Refuse a plan for other sequences or another weight format. Raises UnsupportedError."""
    padded = 1 << (batch - 1).bit_length()
    if plan.batch != padded:
        got, allowed = f"{plan.batch} at once", f"{padded}, which {batch} sequences take"
        raise UnsupportedError("plan", got=got, allowed=allowed, next=f"Load the model with max_num_seqs={plan.batch}.")
    if plan.weights != weights:
        raise UnsupportedError("plan", got=f"{plan.weights} weights", allowed=f"{weights}, as the model is loaded")


def plan_file_program(config: ModelConfig, plan: StepPlan) -> WaveProgram:
    """Return prove_plan's program alone."""
    return prove_plan(config, plan).program
