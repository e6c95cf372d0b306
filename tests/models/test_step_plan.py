"""Plans of decode steps as files: written, read, edited, proved."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from onewave.base.errors import InvalidArgumentError, UnsupportedError, VerificationError
from onewave.base.weight_formats import find_format
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import DecodeStep, deal_decode, plan_decode
from onewave.models.step_plan import (
    StepPlan,
    check_plan_fits,
    check_ring,
    is_plan,
    plan_of,
    prove_dealt,
    prove_plan,
    read_plan,
)
from onewave.tiles.proof.interpret import interpret
from onewave.wave.plan.program_file import program_bytes


def shallow(layers: int = 2) -> ModelConfig:
    return builtin_config("llama-3.2-1b").of_layers(layers)


CONFIG = shallow()


def made(*, workers: int, batch: int = 1, weights: str = "16-bit") -> StepPlan:
    step = DecodeStep(CONFIG, batch, find_format(weights))
    return plan_of(deal_decode(step, workers=workers), model="llama-3.2-1b")


def edited(plan: StepPlan, edit: Callable[[dict[str, Any]], object]) -> StepPlan:
    facts = json.loads(plan.to_json())
    edit(facts)
    return read_plan(json.dumps(facts).encode())


def swapped(worker: int, first: str, second: str) -> Callable[[dict[str, Any]], None]:
    """Two tasks of one queue, named by their operations, in each other's place."""

    def edit(facts: dict[str, Any]) -> None:
        queue = facts["queues"][worker]
        at = [next(i for i, task in enumerate(queue) if task.startswith(name)) for name in (first, second)]
        queue[at[0]], queue[at[1]] = queue[at[1]], queue[at[0]]

    return edit


def in_place(worker: int, task: str, *tasks: str) -> Callable[[dict[str, Any]], None]:
    """Other tasks in the place of one."""

    def edit(facts: dict[str, Any]) -> None:
        queue = facts["queues"][worker]
        at = queue.index(task)
        queue[at : at + 1] = tasks

    return edit


@pytest.mark.parametrize(
    ("batch", "weights", "workers"), [(1, "compact", 132), (2, "16-bit", 100), (8, "int8", 132), (16, "compact", 9)]
)
def test_the_plan_that_is_written_is_the_one_that_is_launched(batch: int, weights: str, workers: int) -> None:
    plan = made(batch=batch, weights=weights, workers=workers)
    text = plan.to_json().encode()
    assert is_plan(text)
    assert is_plan(json.dumps(json.loads(text), sort_keys=True).encode())
    assert read_plan(text) == plan
    launched = plan_decode(DecodeStep(CONFIG, batch, find_format(weights)), workers=workers)
    proved = prove_plan(CONFIG, read_plan(text))
    assert program_bytes(proved.program) == program_bytes(launched.program)
    assert proved.table.to_words().tolist() == launched.table.to_words().tolist()


def test_an_edited_plan_is_proved_and_runs_under_every_interleaving() -> None:
    plan = made(workers=6, weights="compact")
    [first, second] = [queue[0] for queue in plan.queues[:2]]
    (low, high), (after, last) = ([int(end) for end in task.split()[1].split("-")] for task in (first, second))
    assert high + 1 == after
    moved = edited(plan, in_place(0, first, f"qkv0 {low}-{high - 2}"))
    moved = edited(moved, in_place(1, second, f"qkv0 {high - 1}-{last}"))
    gate = next(task for task in plan.queues[3] if task.startswith("gate_up1"))
    low, high = (int(end) for end in gate.split()[1].split("-"))
    moved = edited(moved, in_place(3, gate, f"gate_up1 {low + 9}-{high}", f"gate_up1 {low}-{low + 8}"))
    moved = replace(moved, ring=moved.ring - 1, flight=1, sooner=0)
    proved = prove_plan(CONFIG, moved, context=64)
    assert interpret(proved.table, runs=3).ok
    assert proved.program.constants["S"] == moved.ring
    assert proved.program.constants["FLIGHT"] == 1
    assert moved.rounds_as(plan)
    assert not replace(moved, splits=plan.splits // 2).rounds_as(plan)
    assert prove_plan(CONFIG, replace(plan, queues=plan.queues[::-1])).program.workers == 6


PLAN = made(workers=6)


@pytest.mark.parametrize(
    ("kind", "edit", "shows"),
    [
        ("once", in_place(1, PLAN.queues[1][0], PLAN.queues[0][0]), r"row block 0 of qkv0, slice 0, .* workers 0, 1"),
        ("once", in_place(1, PLAN.queues[1][0]), r"of qkv0, slice 0, is planned by no worker"),
        ("once", in_place(0, PLAN.queues[0][0], PLAN.queues[0][0], "qkv0 900"), r"900 .* 0, but there is none"),
        ("once", in_place(0, PLAN.queues[0][0], *["qkv0 0-9999999"] * 99), r"by workers 0, but there is none$"),
        ("once", in_place(1, PLAN.queues[1][0], *["qkv0 0"] * 99), r"row block 0 of qkv0, .* by workers 0, 1$"),
        ("deadlock", swapped(2, "o0", "attend0"), r"waits for|stands after"),
        ("hand-off", lambda f: (swap_shares(f, "down0"), None), r"RAW of residual.* from o0"),
        ("memory", lambda f: f.update(ring=40), r"a ring of 40 tiles takes .* bytes of shared memory"),
        ("memory", lambda f: f.update(held=4, weights="compact"), r"do not fit a thread's registers"),
    ],
)  # fmt: skip
def test_a_broken_plan_is_refused_with_what_shows_it(kind: str, edit: Callable[[Any], object], shows: str) -> None:
    with pytest.raises(VerificationError, match=shows) as refused:
        prove_plan(CONFIG, edited(PLAN, edit))
    assert refused.value.kind == kind
    assert refused.value.witness


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_ring_too_short_for_tiles_of_two_row_blocks_is_refused(weights: str) -> None:
    # Four tiles of one operand a chunk.
    config = replace(CONFIG, hidden_size=3008, intermediate_size=3008)
    dealt = deal_decode(DecodeStep(config, 1, find_format(weights)), workers=2)
    assert dealt.shape.chunk == 4
    check_ring(replace(dealt.shape, ring=5))
    with pytest.raises(VerificationError, match="4 tiles has no room for tiles of two row blocks, 4 apart") as refused:
        prove_dealt(replace(dealt, shape=replace(dealt.shape, ring=4)))
    assert refused.value.kind == "memory"


def swap_shares(facts: dict[str, Any], name: str) -> None:
    """Two workers' tasks of one operation, exchanged."""
    places = [
        (worker, next(i for i, task in enumerate(facts["queues"][worker]) if task.startswith(name)))
        for worker in (0, 1)
    ]
    tasks = [facts["queues"][worker][at] for worker, at in places]
    for (worker, at), task in zip(places, reversed(tasks), strict=True):
        facts["queues"][worker][at] = task


@pytest.mark.parametrize(
    ("edit", "shows"),
    [
        (lambda f: f.pop("ring"), "plan: .*; allowed: JSON with plan, model"),
        (lambda f: f.update(more=1), "plan: .*more"),
        (lambda f: f.update(plan="x"), "plan: plan: another kind"),
        (lambda f: f.update(ring=True), "plan: ring: True"),
        (lambda f: f.update(weights="int3"), "plan: weights: 'int3'; allowed: 16-bit, "),
        (lambda f: f.update(queues=[]), "plan: queues"),
        (lambda f: f["queues"][1].append(7), "plan: queue 1: 7; allowed: texts"),
        (lambda f: f["queues"][1].append("qkv0"), "plan: queue 1: 'qkv0'; allowed: as "),
        (lambda f: f["queues"][1].append("qkv9 1"), "plan: queue 1: 'qkv9 1'; allowed: tasks of qkv0"),
        (lambda f: f["queues"][1].append("qkv0 3-2"), "'qkv0 3-2'; allowed: row blocks"),
        (lambda f: f["queues"][1].append("attend0 1"), "'attend0 1'; allowed: one split"),
        (lambda f: f.update(splits=3), "plan: splits: 3; allowed: 1, 2, 4"),
        (lambda f: f.update(slices=0), "slices of K: 0; allowed: 1 to 8$"),
        (lambda f: f.update(slices=65535), "slices of K: 65535; allowed: 1 to 8$"),
        (lambda f: f.update(flight=0), "plan: pace: flight 0"),
        (lambda f: f.update(config="0"), "plan: model: 'llama-3.2-1b'"),
        (lambda f: f["queues"].extend([[]] * 100_010), "workers: 100,016; allowed: 1 to 4,096"),
    ],
)
def test_a_file_that_is_no_plan_gets_one_error(edit: Callable[[Any], object], shows: str) -> None:
    with pytest.raises(InvalidArgumentError, match=shows):
        prove_plan(CONFIG, edited(PLAN, edit))


TWICE = PLAN.to_json().replace('"batch": 1', '"batch": 2, "batch": 1').encode()


@pytest.mark.parametrize("text", [b"", b"[]", b'{"plan": 1}', b"\xff\xfe", b"[" * 100_000, TWICE])
def test_text_that_is_no_plan_gets_one_error(text: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^plan: "):
        read_plan(text)


def test_a_plan_is_not_proved_over_less_than_no_context() -> None:
    with pytest.raises(InvalidArgumentError, match="context: -1; allowed: 0 to"):
        prove_plan(CONFIG, PLAN, context=-1)


def test_a_plan_for_other_sequences_or_weights_does_not_fit() -> None:
    check_plan_fits(replace(PLAN, batch=4), batch=3, weights="16-bit")
    with pytest.raises(UnsupportedError, match=r"1 at once; allowed: 8, which 8 sequences take\. Load"):
        check_plan_fits(PLAN, batch=8, weights="16-bit")
    with pytest.raises(UnsupportedError, match="16-bit weights; allowed: compact"):
        check_plan_fits(PLAN, batch=1, weights="compact")
