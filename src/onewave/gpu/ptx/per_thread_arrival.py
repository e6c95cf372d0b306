"""Has every thread of a partition arrive at an mbarrier itself, where one would in the name of all.

Gluon's arrival, as of Triton 3.6, is one thread's, of whatever count, behind a barrier of its partition. That is right,
but compute-sanitizer's racecheck takes a word in shared memory for handed over only where the thread that wrote or read
it arrives itself. So where words are handed over, mbarriers count threads, and a kernel arrives with the number of all
that its partition has, or of all but the first, which has arrived when it told how many bytes are to come. It counts
the same without this change.
"""

from __future__ import annotations

import re

from onewave.gpu.ptx.shared_warpgroups import unexpected

__all__ = ["WARPGROUP_THREADS", "WARP_THREADS", "each_arrives"]

WARP_THREADS, WARPGROUP_THREADS = 32, 128

_ARRIVAL = re.compile(r"^\t@(%p\d+) (mbarrier\.arrive\.shared::cta\.b64 _, \[[^\]]+\]), (\d+);", re.MULTILINE)
_MADE = re.compile(r"^\t(\S+)\s+(%[pr]\d+), (.*);", re.MULTILINE)
_THREAD = re.compile(r"^\tmov\.u32\s+(%r\d+), %tid\.x;", re.MULTILINE)
_WHAT = "threads that each arrive"


def each_arrives(ptx: str) -> str:
    """A kernel's PTX in which each thread arrives where one did for all threads of its partition, or all others.

    Raises UnsupportedError if such an arrival is not the first thread's of so many, whatever else is the case.
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
