"""The table that `onewave tiles lower decode` writes is the one that the engine launches, word for word."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from kit.lanes import slow
from kit.models.dummy import write_config
from kit.task_tables.verify_table import verify_table
from onewave.base.weight_formats import COMPACT, ROUNDINGS, WeightFormat
from onewave.cli.main import run
from onewave.engine.load import wave as load_module
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.plan_cache import load_program, program_path
from onewave.engine.load.wave import load_wave
from onewave.models import decode_wave
from onewave.models.config.read import find_config
from onewave.models.llama_plan import plan_program, workers_for
from onewave.tiles.proof.table import TaskTable
from onewave.wave.launch import launch
from onewave.wave.plan.program import WaveProgram
from onewave.wave.plan.program_file import read_program, read_table
from onewave.weights.fetch.sources import BUILTIN_DIR, ModelLocation

FORMATS: dict[str, WeightFormat | None] = {"16-bit": None, "compact": COMPACT, **ROUNDINGS}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    return str(write_config(tmp_path, **sizes, vocab_size=131, max_position_embeddings=512) / "config.json")


@pytest.fixture
def sms(monkeypatch: pytest.MonkeyPatch) -> int:
    """SMs of a device that is not there; nothing is compiled for it."""
    monkeypatch.setattr(launch, "runs_here", lambda device: True)
    monkeypatch.setattr(launch, "co_resident", lambda device: 114)
    monkeypatch.setattr(
        load_module,
        "plan_and_compile",
        lambda config, how, workers: plan_program(how.step(config), workers=workers),
    )
    return 114


def written(model: str, batch: int, weight_format: str, sms: int, out: Path) -> WaveProgram:
    asked = ["--batch-size", batch, "--weight-format", weight_format, "--workers", sms, "--context", 700, "--out", out]
    assert run(["tiles", "lower", "decode", model, "--no-simulate", *map(str, asked)]) == 0
    return read_program(out.read_bytes())


def loaded_by(batch: int, weight_format: str, cache: Path) -> LoadOptions:
    return LoadOptions(
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_num_seqs=batch,
        max_model_len=64,
        cache_dir=cache,
        load_format="dummy",
        weight_format=FORMATS[weight_format],
        insists=weight_format != "16-bit",
    )


def check_same(found: WaveProgram, expected: WaveProgram) -> None:
    for field in fields(WaveProgram):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "stream":
            assert list(one) == list(other)
            assert all(np.array_equal(one[name], other[name]) for name in one)
        elif isinstance(one, np.ndarray):
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), field.name
        else:
            assert one == other, field.name


@pytest.mark.parametrize(
    ("model", "batch", "weight_format"),
    [
        ("tiny", 1, "16-bit"), ("tiny", 8, "int8"), ("tiny", 3, "compact"),
        ("two layers", 8, "16-bit"), ("two layers", 1, "compact"), slow("llama-3.2-1b", 8, "16-bit"),
    ],
)  # fmt: skip
def test_the_words_that_the_command_writes_are_the_words_that_the_engine_launches(
    model: str, batch: int, weight_format: str, tiny: str, sms: int, tmp_path: Path
) -> None:
    name = tiny if model == "tiny" else model
    if model == "two layers":
        facts = json.loads((BUILTIN_DIR / "llama-3.2-1b.json").read_text())
        name = str(tmp_path / "two.json")
        Path(name).write_text(json.dumps(facts | {"num_hidden_layers": 2}))
    by_command = written(name, batch, weight_format, sms, tmp_path / "step.npz")
    config, how = find_config(name), loaded_by(batch, weight_format, tmp_path)
    planned = load_module.program_of(config, how)
    check_same(planned, by_command)
    workers = workers_for(how.step(config), available=sms)
    path = program_path(how.step(config), workers=workers, cache_dir=tmp_path)
    kept = load_program(path)
    assert kept is not None
    check_same(kept, by_command)


def test_a_loaded_model_launches_the_program_of_the_command(
    tiny: str, sms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[WaveProgram] = []

    class Launched(Exception):
        """Ends the load where the launch would be made."""

    def make(model: object, *, batch: int, stream: decode_wave.WeightStream) -> None:
        launched.append(stream.program)
        raise Launched

    monkeypatch.setattr(decode_wave, "DecodeWave", make)
    by_command = written(tiny, 4, "int8", sms, tmp_path / "step.npz")
    location = ModelLocation("hf", Path(tiny).parent, "tiny")
    with pytest.raises(Launched):
        load_wave(location, find_config(tiny), loaded_by(4, "int8", tmp_path))
    check_same(launched[0], by_command)


def test_the_task_table_beside_the_words_is_proved_and_has_a_row_a_step(tiny: str, sms: int, tmp_path: Path) -> None:
    program = written(tiny, 2, "16-bit", sms, tmp_path / "step.npz")
    table = TaskTable.from_words(read_table((tmp_path / "step.npz").read_bytes()))
    verify_table(table)
    rows = [row for queue in table.queues for row in queue.tolist()]
    assert tuple(table.name(row) for row in rows) == program.names
    assert run(["tiles", "interpret", str(tmp_path / "step.npz"), "--runs", "3"]) == 0


@pytest.mark.parametrize("changed", [["--sync", "tile"], ["--queues", "ticket"], ["--tokens", "2"]])
def test_what_the_engine_does_not_launch_is_not_written_as_its_words(
    changed: list[str], tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.npz"
    assert run(["tiles", "lower", "decode", tiny, "--no-simulate", "--out", str(out), *changed]) == 2
    assert "a launch's words" in capsys.readouterr().err
    assert not out.exists()
