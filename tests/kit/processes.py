"""Python processes that a test starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(*arguments: str, text: str = "") -> str:
    """Run Python in a process of its own, without Triton's interpreter; return what it prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment(), input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def environment() -> dict[str, str]:
    """Of such a process: what is imported here it can import."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
