"""The product of many rows beside PyTorch's, on a CPU: what is timed, and what counts as a loss."""

import json
from collections.abc import Mapping

import pytest
import torch
from typer.testing import CliRunner

from kit.models.tiny_decoders import BASE
from onewave.base.errors import InvalidArgumentError
from onewave.base.weight_formats import COMPACT
from onewave.bench.clock import Summary, summarize
from onewave.bench.ops import products
from onewave.bench.ops.products import Setting, measure_products, product_of_shape, products_of
from onewave.cli.main import app
from onewave.ops.linear import linear

CPU = torch.device("cpu")


@pytest.fixture
def slower_from_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which tiles take twice as long as all else; each call is made once."""

    def timed(runs: Mapping[str, tuple[object, int]], device: torch.device, *, rounds: int) -> dict[str, Summary]:
        for run, _ in runs.values():
            assert callable(run)
            run()
        return {name: summarize([2e-3 if "tiles" in name else 1e-3] * rounds) for name in runs}

    monkeypatch.setattr(products, "time_in_rounds", timed)
    monkeypatch.setattr(products, "_MAX_COPIES", 2)
    monkeypatch.setattr(products, "_SMALL_VOCAB", 64)


@pytest.mark.usefixtures("slower_from_tiles")
def test_each_matrix_of_a_model_is_multiplied_plain_and_from_tiles() -> None:
    setting = Setting(CPU, torch.bfloat16, COMPACT, sequences=2, rounds=3)
    plan = [*products_of(BASE), product_of_shape(BASE, 64, 128)]
    results = list(measure_products(plan, [3], setting, show=lambda text: None))
    assert [result.product.name for result in results[::3]][:1] == ["qkv"]
    ways = {product.name: [each.implementation for each in results if each.product is product] for product in plan}
    plain = ["onewave", "torch", "onewave, compact tiles"]
    assert ways == {
        "qkv": plain, "o": plain, "gate_up": [*plain[:2], "onewave, SwiGLU", plain[2]], "down": plain, "head": plain,
        "matrix": plain,
    }  # fmt: skip
    assert [result.is_loss for result in results[:3]] == [False, False, True]
    assert [result.ratio for result in results[:3]] == [1.0, None, 0.5]
    assert results[-1].product.shape == (64, 128)
    assert results[-1].teraflops_per_second == pytest.approx(2 * 3 * 64 * 128 / 2e-3 * 1e-12)


def test_tiles_hold_the_plain_weights() -> None:
    setting = Setting(CPU, torch.bfloat16, COMPACT, sequences=2, rounds=1)
    for product in products_of(BASE):
        weight, x = (torch.randn(rows, product.cols).bfloat16() for rows in (product.shape[0], 3))
        [matrix] = products._in_tiles(product, [weight], COMPACT, setting)  # pyright: ignore[reportPrivateUsage]
        assert torch.equal(linear(x, matrix), linear(x, weight)), product.name


@pytest.mark.usefixtures("slower_from_tiles")
def test_losses_are_printed_last() -> None:
    asked = ["bench", "ops", "linear", "--model", "llama-3.2-1b", "--device", "cpu", "--dtype", "bfloat16"]
    asked += ["--shape", "64,128"]
    done = CliRunner().invoke(app, [*asked, "--rows", "2,5", "--reps", "2"])
    assert done.exception is None, done.exception
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[2:4]] == [["matrix", "64x128", "onewave"], ["matrix", "64x128", "torch"]]
    loss = "loss: matrix 64x128, {} rows, onewave, compact tiles: 0.500 of torch's speed"
    assert lines[-3:] == [loss.format(2), loss.format(5), "2 of 4 below 0.95 of torch's speed"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--rows", "2", "--weight-format", "16-bit", "--json"]).stdout)
    assert [each["implementation"] for each in found["products"]] == ["onewave", "torch"]
    assert found["losses"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["swiglu", "--rows", "2"], "--rows: with swiglu"),
        (["linear", "--rows", "2", "--context", "5"], "--rows: with --context"),
        (["linear", "--rows", "0"], "--rows: 0"),
        (["linear", "--weight-format", "Q4_1"], "--weight-format: no --rows; allowed: with --rows"),
        (["linear", "--rows", "2", "--weight-format", "int3"], "--weight-format: 'int3'"),
        (["linear", "--rows", "2", "--shape", "64"], "--shape: '64'"),
        (["linear", "--rows", "2"], "--weight-format: compact, of float32; allowed: 16-bit, or --dtype bfloat16"),
    ],
)
def test_what_can_not_be_measured_is_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "ops", *arguments, "--model", "llama-3.2-1b", "--device", "cpu"])
    assert isinstance(done.exception, InvalidArgumentError)
    assert str(done.exception).startswith(said)
