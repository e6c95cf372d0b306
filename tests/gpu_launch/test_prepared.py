"""Prepared calls, tested where Triton binds kernels instead of interpreting them: kit/alone/prepared_alone.py."""

from __future__ import annotations

import subprocess
import sys

from kit.paths import ROOT
from kit.processes import environment


def test_prepared_calls_launch_what_unprepared_ones_do() -> None:
    file = ROOT / "tests" / "kit" / "alone" / "prepared_alone.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "--noconftest", str(file)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
