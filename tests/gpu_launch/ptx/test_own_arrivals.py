"""Threads that each arrive for themselves: as many arrivals as one thread would have counted."""

import pytest

from onewave.base.errors import UnsupportedError
from onewave.gpu.ptx.per_thread_arrival import WARP_THREADS, WARPGROUP_THREADS, each_arrives

PTX = """
	mov.u32 	%r1, %tid.x;
	and.b32 	%r2, %r1, 31;
	setp.eq.b32 	%p1, %r2, 0;
	and.b32 	%r8, %r1, 127;
	setp.eq.b32 	%p2, %r8, 0;
	and.b32 	%r8, %r1, 127;
	and.pred 	%p3, %p1, %p4;
	@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 16384;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3], 31;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r4], 32;
	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r5], 128;
	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r6+8], 127;
	@%p3 mbarrier.arrive.shared::cta.b64 _, [%r7];
	@%p3 mbarrier.arrive.shared::cta.b64 _, [%r7], 2;
"""


def test_each_thread_arrives_where_one_did_for_all_or_for_all_others() -> None:
    assert (WARP_THREADS, WARPGROUP_THREADS) == (32, 128)
    arrive = "mbarrier.arrive.shared::cta.b64 _,"
    changed = {
        f"	@%p1 {arrive} [%r3], 31;": f"	@!%p1 {arrive} [%r3];",
        f"	@%p1 {arrive} [%r4], 32;": f"	{arrive} [%r4];",
        f"	@%p2 {arrive} [%r5], 128;": f"	{arrive} [%r5];",
        f"	@%p2 {arrive} [%r6+8], 127;": f"	@!%p2 {arrive} [%r6+8];",
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
        ("	and.pred 	%p3, %p1, %p4;", "	and.pred 	%p1, %p1, %p4;"),  # made twice
        ("	and.b32 	%r2, %r1, 31;", "	or.b32 	%r2, %r1, %r9;"),
        ("	and.b32 	%r2, %r1, 31;", "	and.b32 	%r2, %r1, 31;\n	or.b32 	%r2, %r2, %r9;"),
        ("	and.b32 	%r2, %r1, 31;", "	and.b32 	%r2, %r9, 31;"),  # of something else
        ("[%r4], 32;", "[%r4], 128;"),  # a warp of so many
        ("[%r5], 128;", "[%r5], 32;"),
    ],
)
def test_an_arrival_that_depends_on_more_than_the_thread_is_refused(line: str, instead: str) -> None:
    assert line in PTX
    with pytest.raises(UnsupportedError, match=r"threads that each arrive: PTX of Triton .* with '@%p"):
        each_arrives(PTX.replace(line, instead))
