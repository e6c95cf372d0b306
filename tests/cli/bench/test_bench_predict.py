"""`onewave bench predict`: predict, compare, fit and save, without a GPU."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from kit.lanes import slow
from kit.models.dummy import write_config
from kit.models.tiny_gguf import metadata_of, write_gguf
from kit.paths import DOCS
from onewave.base.errors import InvalidArgumentError
from onewave.cli.bench.commands import bench
from onewave.cli.tiles.commands import tiles
from onewave.weights.fetch import sources

RUN = CliRunner()
SIZES = {
    "vocab_size": 131, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 320,
}  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    write_config(tmp_path / "model", **SIZES)
    return ["--model", str(tmp_path / "model"), "--workers", "9"]


def predict(*arguments: str) -> str:
    done = RUN.invoke(bench, ["predict", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_what_was_simulated_is_fitted_to_the_same_costs_and_compares_as_equal(tmp_path: Path, small: list[str]) -> None:
    trace, costs = tmp_path / "step.json", tmp_path / "costs.json"
    assert "ms predicted" in predict(*small, "--trace", str(trace))
    fit = ["--fit", str(trace), "--bandwidth", "4650.6", "--out", str(costs), "--source", "this test"]
    fitted = json.loads(predict(*small[:2], *fit, "--json"))
    assert fitted["costs"]["source"] == "this test"
    again = json.loads(predict(*small, "--costs", str(costs), "--json"))
    assert again["predicted_ms"] == pytest.approx(fitted["predicted_ms"], rel=1e-6)
    compared = RUN.invoke(tiles, ["compare", str(trace), str(trace), "--json"], catch_exceptions=False)
    assert compared.exit_code == 0


@pytest.mark.parametrize(("kind", "options"), [("config.json", ["--batch-size", "2"]), ("gguf", []), ("directory", [])])
def test_tiles_simulate_says_the_same_of_the_same_model(tmp_path: Path, kind: str, options: list[str]) -> None:
    config = write_config(tmp_path, **SIZES, rms_norm_eps=1e-5) / "config.json"
    model = {"config.json": config, "gguf": tmp_path / "model.gguf", "directory": tmp_path}[kind]
    if kind == "gguf":
        sizes = SimpleNamespace(**SIZES, head_dim=32, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 10_000.0})
        rows = np.zeros((SIZES["vocab_size"], SIZES["hidden_size"]), np.float32)
        write_gguf(model, "llama", metadata_of("llama", sizes), {"token_embd.weight": (rows, "F32")})
    predicted = json.loads(predict("--model", str(model), *options, "--json"))["predicted_ms"]
    done = RUN.invoke(tiles, ["simulate", "decode", str(config), *options, "--json"], catch_exceptions=False)
    found = json.loads(done.output)
    assert found["predicted_ms"] == predicted
    assert found["gap"] >= 0


def test_longer_contexts_take_longer_and_smaller_weights_less(small: list[str]) -> None:
    def found(*arguments: str) -> float:
        return json.loads(predict(*small, "--batch-size", "2", *arguments, "--json"))["predicted_ms"]

    times = [found("--context", keys) for keys in ("0", "20000", "200000")]
    assert times == sorted(set(times))
    by_format = [found("--weight-format", name) for name in ("int8", "compact", "16-bit")]
    assert by_format == sorted(set(by_format))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--weight-format", "int3"],
        ["--context", "-1"],
        ["--bandwidth", "3"],
        ["--out", "x.json"],
        ["--source", "x"],
        ["--costs", "missing.json"],
        ["--fit", "x.json"],
    ],
)
def test_options_that_make_no_sense_are_refused(small: list[str], arguments: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="allowed"):
        RUN.invoke(bench, ["predict", *small, *arguments], catch_exceptions=False)


@pytest.mark.parametrize("text", ["[]", "{}", '{"source": "x", "memory_bandwidth": 1, "hand_offs": []}'])
def test_a_file_of_something_else_holds_no_costs(tmp_path: Path, small: list[str], text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"costs\.json: .*JSON with source, memory_bandwidth and hand_offs"):
        RUN.invoke(bench, ["predict", *small, "--costs", str(tmp_path / "costs.json")], catch_exceptions=False)


@pytest.mark.parametrize("model", ["llama-3.2-1b", slow("llama-3.1-8b")])
def test_the_reference_states_what_is_predicted(model: str) -> None:
    text = (DOCS / "reference" / "wave.md").read_text(encoding="utf-8")
    small = re.search(r"It says ([\d., and]+) ms for one to sixteen sequences of the 1B", text)
    large = re.search(r"and ([\d., and]+) for one,\s+eight and sixteen of an 8B", text)
    numbers, batches = (small[1], 5) if model == "llama-3.2-1b" else (large[1], 3)
    stated = re.findall(r"\d\.\d+", numbers)
    assert len(stated) == batches
    # Sixteen sequences alone: the other batches take half a minute.
    found = json.loads(predict("--model", model, "--batch-size", "16", "--weight-format", "16-bit", "--json"))[
        "predicted_ms"
    ]
    assert found == pytest.approx(float(stated[-1]), abs=6e-4)


def test_the_default_model_is_one_that_is_built_in() -> None:
    assert "llama-3.2-1b" in sources.builtin_names()
