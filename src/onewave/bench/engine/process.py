"""Python in new processes, for what is measured as users meet it."""

import os
from pathlib import Path

from onewave.base.settings import child_environment

_SOURCES = str(Path(__file__).parents[3])


def environment(changes: dict[str, str]) -> dict[str, str]:
    """This process's environment, changed, with our sources on the path."""
    made = child_environment(changes)
    return made | {"PYTHONPATH": os.pathsep.join(filter(None, (_SOURCES, made.get("PYTHONPATH"))))}


def last_words(text: str, most: int = 200) -> str:
    """The last line that says something, cut; empty where there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:most] if lines else ""
