"""Python processes that a test starts, and Ctrl-C in its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType


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
