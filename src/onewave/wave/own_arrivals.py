"""Has every thread of a partition arrive at an mbarrier itself, where one would in the name of all.

Gluon's arrival, as of Triton 3.6, is one thread's, of whatever count, behind a barrier of its partition. That is right,
but compute-sanitizer's racecheck takes a word in shared memory for handed over only where the thread that wrote or read
it arrives itself. So where words are handed over, mbarriers count threads, and a kernel arrives with the number of all
that its partition has, or of all but the first, which has arrived when it told how many bytes are to come. It counts
the same without this change.
"""

from __future__ import annotations

import re

from onewave.wave.one_code import unexpected

__all__ = ["WARPGROUP_THREADS", "WARP_THREADS", "each_arrives"]

WARP_THREADS, WARPGROUP_THREADS = 32, 128

_ARRIVAL = re.compile(r"^\t@(%p\d+) (mbarrier\.arrive\.shared::cta\.b64 _, \[[^\]]+\]), (\d+);", re.MULTILINE)
_THREAD = re.compile(r"^\tmov\.u32\s+(%r\d+), %tid\.x;", re.MULTILINE)
_WHAT = "threads that each arrive"


def each_arrives(ptx: str) -> str:
    """A kernel's PTX in which each thread arrives where one did for all threads of its partition, or all others.

    Raises UnsupportedError if such an arrival is not the first thread's of so many, whatever else is the case.
    """

    def arrival(found: re.Match[str]) -> str:
        first, arrive, count = found[1], found[2], int(found[3])
        for threads in (WARP_THREADS, WARPGROUP_THREADS):
            if count in (threads, threads - 1):
                if not _is_first(ptx, first, threads):
                    raise unexpected(f"{found[0].strip()!r}, not always its partition's first thread's", _WHAT)
                return f"\t{arrive};" if count == threads else f"\t@!{first} {arrive};"
        return found[0]

    return _ARRIVAL.sub(arrival, ptx)


def _is_first(ptx: str, predicate: str, threads: int) -> bool:
    """Whether a predicate says of each thread, and nothing else, that it is the first of so many."""
    made = _made(ptx, predicate)
    place = re.fullmatch(r"setp\.eq\.b32 (%r\d+), 0", made.pop()) if len(made) == 1 else None
    if place is None:
        return False
    of_its_number = [{f"and.b32 {thread}, {threads - 1}"} for thread in _THREAD.findall(ptx)]
    return _made(ptx, place[1]) in of_its_number


def _made(ptx: str, register: str) -> set[str]:
    """What is written to a register anywhere: instructions and operands."""
    return {f"{what} {of}" for what, of in re.findall(rf"^\t(\S+)\s+{register}, (.*);", ptx, re.MULTILINE)}
