"""The search over plans of a decode step."""

from dataclasses import replace

import pytest

from kit.processes import count_looks
from onewave.base.weight_formats import COMPACT
from onewave.models import plan_search
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import STREAM, DecodeStep, StepChanges, deal_decode
from onewave.models.plan_search import Asked, Candidate, search_plans, spread
from onewave.models.step_plan import prove_dealt, prove_plan, read_plan
from onewave.models.wave_prediction import WaveCosts

CONFIG = replace(builtin_config("llama-3.2-1b"), num_layers=2, layer_windows=(None, None), vocab_size=1600)
STEP = DecodeStep(CONFIG, 1, COMPACT)


def asked(**changes: object) -> Asked:
    return replace(Asked(STEP, "llama-3.2-1b", 12, 512), **changes)


def test_what_is_found_is_proved_and_predicted_from_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    count_looks(monkeypatch, 0.1, plan_search)
    # Without hand-offs only the shares count, and the wave's own are as even as they can be but for the rest's place.
    costs = WaveCosts(4554.0, {"attend": 900.0, "qkv": 500.0})
    result = search_plans(asked(), time_limit=3, keep=2, apart=0.001, costs=costs)
    assert result.tried > 5
    assert len(result.found) == 2
    assert result.found[0].candidate.seconds <= result.found[1].candidate.seconds
    for found in result.found:
        again = prove_plan(CONFIG, read_plan(found.plan.to_json().encode()), context=512)
        assert again.program.steps.tolist() == found.proved.program.steps.tolist()
        assert found.plan.rounds_as(result.own.plan)


def test_what_is_kept_lies_apart_and_differs_in_what_was_changed() -> None:
    moved, turned = StepChanges(moves=(("qkv", 0, 1),)), StepChanges(turn=1)
    tried = [
        Candidate(changes, workers, seconds)
        for changes, workers, seconds in (
            (moved, 12, 1.000), (turned, 12, 1.002), (moved, 12, 1.0105), (turned, 12, 1.011), (moved, 12, 1.018),
            (moved, 11, 1.5), (moved, 12, 1.6),
        )
    ]  # fmt: skip
    kept = spread(tried[::-1], 4, 0.01)
    assert [each.seconds for each in kept] == [1.000, 1.011, 1.5, 1.6]
    assert [each.seconds for each in spread(tried, 2, 0.0)] == [1.000, 1.002]


@pytest.mark.parametrize("stage", ["qkv", "gate_up", "head", STREAM])
def test_a_move_takes_a_row_block_from_one_worker_in_every_layer(stage: str) -> None:
    own = deal_decode(STEP, workers=12)
    moved = deal_decode(STEP, workers=12, changes=StepChanges(moves=((stage, 3, 7), (stage, 3, 7)), turn=1))
    prove_dealt(moved)
    name = {"head": "head", STREAM: "down1"}.get(stage, f"{stage}0")
    own_blocks, blocks = (
        [sum(step.graph.tasks[t].index[1] for t in queue if step.graph.tasks[t].name == name) for queue in step.queues]
        for step in (own, moved)
    )
    # The rest of a division goes to who streams least, which moves change.
    assert own_blocks[3] - blocks[3] in (1, 2, 3)
    assert blocks[7] - own_blocks[7] in (1, 2, 3)
    assert all(abs(a - b) <= 1 for at, (a, b) in enumerate(zip(own_blocks, blocks, strict=True)) if at not in (3, 7))
