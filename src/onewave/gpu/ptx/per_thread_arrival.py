"""Lets every thread of a partition arrive at an mbarrier itself, where one thread would arrive for all (decision 0012).

Gluon's arrival, as of Triton 3.6, is made by one thread, with any count, behind a barrier of its partition. That is
right, but compute-sanitizer's racecheck accepts a hand-off in shared memory only from the thread that wrote or read the
word. So mbarriers of such hand-offs count threads. A kernel arrives with the number of all threads of its partition, or
of all but the first, which has arrived when it announced the bytes to come. The count is the same without this pass.
"""

from __future__ import annotations

import re

from onewave.gpu.ptx.ptx_pass import PtxPass
from onewave.gpu.ptx.shared_warpgroups import unexpected

WARP_THREADS, WARPGROUP_THREADS = 32, 128

_ARRIVAL = re.compile(r"^\t@(%p\d+) (mbarrier\.arrive\.shared::cta\.b64 _, \[[^\]]+\]), (\d+);", re.MULTILINE)
_MADE = re.compile(r"^\t(\S+)\s+(%[pr]\d+), (.*);", re.MULTILINE)
_THREAD = re.compile(r"^\tmov\.u32\s+(%r\d+), %tid\.x;", re.MULTILINE)
_WHAT = "threads that each arrive"


def each_arrives(ptx: str) -> str:
    """Let each thread arrive where one did for all threads of its partition, or for all others.

    Raises UnsupportedError if such an arrival is not made by the partition's first thread alone.
    """
    made: dict[str, set[str]] = {}
    for instruction, register, operands in _MADE.findall(ptx):
        made.setdefault(register, set()).add(f"{instruction} {operands}")
    numbers: list[str] = _THREAD.findall(ptx)

    def is_first(predicate: str, threads: int) -> bool:
        """Whether a predicate says of each thread, and nothing else, that it is the first of so many."""
        tests: set[str] = made.get(predicate, set())
        place = re.fullmatch(r"setp\.eq\.b32 (%r\d+), 0", next(iter(tests))) if len(tests) == 1 else None
        return place is not None and made.get(place[1]) in [{f"and.b32 {n}, {threads - 1}"} for n in numbers]

    def arrival(found: re.Match[str]) -> str:
        first, arrive, count = found[1], found[2], int(found[3])
        for threads in (WARP_THREADS, WARPGROUP_THREADS):
            if count in (threads, threads - 1):
                if not is_first(first, threads):
                    raise unexpected(f"{found[0].strip()!r}, not always its partition's first thread's", _WHAT)
                return f"\t{arrive};" if count == threads else f"\t@!{first} {arrive};"
        return found[0]

    return _ARRIVAL.sub(arrival, ptx)


PER_THREAD_ARRIVAL = PtxPass("per_thread_arrival", "3.6", each_arrives)
