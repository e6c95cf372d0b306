"""Threads that each arrive for themselves: as many arrivals as one thread would have counted."""

from __future__ import annotations

import pytest

from onewave.base.errors import UnsupportedError
from onewave.wave.own_arrivals import WARP_THREADS, WARPGROUP_THREADS, each_arrives

PTX = """
	and.b32 	%r2, %r1, 31;
	setp.eq.b32 	%p1, %r2, 0;
	setp.eq.b32 	%p2, %r2, 0;
	and.pred 	%p3, %p2, %p4;
	@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 16384;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3], 31;
	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r4], 32;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r5], 128;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r6], 127;
	@%p3 mbarrier.arrive.shared::cta.b64 _, [%r7];
	@%p3 mbarrier.arrive.shared::cta.b64 _, [%r7], 2;
"""


def test_each_thread_arrives_where_one_did_for_all_or_for_all_others() -> None:
    assert (WARP_THREADS, WARPGROUP_THREADS) == (32, 128)
    changed = {
        "	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3], 31;": "	@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];",
        "	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r4], 32;": "	mbarrier.arrive.shared::cta.b64 _, [%r4];",
        "	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r5], 128;": "	mbarrier.arrive.shared::cta.b64 _, [%r5];",
        "	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r6], 127;": "	@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r6];",
    }
    assert each_arrives(PTX).splitlines() == [changed.get(line, line) for line in PTX.splitlines()]
    assert each_arrives(each_arrives(PTX)) == each_arrives(PTX)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("[%r7], 2;", "[%r7], 32;"),  # of a condition more
        ("	setp.eq.b32 	%p1, %r2, 0;", "	setp.eq.b32 	%p1, %r2, 1;"),
        ("	setp.eq.b32 	%p1, %r2, 0;", "	setp.ne.b32 	%p1, %r2, 0;"),
        ("	setp.eq.b32 	%p1, %r2, 0;\n", ""),
        ("	and.pred 	%p3, %p2, %p4;", "	and.pred 	%p1, %p2, %p4;"),  # made twice
    ],
)
def test_an_arrival_that_depends_on_more_than_the_thread_is_refused(line: str, instead: str) -> None:
    assert line in PTX
    with pytest.raises(UnsupportedError, match=r"threads that each arrive: PTX of Triton .* with '@%p"):
        each_arrives(PTX.replace(line, instead))
