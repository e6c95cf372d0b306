"""Threads that begin a first launch: Triton's digest of its files, and C launchers of kernels."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton.backends.nvidia import driver
from triton.runtime import build, cache

from onewave.gpu import first_launch
from onewave.gpu.first_launch import await_first_launch, begin_first_launch, keep_first_launch


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The threads that have read Triton's files. There is no driver."""
    seen: list[str] = []

    def key() -> str:
        seen.append(threading.current_thread().name)
        return "key"

    monkeypatch.setattr(cache, "triton_key", key)
    monkeypatch.setattr(first_launch, "_make_context", print)
    first_launch._stamp.cache_clear()
    yield seen
    first_launch._stamp.cache_clear()


def test_tritons_files_are_read_by_a_thread_once_and_then_remembered(read: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        begin_first_launch(0, tmp_path / "new")
        await_first_launch()
        assert cache.triton_key() == "key"
        keep_first_launch(tmp_path / "new")
    assert read == ["first-launch", "MainThread", "MainThread"]  # the test's own question, and what was kept


def test_what_files_say_that_changed_after_they_were_imported_is_not_remembered(
    read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_launch, "_IMPORTED_NS", 0)
    for _ in range(2):
        keep_first_launch(tmp_path)
        first_launch._stamp.cache_clear()  # as in another process
        begin_first_launch(0, tmp_path)
        await_first_launch()
    assert read == ["MainThread", "first-launch"] * 2


@pytest.mark.parametrize("text", ["", "[]", '{"files": 1}', '{"files": "other", "triton": "wrong", "hashes": {}}'])
def test_what_is_remembered_of_other_files_or_is_damaged_is_found_again(
    text: str, read: list[str], tmp_path: Path
) -> None:
    (tmp_path / "first-launch.json").write_text(text)
    begin_first_launch(0, tmp_path)
    await_first_launch()
    assert read == ["first-launch"]
    keep_first_launch(tmp_path)
    assert json.loads((tmp_path / "first-launch.json").read_text())["triton"] == "key"


def test_whatever_fails_is_left_to_the_launch(read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(first_launch, "_make_launchers", int)  # which takes no list
    begin_first_launch(0, tmp_path / "file", [("i32",)])
    await_first_launch()
    keep_first_launch(tmp_path / "file")
    monkeypatch.delattr(cache, "triton_key")  # as in another Triton
    keep_first_launch(tmp_path)
    assert [thread for thread in threading.enumerate() if thread.name == "first-launch"] == []
    assert read[0] == "first-launch"


def test_triton_finds_the_launchers_that_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(driver, "libraries", [])  # there may be no driver to link
    monkeypatch.setattr(first_launch, "_make_context", print)
    begin_first_launch(0, tmp_path, [("*fp32", "i32", "nvTmaDesc"), ("i32", ("i64", "*bf16"))])
    await_first_launch()
    found: list[str] = []

    def load(name: str, path: str) -> None:
        found.append(name)

    monkeypatch.setattr(build, "_load_module_from_path", load)
    monkeypatch.setattr(build, "_build", None)
    for types in (("i32", ("i64", "*bf16")), ("*fp32", "i32", "nvTmaDesc")):
        source: str = driver.make_launcher({}, dict(enumerate(types)), None)
        build.compile_module_from_src(source, "__triton_launcher")
    build.compile_module_from_src(Path(driver.dirname, "driver.c").read_text(), "cuda_utils")
    assert found == ["__triton_launcher", "__triton_launcher", "cuda_utils"]
