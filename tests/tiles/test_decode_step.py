"""The whole decode step of an 8B model through every step: built, verified, lowered, simulated; on one core."""

from __future__ import annotations

import json
import time

import pytest
import typer
from typer.testing import CliRunner

from onewave.cli.tiles.lower import lower_command

PHASES = {"norm", "qkv", "rope+append", "attention", "combine", "o-proj", "ffn", "head"}


def lowered(*arguments):
    tool = typer.Typer()
    tool.command("lower")(lower_command)
    result = CliRunner().invoke(tool, ["decode", "llama-3.1-8b", "--workers", "132", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("queues", ["ticket", "static"])
def test_the_whole_decode_step_is_built_verified_lowered_and_simulated_in_seconds(queues):
    began = time.process_time()
    found = lowered("--queues", queues)
    assert time.process_time() - began < 30
    assert found["tasks"] > 50_000
    predicted = found["prediction"]
    assert {phase["phase"] for phase in predicted["phases"]} == PHASES
    assert sum(phase["tasks"] for phase in predicted["phases"]) == found["tasks"]
    assert len(predicted["idle"]["per_worker_ns"]) == 132
    # 8 billion parameters of 2 bytes at the machine's 4,650 bytes/ns take 3.2 ms, whatever the order.
    assert 3_200_000 < predicted["makespan_ns"] < 5_000_000
    assert predicted["critical_path_ns"] <= predicted["makespan_ns"]


def test_two_tokens_in_one_launch_may_share_the_activations_of_all_layers():
    found = lowered("--reuse", "--tokens", "2", "--policy", "row", "--no-simulate")
    alone = lowered("--policy", "row", "--no-simulate")
    assert found["tasks"] == 2 * alone["tasks"]
    # Every overwrite of a layer's activations by the next layer is a pair of its own.
    assert found["pairs"] > 4 * alone["pairs"]
