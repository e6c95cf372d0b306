"""compute-sanitizer finds no race in shared memory and no access out of bounds in Hopper's prefill kernels."""

import os
import shutil
import subprocess
import sys

import pytest

from kit.alone.racecheck_calls import CALLS
from kit.operands.on_gpu import ON_WAVE
from kit.paths import PYTHONPATH

SANITIZER = os.environ.get("COMPUTE_SANITIZER", "compute-sanitizer")
pytestmark = [
    *ON_WAVE,
    pytest.mark.skipif(
        shutil.which(SANITIZER) is None, reason="needs compute-sanitizer, or COMPUTE_SANITIZER, its path"
    ),
]
# A process begins in some five seconds.
TOGETHER = 3
SOME = [list(CALLS)[at : at + TOGETHER] for at in range(0, len(CALLS), TOGETHER)]


@pytest.mark.values
@pytest.mark.parametrize("names", SOME, ids=", ".join)
@pytest.mark.parametrize("tool", ["racecheck", "memcheck"])
def test_nothing_to_report(names: list[str], tool: str) -> None:
    command = [
        SANITIZER,
        "--tool",
        tool,
        "--error-exitcode",
        "3",
        sys.executable,
        "-m",
        "kit.alone.racecheck_calls",
        *names,
    ]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "SUMMARY: 0 " in done.stdout
