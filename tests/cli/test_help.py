"""Help, versions and the command itself."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

COMMANDS = [[], ["generate"], ["chat"], ["info"], ["env"], ["bench"], ["bench", "latency"], ["bench", "peers"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(onewave, command):
    done = onewave(*command, "--help")
    assert done.status == 0
    assert "Usage: onewave" in done.out
    assert done.err == ""


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["bench", "latency"]], ids=" ".join)
def test_the_flags_are_named_as_in_vllm(onewave, command):
    text = onewave(*command, "--help").out
    for flag in ("--model", "--dtype", "--max-model-len", "--load-format", "--revision", "--enforce-eager"):
        assert flag in text


def test_without_a_command_the_help_is_shown(onewave):
    done = onewave()
    assert done.status == 0
    assert "generate" in done.out


def test_the_version_is_printed(onewave):
    done = onewave("--version")
    assert (done.status, done.out.split()[0]) == (0, "onewave")


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "onewave", *arguments], capture_output=True, text=True, timeout=60)


def test_the_package_runs_as_a_module():
    done = run_module("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: onewave")


def test_help_and_errors_come_within_half_a_second():
    for arguments, status in ((["--help"], 0), (["generate", "x", "--temperature", "-1"], 2)):
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            assert run_module(*arguments).returncode == status
            seconds.append(time.perf_counter() - start)
        # The fastest: whatever else the machine does only adds.
        assert min(seconds) < 0.5
