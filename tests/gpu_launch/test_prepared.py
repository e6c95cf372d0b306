"""Prepared calls, tested where Triton binds kernels instead of interpreting them: kit/alone/prepared_alone.py."""

import subprocess
import sys

from kit.paths import ROOT
from kit.processes import environment


def test_prepared_calls_launch_what_unprepared_ones_do() -> None:
    file = ROOT / "tests" / "kit" / "alone" / "prepared_alone.py"
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", str(file)]
    without_plugins = environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a second and a half to import
    done = subprocess.run(command, env=without_plugins, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
