"""Operator benchmarks: every trial runs, and counts the bytes it says it moves."""

from dataclasses import replace

import pytest
import torch

from kit.models.tiny_decoders import BASE
from onewave.base.errors import UnsupportedError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import summarize
from onewave.bench.ops import operators, scaled

CONFIG = replace(BASE, vocab_size=96, num_layers=1, layer_windows=(None,))


@pytest.mark.parametrize("weight_format", ["Q4_1", "Q8_0", "BF16"])
def test_every_trial_runs_and_makes_a_ledger_line(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_BYTES_IN_ROTATION", 1)
    cpu = torch.device("cpu")
    plan = list(operators.trials(CONFIG, cpu, torch.float32, tokens=2, context=5, weight_format=weight_format))
    assert {trial.operator for trial in plan} == set(operators.OPERATORS)
    for trial in plan:
        result = operators.measure(trial, cpu, reps=1)
        line = result.measurement("tiny", "float32", Ceiling("read bandwidth", 10.0, "GB/s", "none", summarize([10.0])))
        assert line.unit == "us"
        assert result.gigabytes_per_second > 0


@pytest.mark.parametrize("operator", scaled.KINDS)
def test_one_byte_products_run_beside_16_bits_and_pytorchs(operator: str) -> None:
    cpu, names = torch.device("cpu"), set[str]()
    for trial in scaled.scaled_trials(operator, CONFIG, cpu, torch.bfloat16, tokens=3):
        out = trial.make()()
        assert isinstance(out, torch.Tensor)
        assert trial.shape.startswith(f"{out.shape[1]}x")
        names.add(trial.implementation)
    assert names == {"onewave", "onewave bfloat16", *(["torch _int_mm"] if operator == "linear_int8" else [])}


def test_bytes_count_the_weights_as_they_are_stored() -> None:
    plan = operators.trials(CONFIG, torch.device("cpu"), torch.float32, tokens=1, context=5, weight_format="Q4_1")
    sizes = {(trial.implementation, trial.shape): trial.nbytes for trial in plan}
    assert sizes["onewave Q4_1", "384x128"] == 384 * 128 * 20 // 32
    assert sizes["torch float32", "384x128"] == 384 * 128 * 4
    assert sizes["onewave", "4/2x32, 5 keys"] == 5 * 2 * 2 * 32 * 4


@pytest.mark.parametrize("width", ["hidden_size", "intermediate_size", "head_dim"])
def test_blocks_that_do_not_fill_a_row_are_refused_before_anything_is_timed(width: str) -> None:
    narrow = replace(CONFIG, **{width: 20})
    with pytest.raises(UnsupportedError, match=r"--cpu-format Q4_1.*Name one of BF16, F16, F32"):
        operators.check_weight_format(narrow, "Q4_1")
    operators.check_weight_format(narrow, "BF16")


def test_rows_that_blocks_do_not_fill_are_timed_in_formats_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_BYTES_IN_ROTATION", 1)
    cpu, narrow = torch.device("cpu"), replace(CONFIG, intermediate_size=20)
    plan = operators.trials(narrow, cpu, torch.float32, tokens=1, context=5, weight_format="BF16")
    times = [operators.measure(trial, cpu, reps=1) for trial in plan if trial.shape == "128x20"]
    assert [time.trial.implementation for time in times] == [
        "onewave BF16", "torch float32", "torch bfloat16", "torch int8pack bfloat16"
    ]  # fmt: skip
