"""Marks on copies of what is read once, in a compilation's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from triton import knobs

from onewave.wave.read_once import mark_read_once, marked

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
    """Of each copy, whether it is marked."""
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


def test_one_kernel_is_marked_and_a_hook_that_was_there_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "add_stages_inspection_hook", lambda backend, stages, *others: called.append(backend)
    )
    mark_read_once("streaming", descriptors=2)

    def make_ptx(source: str, metadata: dict[str, Any]) -> str:
        metadata["name"] = source  # as Triton does, which reads it from the text
        return PTX

    stages: dict[str, Callable[..., str]] = {"ptx": make_ptx}
    knobs.runtime.add_stages_inspection_hook("a backend", stages, None, None, 90)
    assert called == ["a backend"]
    assert copies(stages["ptx"]("streaming", {})) == [True, True, True]
    assert copies(stages["ptx"]("another", {})) == [False, False, False]


def test_a_compilation_without_ptx_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    mark_read_once("streaming", descriptors=2)
    stages: dict[str, Callable[..., str]] = {}
    knobs.runtime.add_stages_inspection_hook("a backend", stages, None, None, None)
    assert stages == {}
