"""How much memory the host has left for this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["available_bytes"]

# Name of a control group's limit, of what it uses, and of the files among that, which give way: of versions 2 and 1.
_CURRENT = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be used before the kernel ends a process: what is free or can be taken back from files, within the
    limits of the process's control groups, and free swap. None where the system does not say (Linux does).

    root: where /proc and /sys lie.
    """
    try:
        host = _numbers(root / "proc/meminfo")
        rooms = [host["MemAvailable"] * 1024, *_rooms_of_groups(root)]
    except (OSError, ValueError, KeyError):
        return None
    return max(0, min(rooms)) + host.get("SwapFree", 0) * 1024


def _rooms_of_groups(root: Path) -> Iterator[int]:
    """What the limit of every control group that the process is in leaves."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
            group = top / path.lstrip("/")
            for directory in (group, *group.parents):
                if not directory.is_relative_to(top):
                    break
                # A group without a limit says "max", and one above the container can't be seen.
                with suppress(OSError, ValueError, KeyError):
                    yield _room(directory, *(_CURRENT if number == "0" else _OLD))


def _room(directory: Path, limit: str, used: str, files: tuple[str, str]) -> int:
    most, now = (int((directory / name).read_text()) for name in (limit, used))
    held = _numbers(directory / "memory.stat")
    return most - now + sum(held[name] for name in files)


def _numbers(path: Path) -> dict[str, int]:
    """The file's lines of a name and a number."""
    fields = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    return {name: int(number) for name, number, *_ in fields}
