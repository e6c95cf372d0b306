"""Marks on copies of what is read once, in a compilation's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import Language

from onewave.wave import read_once
from onewave.wave.read_once import completed, mark_read_once, marked

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


def make_ptx(source: str, metadata: dict[str, Any]) -> str:
    metadata["name"] = source  # as Triton does, which reads it from the text
    return PTX


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of one that is to be marked."""
    monkeypatch.setattr(read_once, "_descriptors", {})
    mark_read_once("streaming", descriptors=2)
    return "streaming"


def test_that_kernel_is_marked_and_a_hook_that_was_there_is_called(kernel: str) -> None:
    called: list[tuple[Any, ...]] = []
    stages: dict[str, Callable[..., str]] = {"ptx": make_ptx}
    given = ("a backend", stages, "options", Language.GLUON, 90)
    completed(lambda *arguments: called.append(arguments))(*given)
    assert called == [given]
    assert copies(stages["ptx"](kernel, {})) == [True, True, True]
    assert copies(stages["ptx"]("another", {})) == [False, False, False]


@pytest.mark.parametrize("stages", [{}, {"ptx": make_ptx}])
def test_what_is_no_gluon_kernel_is_let_be(kernel: str, stages: dict[str, Callable[..., str]]) -> None:
    before = dict(stages)
    completed(None)("a backend", stages, "options", Language.TRITON, 90)
    assert stages == before


def test_a_compilation_without_ptx_is_let_be(kernel: str) -> None:
    stages: dict[str, Callable[..., str]] = {}
    completed(None)("a backend", stages, "options", Language.GLUON, None)
    assert stages == {}


def test_a_later_triton_is_told_what_the_hook_does() -> None:
    """From 3.7 on it calls the hook without arguments, before each launch and compilation."""
    key, digest = completed(None)()
    assert "read_once" in key
    assert len(digest) == 64
    assert completed(lambda: ("theirs", "1234"))() == (f"theirs{key}", f"1234{digest}")


def test_the_kernels_that_stream_are_marked() -> None:
    from onewave.ops.decode_attention import stream_impl  # noqa: F401
    from onewave.wave import kernel as wave  # noqa: F401

    assert read_once._descriptors == {"wave_kernel": 3, "stream_kernel": 2}
    assert knobs.runtime.add_stages_inspection_hook is not None
