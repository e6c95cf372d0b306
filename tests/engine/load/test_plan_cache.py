"""Decode programs on disk: the same program back, and never a wrong one."""

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kit.models.tiny_decoders import BASE
from kit.paths import PYTHONPATH
from kit.processes import python
from onewave.base.weight_formats import COMPACT, WeightFormat
from onewave.engine.load import plan_cache
from onewave.engine.load.plan_cache import (
    PLANNING_SOURCES,
    SHIPPED,
    is_shipped,
    load_program,
    planned_before,
    program_path,
    save_program,
    shipped_path,
)
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import DecodeStep, plan_decode, plan_program, planned_facts, workers_for
from onewave.wave.plan.program import WaveProgram


@pytest.fixture(scope="module")
def program() -> WaveProgram:
    return plan_decode(DecodeStep(BASE, 3), workers=3).program


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def test_a_program_comes_back_field_by_field(program: WaveProgram, tmp_path: Path) -> None:
    path = tmp_path / "wave" / "a.program"
    assert load_program(path) is None
    assert save_program(program, path)
    found = load_program(path)
    assert found is not None
    for field in fields(WaveProgram):
        assert same(getattr(found, field.name), getattr(program, field.name)), field.name
    assert [file.name for file in path.parent.iterdir()] == ["a.program"]


def test_a_file_that_is_cut_short_or_changed_anywhere_is_no_program(program: WaveProgram, tmp_path: Path) -> None:
    path = tmp_path / "a.program"
    save_program(program, path)
    whole = path.read_bytes()
    for place in (0, 31, 32, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert load_program(path) is None
        path.write_bytes(whole[:place])
        assert load_program(path) is None


def test_another_model_batch_gpu_or_code_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path(config=BASE, batch: int = 3, workers: int = 3) -> Path:
        return program_path(DecodeStep(config, batch), workers=workers, cache_dir=tmp_path)

    first = path()
    assert path(batch=4) == first  # both are padded to four
    others = {path(batch=5), path(workers=4), path(replace(BASE, vocab_size=132)), path(replace(BASE, qk_norm=True))}
    assert len(others | {first}) == 5
    monkeypatch.setattr(plan_cache, "_SOURCES", ("wave/plan/layout.py",))
    assert path() != first


def test_a_cache_that_cannot_be_written_is_as_good_as_none(program: WaveProgram, tmp_path: Path) -> None:
    (tmp_path / "wave").write_text("a file where the folder should be")
    assert not save_program(program, tmp_path / "wave" / "a.program")
    assert load_program(tmp_path / "wave" / "a.program") is None


def test_the_oldest_programs_make_room(program: WaveProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_MAX_FILES", 2)
    for name in "abc":
        save_program(program, tmp_path / f"{name}.program")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b.program", "c.program"]


def test_what_a_process_left_that_ended_while_it_wrote_goes_in_time(program: WaveProgram, tmp_path: Path) -> None:
    old, new = tmp_path / ".program-0123", tmp_path / ".program-4567"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert save_program(program, tmp_path / "a.program")
    assert sorted(file.name for file in tmp_path.iterdir()) == [new.name, "a.program"]


def test_a_program_that_another_process_removes_meanwhile_is_nothing_to_fail_over(
    program: WaveProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Path.glob

    def gone(directory: Path, pattern: str) -> Iterator[Path]:
        yield directory / f"gone{pattern[1:]}"
        yield from found(directory, pattern)

    monkeypatch.setattr(Path, "glob", gone)
    assert save_program(program, tmp_path / "a.program")
    assert load_program(tmp_path / "a.program") is not None


def test_who_may_read_the_cache_finds_its_programs(program: WaveProgram, tmp_path: Path) -> None:
    path = program_path(DecodeStep(BASE, 3), workers=3, cache_dir=tmp_path)
    before = os.umask(0o022)
    try:
        assert save_program(program, path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert planned_before(DecodeStep(BASE, 3), cache_dir=tmp_path)
    assert not planned_before(DecodeStep(BASE, 8), cache_dir=tmp_path)


@pytest.mark.parametrize("place", ["x" * 300, "a\0b"])
def test_a_cache_that_cannot_be_is_none(program: WaveProgram, tmp_path: Path, place: str) -> None:
    path = program_path(DecodeStep(BASE, 3), workers=3, cache_dir=tmp_path / place)
    assert not planned_before(DecodeStep(BASE, 3), cache_dir=tmp_path / place)
    assert load_program(path) is None
    assert not save_program(program, path)


def test_a_cache_that_may_not_be_searched_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "glob", refuse)
    assert not planned_before(DecodeStep(BASE, 3), cache_dir=tmp_path)


def test_a_program_follows_from_the_modules_that_its_name_counts_and_no_others() -> None:
    code = "import sys, onewave.models.llama_plan; print(*(m for m in sys.modules if m.startswith('onewave.')))"
    imported = python("-c", code).split()
    package = Path(plan_cache.__file__).parents[2]
    counted = {str(file.relative_to(package)) for pattern in PLANNING_SOURCES for file in package.glob(pattern)}
    loaded = {f"{name.removeprefix('onewave.').replace('.', '/')}.py" for name in imported}
    modules = {name for name in loaded if (package / name).exists()}
    assert modules - counted == {"base/errors.py", "base/weight_formats.py", "models/config/model_config.py"}


def test_planning_looks_at_the_facts_that_a_name_counts_and_at_no_others(program: WaveProgram) -> None:
    facts = planned_facts(BASE)
    few: Any = SimpleNamespace(rope=SimpleNamespace(rotary_dim=facts.pop("rotary_dim")), **facts)
    assert same(plan_program(DecodeStep(few, 3), workers=3).steps, program.steps)


@pytest.mark.parametrize(("batch", "form"), [(1, COMPACT), (8, None)])
def test_a_shipped_program_is_what_would_be_planned(batch: int, form: WeightFormat | None) -> None:
    config = replace(builtin_config("llama-3.2-1b"), eos_token_ids=(7,))  # as a checkpoint of the same shape has it
    step = DecodeStep(config, batch, form)
    workers = workers_for(step, available=132)
    found = load_program(shipped_path(step, workers=workers))
    assert found is not None, "run make kernels"
    planned = plan_program(step, workers=workers)
    assert all(same(getattr(found, field.name), getattr(planned, field.name)) for field in fields(WaveProgram))
    assert is_shipped(step)
    assert not is_shipped(replace(step, config=replace(config, num_layers=15)))


def test_programs_of_every_built_in_model_ship_and_no_others() -> None:
    code = "import programs; print(*(programs.place_of(step)[0].name for step in programs.steps()))"
    assert sorted(python("-c", code, PYTHONPATH=PYTHONPATH).split()) == sorted(
        file.name for file in SHIPPED.iterdir()
    ), "run make kernels"
