"""Python processes that a test starts, and in its own Ctrl-C and a clock that stands still."""

import os
import subprocess
import sys
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace

import pytest


def python(*arguments: str, **variables: str) -> str:
    """Run Python in a process of its own, without Triton's interpreter; return what it prints.

    variables: of its environment, beside or instead of those here.
    """
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def environment() -> dict[str, str]:
    """The environment of such a process: it can import what is imported here."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}


def is_interrupted(work: Callable[[], object], place: int, files: Collection[str]) -> bool:
    """Do the work, with Ctrl-C at the place-th of the moments in these files when it can come: where a function begins,
    and after a call. Returns whether there was such a moment."""
    left = place

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    try:
        sys.setprofile(look)
        work()
    except KeyboardInterrupt:
        assert left == 0
    finally:
        sys.setprofile(None)
    return left <= 0


def count_looks(monkeypatch: pytest.MonkeyPatch, step_s: float, *modules: ModuleType) -> None:
    """Have a clock that these modules share go on by `step_s` whenever one looks at it, and not otherwise: they get as
    far within a time limit on any machine."""
    looks = count()

    def look() -> float:
        return next(looks) * step_s

    for module in modules:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=look, perf_counter=look))
