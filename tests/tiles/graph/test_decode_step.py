"""The decode step that the wave runs, as tiles see it: dealt, verified, lowered, simulated; on one core."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from kit.models.dummy import write_config
from kit.task_tables.small_graphs import small_model, small_step
from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.base.weight_formats import COMPACT, ROUNDINGS
from onewave.cli.tiles.commands import tiles
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import DecodeStep, deal_decode, plan_decode
from onewave.tiles.sim.machine import Machine
from onewave.tiles.sim.simulate import simulate
from onewave.tiles.sim.traffic import compulsory

STAGES = {"qkv", "attend", "o", "gate_up", "down", "head"}


def lowered(*arguments):
    result = CliRunner().invoke(tiles, ["lower", "decode", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def small_file(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 16, "max_position_embeddings": 512}
    return write_config(tmp_path, **sizes) / "config.json"


def test_the_whole_decode_step_is_dealt_verified_lowered_and_simulated():
    found = lowered("llama-3.2-1b", "--workers", "132")
    predicted = found["prediction"]
    assert {phase["phase"] for phase in predicted["phases"]} == STAGES
    assert sum(phase["tasks"] for phase in predicted["phases"]) == found["tasks"] == found["launch"]["steps"]
    assert len(predicted["idle"]["per_worker_ns"]) == found["launch"]["workers"] == 132
    # 1.24 billion parameters of 13 bits and the keys and values at 4,650 bytes/ns take 0.434 ms, whatever the order.
    assert 434_000 < predicted["makespan_ns"] < 800_000
    assert predicted["critical_path_ns"] <= predicted["makespan_ns"]


def test_two_tokens_in_one_launch_may_share_the_activations_of_all_layers(small_file):
    how = (str(small_file), "--workers", "4", "--no-simulate", "--sync", "row")
    found, apart, alone = lowered(*how, "--reuse", "--tokens", "2"), lowered(*how, "--tokens", "2"), lowered(*how)
    assert found["tasks"] == 2 * alone["tasks"]
    # Every overwrite of a layer's activations by the next layer is a pair of its own.
    assert found["pairs"] > apart["pairs"] > 2 * alone["pairs"]
    assert found["launch"] is None
    assert alone["launch"] is None  # the engine launches what is proved by another policy


def test_a_directory_and_its_config_are_one_model(small_file):
    by_file, by_directory = (lowered(str(path), "--no-simulate") for path in (small_file, small_file.parent))
    assert by_file["words"] == by_directory["words"]
    assert by_file["launch"] == by_directory["launch"]


def test_another_order_or_tickets_take_the_plans_queues_away(small_file):
    how = (str(small_file), "--workers", "4", "--no-simulate")
    own, tickets, other = lowered(*how), lowered(*how, "--queues", "ticket"), lowered(*how, "--order", "critical-path")
    assert own["mode"] == "static"
    assert own["launch"]["workers"] == own["workers"]
    assert tickets["mode"] == other["mode"] == "ticket"
    assert tickets["launch"] is other["launch"] is None


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize(("form", "context"), [(None, 0), (ROUNDINGS["int8"], 300), (COMPACT, 5000)])
def test_a_step_reads_each_weight_and_each_cached_key_once(batch, form, context):
    config = replace(builtin_config("llama-3.2-1b"), num_layers=1, layer_windows=(None,), vocab_size=1024)
    asked = DecodeStep(config, batch, form)
    step, width = deal_decode(asked, workers=7, context=context), asked.weight_bytes
    matrices = config.hidden_size * (3 * config.hidden_size // 2 + config.hidden_size + 3 * config.intermediate_size)
    weights = matrices + config.vocab_size * config.hidden_size
    keys = 2 * 2 * batch * config.num_kv_heads * context * config.head_dim
    found = sum(tensor.nbytes for name, tensor in step.graph.tensors.items() if name.startswith("W_"))
    cached = sum(tensor.nbytes for name, tensor in step.graph.tensors.items() if name.startswith("cache"))
    assert (found, cached) == (weights * width, keys)
    # The rest: the embedded tokens, and the residual stream that stays on its worker.
    assert (
        weights * width + keys <= compulsory(step.graph)[0] < weights * width + keys + 16 * 3 * config.hidden_size * 4
    )


def test_a_window_bounds_the_keys_that_are_read():
    config = replace(small_model(num_layers=2), layer_windows=(129, None))
    graph = deal_decode(DecodeStep(config), workers=2, context=4000).graph
    assert graph.tensors["cache0"].nbytes == 2 * 2 * 32 * 128
    assert graph.tensors["cache1"].nbytes == 2 * 2 * 32 * 4000


@pytest.mark.parametrize("batch", [1, 4])
def test_the_context_changes_no_word_of_the_program(batch):
    programs = [
        plan_decode(DecodeStep(small_model(), batch), workers=3, context=keys).program for keys in (0, 1, 257, 99_999)
    ]
    for program in programs[1:]:
        assert np.array_equal(program.steps, programs[0].steps)
        assert np.array_equal(program.waits, programs[0].waits)


def test_a_longer_context_takes_longer():
    times = []
    for context in (0, 10_000, 100_000):
        step = small_step(context=context, workers=4)
        times.append(simulate(step.graph, machine=Machine(4), queues=step.queues).makespan)
    assert times == sorted(set(times))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"batch": 17}, UnsupportedError, "up to 16"),
        ({"batch": 0}, UnsupportedError, "up to 16"),
        ({"workers": 0}, InvalidArgumentError, "1 to 4,096"),
        ({"context": -1}, InvalidArgumentError, "context: -1"),
        ({"context": 1 << 31}, InvalidArgumentError, "context"),
        ({"hidden_size": 72}, UnsupportedError, "no multiple of 64"),
    ],
    ids=str,
)
def test_a_step_that_does_not_run_is_refused_by_name(changes, error, words):
    with pytest.raises(error, match=words):
        small_step(**changes)
