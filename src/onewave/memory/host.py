"""How much memory the host has left for this process."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Names of a control group's limit, of what it uses, and of the files among that, which give way: of versions 2 and 1.
_CURRENT = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_OLD_FILES = ("total_active_file", "total_inactive_file")
_OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", _OLD_FILES)
# The same of swap, which version 1 counts together with memory.
_CURRENT_SWAP = ("memory.swap.max", "memory.swap.current", ())
_OLD_BOTH = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes", _OLD_FILES)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be used before the kernel ends a process: what is free or can be taken back from files, and free
    swap, both within the limits of the process's control groups. None where the system does not say (Linux does).

    root: where /proc and /sys lie.
    """
    try:
        host = _numbers(root / "proc/meminfo")
        memory, swap = [host["MemAvailable"] * 1024], [host.get("SwapFree", 0) * 1024]
        both: list[int] = []
        for group, current in _groups(root):
            memory += _room(group, *(_CURRENT if current else _OLD))
            swap += _room(group, *_CURRENT_SWAP) if current else []
            both += [] if current else _room(group, *_OLD_BOTH)
    except (OSError, ValueError, KeyError):
        return None
    return max(0, min([max(0, min(memory)) + max(0, min(swap)), *both]))


def _groups(root: Path) -> Iterator[tuple[Path, bool]]:
    """Every memory group that the process is in, and whether it is of version 2."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
            group = top / path.lstrip("/")
            for directory in (group, *group.parents):
                if not directory.is_relative_to(top):
                    break
                yield directory, number == "0"


def _room(directory: Path, limit: str, used: str, files: tuple[str, ...]) -> list[int]:
    """Return the bytes that a limit leaves; nothing where there is none."""
    # A group without a limit says "max", and one above the container can't be seen.
    with suppress(OSError, ValueError, KeyError):
        most, now = (int((directory / name).read_text()) for name in (limit, used))
        held = _numbers(directory / "memory.stat")
        return [most - now + sum(held[name] for name in files)]
    return []


def _numbers(path: Path) -> dict[str, int]:
    """The file's lines of a name and a number."""
    fields = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    return {name: int(number) for name, number, *_ in fields}
