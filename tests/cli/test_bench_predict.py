"""`onewave bench predict`: predict, compare, fit and save, without a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onewave.base.errors import InvalidArgumentError
from onewave.cli.bench import bench
from onewave.cli.tiles import tiles
from onewave.weights import sources

RUN = CliRunner()
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 320,
}


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return ["--model", str(tmp_path / "model"), "--workers", "9"]


def predict(*arguments: str) -> str:
    done = RUN.invoke(bench, ["predict", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_what_was_simulated_is_fitted_to_the_same_costs_and_compares_as_equal(tmp_path: Path, small: list[str]) -> None:
    trace, costs = tmp_path / "step.json", tmp_path / "costs.json"
    assert "ms predicted" in predict(*small, "--trace", str(trace))
    fit = ["--fit", str(trace), "--bandwidth", "4650.6", "--save", str(costs), "--source", "this test"]
    fitted = json.loads(predict(*small[:2], *fit, "--json"))
    assert fitted["costs"]["source"] == "this test"
    again = json.loads(predict(*small, "--costs", str(costs), "--json"))
    assert again["predicted_ms"] == pytest.approx(fitted["predicted_ms"], rel=1e-6)
    compared = RUN.invoke(tiles, ["compare", str(trace), str(trace), "--json"], catch_exceptions=False)
    assert compared.exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [["--bandwidth", "3"], ["--save", "x.json"], ["--source", "x"], ["--costs", "missing.json"], ["--fit", "x.json"]],
)
def test_options_that_make_no_sense_are_refused(small: list[str], arguments: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="allowed"):
        RUN.invoke(bench, ["predict", *small, *arguments], catch_exceptions=False)


def test_the_default_model_is_one_that_is_built_in() -> None:
    assert "llama-3.2-1b" in sources.builtin_names()
