"""Prebuilt kernels are today's, Triton takes them for its own, and nothing else is taken for one of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from kit.paths import PYTHONPATH
from kit.processes import python

COMPILED = (
    "attention-128-bfloat16/causal-packed-many-sort_slots",
    "attention-64-bfloat16/full",
    "attention-128-float8_e4m3fn/causal",
    "linear-bfloat16/1x64-16",
    "load-ops/rms_norm_kernel-llama-3.1-8b-1-compact",
)


def run(cache: Path, *compiled: str) -> dict[str, Any]:
    places = {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": PYTHONPATH}
    return json.loads(python("-m", "kit.alone.prebuilt_alone", *compiled, **places))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("triton"))


def test_prebuilt_kernels_are_compiled_from_today_s_sources(found: dict[str, Any]) -> None:
    assert found["stale"] == [], "run make kernels"
    assert found["nothing more"]
    assert found["damaged"] == []


@pytest.mark.slow
def test_what_every_model_s_load_launches_is_prebuilt_and_nothing_else(tmp_path: Path) -> None:
    every = run(tmp_path, "--every")
    assert every["stale"] == every["unknown"] == [], "run make kernels"


@pytest.mark.parametrize("models", [["llama-3.2-1b"], pytest.param([], marks=pytest.mark.slow, id="all")])
def test_a_load_of_a_gguf_file_of_a_shape_that_ships_compiles_nothing(models: list[str]) -> None:
    missing = json.loads(python("-m", "kit.alone.kept_alone", *models, PYTHONPATH=PYTHONPATH))
    assert len(missing) >= 3
    assert not any(missing.values()), "run make kernels"


def test_launchers_ship_for_what_a_load_launches(found: dict[str, Any]) -> None:
    assert found["launchers"] == {"today's": True, "Triton's": True}, "run make kernels"


def test_binaries_name_no_files(found: dict[str, Any]) -> None:
    assert found["paths"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_triton_finds_it_and_it_is_what_triton_would_have_compiled(tmp_path: Path, name: str) -> None:
    of_one = run(tmp_path, name)[name]
    assert of_one.pop("how") == "found"
    assert all(of_one.values()), of_one


def test_only_the_very_same_kernel_is_taken(found: dict[str, Any]) -> None:
    taken = dict(found["taken"])
    assert taken.pop("as it is")
    assert not any(taken.values()), taken


def test_damaged_files_are_not_taken_and_named(found: dict[str, Any]) -> None:
    binaries, indices = found["said"][:3], found["said"][3:]
    assert [said.partition(":")[0] for said in binaries] == [
        "/prebuilt/attention-128-bfloat16.xz is missing or damaged"
    ] * 3
    assert [said.partition(":")[0] for said in indices] == ["/prebuilt/index.json is damaged"] * 5


def test_the_first_question_of_a_process_finds_the_prebuilt_kernels() -> None:
    code = "from onewave.gpu.prebuilt import has_prebuilt; print(has_prebuilt('wave'), has_prebuilt('wave'))"
    assert python("-c", code).split() == ["True", "True"]
