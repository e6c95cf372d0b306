"""The lab's questions about a decode step's plan and about profiles."""

import json
import re
from dataclasses import replace

import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.base.weight_formats import WEIGHT_BYTES
from onewave.lab import decode, profiles
from onewave.lab.fields import Fields
from onewave.models.config.read import builtin_config
from onewave.models.profile import DECODE, STEP, parts
from onewave.models.step_plan import digest_of, prove_plan, read_plan
from onewave.models.wave_prediction import kept_costs, predict_plan

SMALL = {"model": "llama-3.2-1b", "weights": "int8", "batch": 2, "context": 64, "sms": 12, "layers": 1}


def test_the_time_shown_is_the_one_that_the_command_predicts_of_the_exported_plan() -> None:
    asked = SMALL | {"moves": [["gate_up", 0, 1]], "layers": 1}
    found = decode.step(asked)
    assert found["proof"]["ok"]
    config = builtin_config("llama-3.2-1b")
    shallow = replace(config, num_layers=1, layer_windows=(None,))
    whole = read_plan(decode.plan_file(asked)["plan"].encode())
    kept = [[task for task in queue if task.split()[0].rstrip("0123456789") == "head" or (task.split()[0].endswith("0")
             and not task.split()[0].endswith("10"))] for queue in whole.queues]  # fmt: skip
    cut = replace(whole, queues=tuple(map(tuple, kept)), config=digest_of(shallow))
    predicted = predict_plan(prove_plan(shallow, cut, context=64), kept_costs())
    assert found["step_ms"] == pytest.approx(predicted.makespan * 1e-6)
    assert len(found["waits"]) == len(found["trace"]["tasks"]["worker"])
    assert any(re.fullmatch(r"rows \d+ to \d+ of qkv0 from SM \d+", wait) for wait in found["waits"])
    own = decode.step(SMALL)
    assert own["shares"]["gate_up"][0] == found["shares"]["gate_up"][0] + 1


def test_a_queue_in_an_impossible_order_comes_back_with_its_witness() -> None:
    queue = decode.step(SMALL)["queues"][0]
    first, second = queue.index(next(t for t in queue if t.startswith("o0"))), 0
    refused = decode.step(SMALL | {"turns": [[0, first, second]]})
    assert refused["proof"]["kind"] == "deadlock"
    assert "trace" not in refused
    assert "waits for" in refused["proof"]["message"]


def test_a_ring_that_an_sm_lacks_room_for_is_refused_and_not_made_shorter() -> None:
    ring = decode.step(SMALL)["ring"]
    proof = decode.step(SMALL | {"ring": ring + 1})["proof"]
    assert proof["kind"] == "memory"
    assert f"a ring of {ring + 1} tiles takes" in proof["message"]
    assert f"4 to {ring} tiles may be" in proof["message"]


def test_a_bent_gpu_is_faster_or_slower() -> None:
    def took(**bent: int) -> float:
        return decode.step(SMALL | {"sms": 132} | bent)["step_ms"]

    assert took(bandwidth=200) < took() < took(bandwidth=50)
    assert took(gpus=2) < took() < took(hand_off=300)


@pytest.mark.parametrize(
    "wrong",
    [{"model": "x"}, {"weights": "int3"}, {"batch": 17}, {"moves": [["o", 0, 1]]}, {"moves": [["qkv", 0, 12]]},
     {"moves": 3}, {"turns": [[0, 1]]}, {"turns": [[0, 900, 1]]}, {"bandwidth": 5}, {"unknown": 1}],
)  # fmt: skip
def test_a_wrong_question_gets_one_error(wrong: dict[str, object]) -> None:
    def ask() -> None:
        fields = Fields(json.loads(json.dumps(SMALL | wrong)))
        decode.step(fields)
        fields.refuse_unknown()

    with pytest.raises(InvalidArgumentError):
        ask()


def test_a_profile_has_a_row_a_part_and_pictures() -> None:
    found = profiles.profile({"model": "llama-3.2-1b", "gpu": "A40", "tokens": 64})
    assert [row["part"] for row in found["rows"]].count("step") == 2
    assert found["roofline"].startswith("<svg")
    assert len(found["m"]) == len(found["us"]) > 20


def test_the_profile_page_judges_the_whole_step() -> None:
    """Though it simulates the first layers alone."""
    [step] = [row for row in profiles.profile({"tokens": 1})["rows"] if (row["phase"], row["part"]) == (DECODE, STEP)]
    whole = parts(builtin_config("llama-3.2-1b"), DECODE, 1, 512, weight_bytes=WEIGHT_BYTES["compact"])[-1]
    assert step["intensity"] == whole.intensity
    assert step["memory"] == pytest.approx(0.81, abs=0.05)  # as measured: ledger/h200.jsonl:2881
