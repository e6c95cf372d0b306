"""Prepared calls, tested where Triton binds kernels instead of interpreting them: kit/alone/prepared_alone.py."""

from kit.paths import ROOT
from kit.processes import python


def test_prepared_calls_launch_what_unprepared_ones_do() -> None:
    file = ROOT / "tests" / "kit" / "alone" / "prepared_alone.py"
    # Plugins take a second and a half to import.
    assert "passed" in python("-m", "pytest", "-q", "--noconftest", str(file), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
