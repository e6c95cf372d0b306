"""Findings of ptx_arrivals, on kernels of a few lines; real ones are asked where they are compiled."""

import pytest

from kit.analysers.ptx_arrivals import early_arrivals

# A loop whose last statement is an access: the arrival at its head may come after it, whatever stands before the loop.
KERNEL = """
.visible .entry kernel() {{
	bar.sync 	0, 128;
$L__BB0_1:                              // the loop
	{barrier}
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];
	mbarrier.try_wait.parity.shared.b64 complete, [%r2], %r3;
	@!complete bra.uni waitLoop;
	{access}
	@%p2 bra 	$L__BB0_1;
	bar.sync 	0, 128;
	ret;
}}
"""
WORKERS = """
	ld.shared.b8 	%r1, [%r2];
	$L_brx_0: .branchtargets
		$L__BB0_1,
		$L__BB0_2;
	brx.idx 	%r1, $L_brx_0;
$L__BB0_1:
	ld.shared.b32 	%r3, [%r4];
	bar.sync 	2, 128;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r5];
	ret;
$L__BB0_2:
	ld.shared.b32 	%r3, [%r4];
	bar.warp.sync 	-1;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r6];
	ret;
"""
ACCESSES = [
    "ld.shared.b32 	%r4, [%r5];",
    "st.shared.b32 	[%r5], 0;",
    "wgmma.wait_group.sync.aligned 0;",
    "cp.async.bulk.wait_group.read 	0;",
]


@pytest.mark.parametrize("access", ACCESSES)
def test_an_arrival_that_a_loop_brings_back_after_an_access_is_found(access: str) -> None:
    [found] = early_arrivals(KERNEL.format(barrier="", access=access))
    assert "mbarrier.arrive.shared::cta.b64 _, [%r1]" in found
    assert early_arrivals(KERNEL.format(barrier="bar.sync 	0, 128;", access=access)) == []


def test_a_warps_barrier_is_none_of_four_warps() -> None:
    assert early_arrivals(KERNEL.format(barrier="bar.warp.sync 	-1;", access=ACCESSES[0]))


def test_each_partition_is_looked_at_by_its_own_warps() -> None:
    assert early_arrivals(WORKERS) == []
    [found] = early_arrivals(WORKERS.replace("bar.warp.sync 	-1;", ""))
    assert "[%r6]" in found
    [found] = early_arrivals(WORKERS.replace("bar.sync 	2, 128;", ""))
    assert "[%r5]" in found
