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

_ALL = (WARP_THREADS, WARPGROUP_THREADS)
_ARRIVAL = re.compile(r"\t@(%p\d+) (mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\]), (\d+);")


def each_arrives(ptx: str) -> str:
    """A kernel's PTX in which each thread arrives where one did for all threads of its partition, or all others.

    Raises UnsupportedError if such an arrival depends on anything but which thread it is.
    """

    def arrival(found: re.Match[str]) -> str:
        first, arrive, count = found[1], found[2], int(found[3])
        if count not in _ALL and count + 1 not in _ALL:
            return found[0]
        made = re.findall(rf"^\t(\S+)\s+{first}, (?:%r\d+, )?(.*);", ptx, re.MULTILINE)
        if made != [("setp.eq.b32", "0")]:
            raise unexpected(
                f"{found[0].strip()!r}, not its first thread's whatever happens", "threads that each arrive"
            )
        return f"\t{arrive};" if count in _ALL else f"\t@!{first} {arrive};"

    return _ARRIVAL.sub(arrival, ptx)
