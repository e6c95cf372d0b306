"""Facts that are found out about the machine."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from onewave.base.settings import Settings
from onewave.bench import machine


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("cpu", "cpu"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("", "unknown"),
    ],
)
def test_a_device_has_a_short_name(name, slug):
    assert machine.device_slug(name) == slug


def settings(commit: str | None = None) -> Settings:
    return Settings(cache_dir=Path("cache"), num_threads=1, commit=commit)


def answers(monkeypatch, table: dict[str, str | None]) -> None:
    """Let programs answer by their first distinctive argument; None fails."""

    def run(command, **options):
        for key, text in table.items():
            if key in command:
                if text is None:
                    raise FileNotFoundError(command[0])
                return SimpleNamespace(stdout=text)
        raise subprocess.CalledProcessError(128, command)

    monkeypatch.setattr(machine.subprocess, "run", run)


def test_the_commit_says_when_the_sources_have_changed(monkeypatch):
    root = str(Path(machine.__file__).parents[3])
    git = {"--show-toplevel": f"{root}\n", "--short=12": "abc123\n"}
    answers(monkeypatch, git | {"status": ""})
    assert machine.source_commit(settings()) == "abc123"
    answers(monkeypatch, git | {"status": " M src/onewave/x.py\n"})
    assert machine.source_commit(settings()) == "abc123-dirty"


def test_the_environment_names_the_commit_of_a_copy(monkeypatch):
    answers(monkeypatch, {"git": None})
    assert machine.source_commit(settings()) == "unknown"
    assert machine.source_commit(settings("abc")) == "abc"
    root = str(Path(machine.__file__).parents[3])
    answers(monkeypatch, {"--show-toplevel": f"{root}\n", "--short=12": "abc123\n", "status": ""})
    assert machine.source_commit(settings("abc")) == "abc"


def test_another_repository_around_the_package_is_not_its_commit(monkeypatch):
    answers(monkeypatch, {"--show-toplevel": "/\n", "--short=12": "feed\n", "status": ""})
    assert machine.source_commit(settings()) == "unknown"


def test_gpus_are_read_from_nvidia_smi(monkeypatch):
    answers(monkeypatch, {"nvidia-smi": "NVIDIA H200, 580.1, 143771\nnonsense\n"})
    assert machine.gpus() == [machine.GPU("NVIDIA H200", "580.1", 143771)]
    answers(monkeypatch, {"nvidia-smi": None})
    assert machine.gpus() == []


def test_cpu_features_are_those_that_linux_lists(monkeypatch):
    monkeypatch.setattr(machine, "_cpuinfo", lambda: "model name\t: Some CPU\nflags\t\t: fpu avx2 amx_int8 sse\n")
    assert machine.cpu_features() == ["avx2", "amx_int8"]
    assert machine.cpu_name() == "Some CPU"


def test_a_machine_without_proc_is_no_error(monkeypatch):
    monkeypatch.setattr(machine, "_cpuinfo", lambda: "")
    assert machine.cpu_features() == []
    assert machine.cpu_name()


def test_a_package_that_is_not_there_has_no_version():
    assert machine.package_version("no-such-package-anywhere") is None
    assert machine.package_version("numpy")
