"""A step's prediction: its own plan simulated, costs fitted, kept and read back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.models.tiny_decoders import BASE
from kit.paths import DATA
from kit.refusals import refused
from onewave.base.errors import InvalidArgumentError
from onewave.base.weight_formats import COMPACT, WeightFormat
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import DecodeStep, StepChanges, deal_decode, plan_decode
from onewave.models.wave_prediction import WaveCosts, fit_costs, kept_costs, predict_plan, predict_step
from onewave.tiles.sim.fit import stage_spans
from onewave.tiles.sim.trace import Trace

COSTS = WaveCosts(
    100.0, {"qkv": 300.0, "attend": 2000.0, "combine": 1500.0, "o": 800.0, "gate_up": 900.0, "down": 700.0}
)


def test_a_prediction_has_the_plans_tasks_on_its_workers_and_takes_its_hand_offs_longer() -> None:
    plan = plan_decode(DecodeStep(BASE), workers=5)
    free, costly = (
        predict_step(DecodeStep(BASE), WaveCosts(100.0), workers=5),
        predict_step(DecodeStep(BASE), COSTS, workers=5),
    )
    assert costly.workers == 5
    assert len(costly.task) == len(plan.graph.tasks)
    for worker, queue in enumerate(plan.table.queues):
        assert (costly.worker[plan.table.task[queue]] == worker).all()
    # Reading ahead hides what the ring holds of the weights; nothing hides a hand-off.
    assert costly.makespan >= BASE.num_layers * (sum(COSTS.hand_offs.values()) - COSTS.hand_offs["combine"])
    assert costly.makespan > free.makespan
    weights = 2 * sum(a * b for a, b in ((256, 128), (128, 128), (384, 128), (128, 192))) * BASE.num_layers
    assert free.makespan > weights / 100


@pytest.mark.parametrize(("context", "form"), [(0, COMPACT), (100, None)])
def test_costs_are_found_again_and_outlive_a_file(tmp_path: Path, context: int, form: WeightFormat | None) -> None:
    step = DecodeStep(BASE, 1, form)
    measured = predict_step(step, COSTS, workers=5, context=context)
    found = fit_costs(step, measured, memory_bandwidth=100.0, source="a test", context=context)
    # The keys that the trace's attention has read are no part of its hand-off: they would count twice.
    again = predict_step(step, found, workers=5, context=context)
    assert stage_spans(again) == pytest.approx(stage_spans(measured), rel=0.02)
    assert found.hand_offs["attend"] == pytest.approx(COSTS.hand_offs["attend"], rel=0.02)
    path = tmp_path / "costs.json"
    path.write_text(found.to_json(), encoding="utf-8")
    again = kept_costs(path)
    assert again.source == "a test"
    assert again.pace == {}
    assert again.hand_offs == pytest.approx(dict(found.hand_offs), abs=0.1)
    assert again.speeds == pytest.approx(found.speeds, abs=1e-4)


def test_sms_of_other_speeds_are_found_again() -> None:
    given = (1.02, 0.97, 1.0, 0.99, 1.02)
    config = replace(BASE, vocab_size=40_000)
    measured = predict_step(DecodeStep(config), replace(COSTS, speeds=given), workers=5)
    found = fit_costs(DecodeStep(config), measured, context=0, memory_bandwidth=100.0, source="a test")
    assert found.speeds == pytest.approx(given, abs=4e-3)


def test_a_trace_of_another_batch_or_model_is_refused() -> None:
    measured = predict_step(DecodeStep(BASE), COSTS, workers=5)
    with pytest.raises(InvalidArgumentError, match="of this model and batch"):
        fit_costs(DecodeStep(BASE, 8), measured, context=0, memory_bandwidth=100.0, source="")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "",
        "[]",
        "{}",
        '{"source": "", "memory_bandwidth": "fast", "hand_offs": {}}',
        '{"source": "", "memory_bandwidth": 1' + "0" * 400 + ', "hand_offs": {}}',
        '{"source": "", "memory_bandwidth": "4000", "hand_offs": {}}',
        '{"source": "", "memory_bandwidth": true, "hand_offs": {}}',
        '{"source": "", "memory_bandwidth": 4000, "hand_offs": {"qkv": "7"}}',
        '{"source": "", "memory_bandwidth": 4000, "hand_offs": {"qkv": NaN}}',
        '{"source": 5, "memory_bandwidth": 4000, "hand_offs": {}}',
        '{"source": "", "memory_bandwidth": 4000, "hand_offs": {}, "pace": {"more": 1}}',
        '{"source": "", "memory_bandwidth": 4000, "hand_offs": {}, "speeds": [1, "1"]}',
    ],
    ids=lambda text: text[:60],
)
def test_a_file_of_other_than_costs_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="utf-8")
    with refused(InvalidArgumentError, "costs: "):
        kept_costs(path)
    with pytest.raises(InvalidArgumentError, match="missing"):
        kept_costs(tmp_path / "missing")


def test_the_kept_costs_name_where_they_come_from() -> None:
    kept = kept_costs()
    assert "ledger/h200.jsonl:" in kept.source
    assert set(kept.hand_offs) == {"qkv", "attend", "o", "gate_up", "down", "head"}
    assert set(kept.several) == {*kept.hand_offs, "combine"}
    assert all(np.isfinite(cost) and cost >= 0 for cost in (*kept.hand_offs.values(), *kept.several.values()))


def test_several_sequences_have_costs_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(replace(COSTS, several={"down": 5000.0}).to_json(), encoding="utf-8")
    kept = kept_costs(path)
    assert kept.several == {"down": 5000.0}
    for batch, costs in ((1, COSTS), (2, WaveCosts(100.0, {"down": 5000.0}))):
        assert predict_step(DecodeStep(BASE, batch), kept, workers=5).makespan == (
            predict_step(DecodeStep(BASE, batch), costs, workers=5).makespan
        )
    with pytest.raises(InvalidArgumentError, match="dawn"):
        predict_step(DecodeStep(BASE), replace(COSTS, several={"dawn": 1.0}), workers=5)


def test_another_number_of_tiles_in_flight_costs_bandwidth(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(replace(COSTS, pace={-1: 0.5, 1: 0.75}).to_json(), encoding="utf-8")
    kept = kept_costs(path)
    assert [kept.bandwidth(more) for more in (-3, -1, 0, 1, 4)] == [50.0, 50.0, 100.0, 75.0, 75.0]
    step = deal_decode(DecodeStep(BASE), workers=5)
    slow = replace(step, pace=replace(step.pace, flight=step.pace.flight - 1))
    half = replace(COSTS, memory_bandwidth=50.0)
    for dealt, same, costs in ((slow, step, half), (slow.proved(), step.proved(), half), (step, step, COSTS)):
        assert predict_plan(dealt, kept).makespan == predict_plan(same, costs).makespan


def test_costs_of_a_stage_that_a_step_has_not_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="gateup"):
        predict_step(DecodeStep(BASE), WaveCosts(100.0, {"gateup": 5.0}), workers=5)


@pytest.mark.parametrize("batch", [1, 8])
def test_no_step_is_faster_than_its_weights(batch: int) -> None:
    step = DecodeStep(replace(BASE, num_layers=4, layer_windows=(None,) * 4, intermediate_size=4672), batch)
    plan = plan_decode(step, workers=7)
    found = predict_step(step, WaveCosts(100.0), workers=7)
    read = sum(tensor.nbytes for name, tensor in plan.graph.tensors.items() if name.startswith("W_"))
    assert found.makespan >= read / 100


def test_a_stage_that_is_cut_in_slices_is_fitted_too() -> None:
    step = DecodeStep(replace(BASE, num_layers=4, layer_windows=(None,) * 4, intermediate_size=9344), 8)
    assert plan_decode(step, workers=5).program.max_slices > 1
    measured = predict_step(step, COSTS, workers=5)
    found = fit_costs(step, measured, context=0, memory_bandwidth=100.0, source="")
    assert predict_step(step, found, workers=5).makespan == pytest.approx(measured.makespan, rel=0.02)


def test_keys_that_no_cache_holds_are_read_in_several_tiles() -> None:
    config = replace(BASE, num_layers=1, layer_windows=(None,))
    keys = (256 << 20) // (4 * config.head_dim)
    dealt = deal_decode(DecodeStep(config, 16), workers=4, context=keys)
    stored = 16 * config.num_kv_heads * (256 << 20)
    assert dealt.graph.tensors["cache0"].nbytes == stored
    reads = [len([tile for tile in task.reads if tile[0] == "cache0"]) for task in dealt.graph.tasks]
    assert sum(reads) * (16 << 20) == stored
    assert max(reads) > 1
    assert predict_plan(dealt, WaveCosts(100.0)).makespan > stored / 100


@pytest.mark.slow
def test_the_kept_costs_order_the_plans_that_were_measured_and_know_which_sms_are_late() -> None:
    config, kept = builtin_config("llama-3.2-1b"), kept_costs()

    def predicted(workers: int = 132, *, flight: int = 0, **changes: Any) -> Trace:
        step = deal_decode(DecodeStep(config, 1, COMPACT), workers=workers, context=512, changes=StepChanges(**changes))
        return predict_plan(replace(step, pace=replace(step.pace, flight=step.pace.flight + flight)), kept)

    own = predicted()
    late = json.loads((DATA / "h200_head_lags.json").read_text())["late_ns"]
    # Shares that differ by one row block in 121 make late what is no slow SM.
    assert np.corrcoef(kept.speeds, late)[0, 1] < -0.9
    # ledger/h200.jsonl:5008, 5013, 5011, 5010, 5009: the wave's own, 128 workers, two row blocks of every layer moved,
    # one tile more in flight, one less.
    two = (("gate_up", 3, 7), ("gate_up", 3, 7))
    plans = own, predicted(128), predicted(moves=two), predicted(flight=1), predicted(flight=-1)
    measured = [0.5442, 0.5417, 0.5509, 0.5609, 0.6037]
    times = [plan.makespan * 1e-6 for plan in plans]
    assert np.argsort(times).tolist() == np.argsort(measured).tolist()
    assert times == pytest.approx(measured, rel=0.02)
