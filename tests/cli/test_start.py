"""The command's first and last moments: Ctrl-C while libraries load, no torch, closed streams, a full disk."""

import inspect
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kit.lanes import slow
from onewave.cli import start

COMMAND = [sys.executable, "-m", "onewave"]
PACKAGE = Path(start.__file__).parents[1]
NOT_CAUGHT = -signal.SIGINT
"""Status of a process that had not come as far as our handler."""


@pytest.mark.parametrize("seconds", [0.05, 0.25, 0.4, 0.5, 0.8, *map(slow, (0.15, 0.35, 0.45, 0.6, 1.0))])
def test_an_interrupt_ends_the_command_quietly_whatever_it_is_loading(seconds: float) -> None:
    arguments = ["generate", "hi", "--model", "smollm2-135m-instruct", "--load-format", "dummy", "--max-tokens", "2000"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, NOT_CAUGHT) or pythons_own_start(process.returncode, errors)
    assert "internal error" not in errors


def pythons_own_start(status: int, errors: str) -> bool:
    """Whether Python was interrupted before the first line of ours, which it ends with 1."""
    return status == 1 and errors.rstrip().endswith("KeyboardInterrupt") and str(PACKAGE) not in errors


def test_an_interrupt_in_pythons_import_system_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weak references' callbacks ignore exceptions."""
    left: list[int] = []
    monkeypatch.setattr(start.os, "_exit", left.append)
    names: dict[str, Any] = {}
    exec(compile("def cb(current):\n    return current()\n", "<frozen importlib._bootstrap>", "exec"), names)
    with pytest.raises(KeyboardInterrupt):
        start._interrupt(signal.SIGINT, names["cb"](inspect.currentframe))
    assert left == [130]
    left.clear()
    with pytest.raises(KeyboardInterrupt):
        start._interrupt(signal.SIGINT, inspect.currentframe())
    assert left == []


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_command_that_needs_torch_says_so_where_there_is_none(command: str) -> None:
    arguments = [command, *["hi"][: command == "generate"], "--model", "llama-3.2-1b", "--load-format", "dummy"]
    code = "import sys; sys.modules['torch'] = None; from onewave.cli.main import run; sys.exit(run(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {command} needs PyTorch: not installed. Run `pip install torch`.\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_nobody_reading(closed: str) -> None:
    shell = f'"$0" -m onewave env {closed}'
    done = subprocess.run(["sh", "-c", shell, sys.executable], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "error" not in done.stdout + done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "env"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "error: the output: No space left on device\n"
