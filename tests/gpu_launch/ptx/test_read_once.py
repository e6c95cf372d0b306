"""Marks on copies of what is read once, in a compilation's text."""

import pytest

from onewave.gpu.ptx.evict_first import evict_first, marked
from onewave.gpu.ptx.passes import passes_of

COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
PTX = f"""
.visible .entry streaming(
	.param .align 64 .b8 streaming_param_0[128],
	.param .u32 streaming_param_1,
	.param .align 64 .b8 streaming_param_5[128]
)
	mov.b64 	%rd40, streaming_param_0;
	mov.b64 	%rd43, streaming_param_5;
	cvta.param.u64 	%rd4, %rd40;
	cvta.param.u64 	%rd5, %rd43;
	@%p104 {COPY} [%r549], [%rd4, {{%r550, %r1356}}], [%r548];
	@%p1 {COPY} [%r551], [%rd5, {{%r550, %r552}}], [%r548];
	{COPY} [%r551], [%rd5, {{%r550, %r552}}], [%r548];
"""


def copies(ptx: str) -> list[bool]:
    """Whether each copy is marked."""
    return ["L2::cache_hint" in line for line in ptx.splitlines() if COPY in line]


@pytest.mark.parametrize(("descriptors", "expected"), [(1, [True, False, False]), (2, [True, True, True])])
def test_copies_by_the_first_descriptors_are_marked(descriptors: int, expected: list[bool]) -> None:
    found = marked(PTX, descriptors)
    assert copies(found) == expected
    # A copy keeps its predicate and its operands, and gets the policy as one more.
    assert f"@%p104 {COPY}.L2::cache_hint [%r549], [%rd4, {{%r550, %r1356}}], [%r548], once; }}" in found
    assert found.count("createpolicy.fractional.L2::evict_first.b64") == sum(expected)


def test_other_text_stays_as_it_is() -> None:
    text = PTX.replace(COPY, "cp.async.cg.shared.global")
    assert marked(text, 2) == text
    assert marked("", 3) == ""


def test_the_kernels_that_stream_are_marked() -> None:
    step = passes_of("onewave.wave.kernel.kernel", "wave_kernel")
    stream = passes_of("onewave.ops.decode_attention.hopper.kernel", "stream_kernel")
    assert [each.name for each in (*step, *stream)] == ["evict_first(3)", "evict_first(2)"]
    assert copies(stream[0].change(PTX)) == [True, True, True]


def test_a_mark_is_put_on_the_first_descriptors_alone() -> None:
    assert copies(evict_first(descriptors=1).change(PTX)) == [True, False, False]
