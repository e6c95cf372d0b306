"""How much memory is left, by what Linux says of it."""

from pathlib import Path

import pytest

from onewave.memory.host import available_bytes

MIB = 2**20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 800 MiB available, no swap and no limits."""
    write(tmp_path / "proc/meminfo", "MemTotal: 1024000 kB\nMemAvailable:  819200 kB\nSwapFree: 0 kB\nHugePages: 0\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit(group: Path, names: tuple[str, str], most: object, used: int, stat: str) -> None:
    for name, value in zip(names, (most, used), strict=True):
        write(group / name, f"{value}\n")
    write(group / "memory.stat", stat)


def current(group: Path, most: object, used: int, files: int = 0) -> None:
    stat = f"anon 5\nactive_file {files}\ninactive_file 0\n"
    limit(group, ("memory.max", "memory.current"), most, used, stat)


def test_without_a_limit_all_that_is_available_is_left(root: Path) -> None:
    assert available_bytes(root) == 800 * MIB
    current(root / "sys/fs/cgroup", "max", 3)
    assert available_bytes(root) == 800 * MIB


def test_the_tightest_group_above_the_process_counts_and_cached_files_give_way(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/outer/inner\n")
    current(root / "sys/fs/cgroup/outer/inner", 500 * MIB, 100 * MIB)
    assert available_bytes(root) == 400 * MIB
    current(root / "sys/fs/cgroup/outer", 300 * MIB, 200 * MIB, files=50 * MIB)
    assert available_bytes(root) == 150 * MIB


@pytest.mark.parametrize("seen", ["", "a/group"])
def test_groups_of_the_first_version_count_too_also_where_a_container_sees_only_its_own(root: Path, seen: str) -> None:
    write(root / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/a/group\n0::/\n")
    stat = f"active_file 1\ntotal_active_file {MIB}\ntotal_inactive_file {MIB}\n"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit(root / "sys/fs/cgroup/memory" / seen, names, 64 * MIB, 60 * MIB, stat)
    assert available_bytes(root) == 6 * MIB


def test_free_swap_counts_and_an_overdrawn_limit_is_no_debt(root: Path) -> None:
    write(root / "proc/meminfo", "MemAvailable: 819200 kB\nSwapFree: 1024 kB\n")
    assert available_bytes(root) == 801 * MIB
    current(root / "sys/fs/cgroup", MIB, 2 * MIB)
    assert available_bytes(root) == MIB


@pytest.mark.parametrize(("most", "left"), [(0, 400), (64 * MIB, 404), (50 * MIB, 400), ("max", 1424)])
def test_a_groups_limit_of_swap_holds_however_much_the_host_has(root: Path, most: object, left: int) -> None:
    write(root / "proc/meminfo", f"MemAvailable: 819200 kB\nSwapFree: {2**20} kB\n")
    write(root / "proc/self/cgroup", "0::/outer/inner\n")
    current(root / "sys/fs/cgroup/outer", 500 * MIB, 110 * MIB, files=10 * MIB)
    write(root / "sys/fs/cgroup/outer/memory.swap.max", f"{most}\n")
    write(root / "sys/fs/cgroup/outer/memory.swap.current", f"{60 * MIB}\n")
    assert available_bytes(root) == left * MIB


@pytest.mark.parametrize(("most", "left"), [(500 * MIB, 380), (600 * MIB, 480), (2**63 - 4096, 1424)])
def test_groups_of_the_first_version_limit_memory_and_swap_together(root: Path, most: int, left: int) -> None:
    write(root / "proc/meminfo", f"MemAvailable: 819200 kB\nSwapFree: {2**20} kB\n")
    write(root / "proc/self/cgroup", "4:memory:/\n")
    group = root / "sys/fs/cgroup/memory"
    stat = f"total_active_file {4 * MIB}\ntotal_inactive_file {6 * MIB}\n"
    limit(group, ("memory.limit_in_bytes", "memory.usage_in_bytes"), 500 * MIB, 110 * MIB, stat)
    limit(group, ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"), most, 130 * MIB, stat)
    assert available_bytes(root) == left * MIB


def test_a_system_that_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
